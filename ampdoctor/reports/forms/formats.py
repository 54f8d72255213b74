"""The forms that a report can have, by the name that `--format` takes; one renderer a file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from ampdoctor.reports.forms.renderer import Renderer

FORMATS: Mapping[str, str] = {
    "human": "human",
    "json": "to_json",
    "jsonl": "to_jsonl",
    "markdown": "to_markdown",
    "github": "to_github",
    "junit": "to_junit",
    "sarif": "to_sarif",
    "html": "to_html",
}
"""The file of each, whose `RENDERER` it is; in the order in which they are offered."""

if TYPE_CHECKING:
    ReportFormat: TypeAlias = str
else:
    ReportFormat = Literal[tuple(FORMATS)]  # the choices of an option


def renderer(form: ReportFormat) -> Renderer:
    """Return what renders a form, loaded now: most runs need one of them."""
    return cast("Renderer", import_module(f"ampdoctor.reports.forms.{FORMATS[form]}").RENDERER)
