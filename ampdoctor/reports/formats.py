"""The forms of a report, by their name in `--format`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias, cast

from ampdoctor.evidence.report import Report

if TYPE_CHECKING:
    from rich.console import Console


Color = Literal["auto", "always", "never"]
_COLORS: Mapping[Color, Literal["auto", "standard"] | None] = {"auto": "auto", "always": "standard", "never": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Where a report is shown, and in how much detail; forms for programs ignore it."""

    width: int  # in columns
    stream: TextIO | None = None  # decides on terminal and encoding, and is not written to; None: a file
    color: Color = "auto"  # auto: colour on a terminal, as `NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` say
    quiet: bool = False  # only findings, and what could not be examined
    verbose: int = 0  # from 1 on: everything in full, as in `render_human`
    made_at: float | None = None  # when the report was made, in seconds since 1970; None where that is not known

    def draw(self, show: Callable[[Console], None]) -> str:
        """Return what `show` prints to a console like this one."""
        # Rich writes to its stream even while it captures, so it gets a buffer with the stream's properties. Characters
        # that the stream's encoding lacks are replaced by others.
        from rich.console import Console

        auto = False if self.stream is None else None
        console = Console(
            file=_Buffer(self.stream),
            width=self.width,
            height=1,  # both are given, since Rich trusts any COLUMNS and LINES
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
    """A buffer with the stream's encoding that is a terminal if the stream is one; files are written in UTF-8."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self.encoding = getattr(stream, "encoding", None) or self.encoding
        self._terminal = stream is not None and stream.isatty()

    def isatty(self) -> bool:
        return self._terminal


Renderer: TypeAlias = Callable[[Report, RenderOptions], str]
"""One form of a report: returns the whole text; the same report and options give the same bytes."""

FORMATS: Mapping[str, str] = {
    "human": "human.render",
    "json": "json_report.render_json",
    "jsonl": "json_report.render_jsonl",
    "markdown": "github.render_markdown",
    "github": "github.render_github",
    "junit": "junit.render_junit",
    "sarif": "sarif.render_sarif",
    "html": "html_report.render_html",
}
"""The module and function of each form, in the order in which they are listed."""

if TYPE_CHECKING:
    ReportFormat: TypeAlias = str
else:
    ReportFormat = Literal[tuple(FORMATS)]  # the choices of an option


def renderer(form: ReportFormat) -> Renderer:
    """Return the renderer of a form; it is imported now, since most runs need only one."""
    module, _, function = FORMATS[form].partition(".")
    return cast("Renderer", getattr(import_module(f"ampdoctor.reports.{module}"), function))
