"""The forms that a report can have, by the name that `--format` takes; one renderer a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, TypeAlias, cast

from ampdoctor.evidence.report import Report

if TYPE_CHECKING:
    from rich.console import Console


# The place that a report is drawn for.


Color = Literal["auto", "always", "never"]
_COLORS: Mapping[Color, Literal["auto", "standard"] | None] = {"auto": "auto", "always": "standard", "never": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """The place that a report is drawn for, and how much of it is wanted there; forms for programs do not ask.

    Attributes:
        width: Columns.
        stream: What it is like: whether it is a terminal, and its encoding. It is not written to. None: a file.
        color: Whether there is any; auto: on a terminal, as `NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` have it.
        quiet: Show the findings, and what could not be examined, only.
        verbose: From 1 on also nested evidence, every alternative that was tried, every check, and each of many alike
            findings in full.
    """

    width: int
    stream: TextIO | None = None
    color: Color = "auto"
    quiet: bool = False
    verbose: int = 0

    def draw(self, show: Callable[[Console], None]) -> str:
        """Return what `show` prints to a console that is like this place.

        Rich writes to the stream that it is given even while it captures, so it is given a buffer and the stream's
        traits, its encoding among them: what has no place in it is drawn with other characters.
        """
        from rich.console import Console

        auto = False if self.stream is None else None
        console = Console(
            file=_Buffer(self.stream),
            width=self.width,
            height=1,  # both given, for Rich believes COLUMNS and LINES whatever they say
            force_terminal={"auto": auto, "always": True, "never": False}[self.color],
            color_system=_COLORS[self.color],
            no_color={"auto": None, "always": False, "never": True}[self.color],
            legacy_windows=False,
            highlight=False,
            markup=False,
            emoji=False,
        )
        with console.capture() as capture:
            show(console)
        return "\n".join(line.rstrip(" ") for line in capture.get().split("\n"))  # table cells are padded


class _Buffer(io.StringIO):
    """A buffer that is, of itself, a terminal and of an encoding where the stream is; files are written in UTF-8."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self.encoding = getattr(stream, "encoding", None) or self.encoding
        self._terminal = stream is not None and stream.isatty()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._terminal


# The seam between a report and the forms that it can have.


class Renderer(Protocol):
    """One form of a report. It is a seam so that whoever writes a report need not know which forms there are."""

    def __call__(self, report: Report, canvas: Canvas, /) -> str:
        """Return the whole text, byte for byte the same for the same report and canvas."""


def the_same_everywhere(render: Callable[[Report], str]) -> Renderer:
    """Return the renderer of a form that takes no account of where its text goes."""

    def renderer(report: Report, _canvas: Canvas, /) -> str:
        return render(report)

    return renderer


FORMATS: Mapping[str, str] = {
    "human": "human",
    "json": "json_report",
    "jsonl": "jsonl",
    "markdown": "markdown",
    "github": "github",
    "junit": "junit",
    "sarif": "sarif",
    "html": "html_report",
}
"""The file of each, whose `RENDERER` it is; in the order in which they are offered."""

if TYPE_CHECKING:
    ReportFormat: TypeAlias = str
else:
    ReportFormat = Literal[tuple(FORMATS)]  # the choices of an option


def renderer(form: ReportFormat) -> Renderer:
    """Return what renders a form, loaded now: most runs need one of them."""
    return cast("Renderer", import_module(f"ampdoctor.reports.{FORMATS[form]}").RENDERER)
