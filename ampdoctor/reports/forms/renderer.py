"""The seam between a report and the forms that it can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ampdoctor.evidence.report import Report
from ampdoctor.reports.forms.canvas import Canvas


class Renderer(Protocol):
    """One form of a report. It is a seam so that whoever writes a report need not know which forms there are."""

    def __call__(self, report: Report, canvas: Canvas, /) -> str:
        """Return the whole text, byte for byte the same for the same report and canvas."""


def the_same_everywhere(render: Callable[[Report], str]) -> Renderer:
    """Return the renderer of a form that takes no account of where its text goes."""

    def renderer(report: Report, _canvas: Canvas, /) -> str:
        return render(report)

    return renderer
