"""The renderer of GitHub annotations: workflow commands that a step prints (`::error file=...,line=...::...`).

GitHub shows ten annotations of a kind for a step and silently drops the others, so at most ten are made, the worst
first, and the last one says how many more there are. One more line, which is no command, gives the verdict for readers
of the log. Escapes: docs.github.com, "Workflow commands", as the runner decodes them (ActionCommand.cs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ampdoctor.evidence.report import Finding, Report, Severity
from ampdoctor.reports import text as words
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.text import Location, in_repository, location_of, target_file

MAX_ANNOTATIONS = 10
_TOLD = ("where", "change", "proof")
_LEVELS: dict[Severity, Literal["error", "warning", "notice"]] = {
    "error": "error",
    "warning": "warning",
    "note": "notice",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotation:
    level: Literal["error", "warning", "notice"]
    at: Location
    title: str
    message: tuple[str, ...]

    def line(self, target: Mapping[str, Any], more: int = 0) -> str:
        at = in_repository(self.at, target)
        known = {"file": at.file, "line": at.line, "title": self.title}
        properties = ",".join(f"{key}={_property(str(value))}" for key, value in known.items() if value is not None)
        message = [*self.message, f"and {more} more: the whole report has them"] if more else self.message
        return f"::{self.level} {properties}::{_data(chr(10).join(map(sanitise, message)))}\n"


def render_github(report: Report, _: RenderOptions | None = None) -> str:
    """Return workflow commands, one a line, and a line with the verdict."""
    without_answer = list(_without_answer(report))
    found = report.findings[: MAX_ANNOTATIONS - len(without_answer)]
    shown = [*without_answer, *(_of_finding(finding, report) for finding in found)]
    rest = len(report.findings) - len(found)
    target = report.target
    lines = [one.line(target, rest if index == len(shown) - 1 else 0) for index, one in enumerate(shown)]
    return "".join(lines) + f"ampdoctor {report.command}: {sanitise(words.verdict(report))}\n"


def _without_answer(report: Report) -> Iterator[_Annotation]:
    """Yield what could not be examined or settled; it comes before the findings, since it decides the exit code."""
    about = Location(target_file(report.target))
    if not report.complete:
        parts = tuple(f"{error.what} ({error.kind}): {error.message}" for error in report.errors)
        yield _Annotation(level="error", at=about, title="ampdoctor: not examined", message=parts)
    if report.verdict in ("not_reproduced", "inconclusive"):
        yield _Annotation(level="error", at=about, title="ampdoctor: no answer", message=(words.verdict(report),))


def _of_finding(finding: Finding, report: Report) -> _Annotation:
    return _Annotation(
        level=_LEVELS[finding.severity],
        at=location_of(finding, report.target),
        title=f"{finding.code} {finding.name}",
        message=(finding.message, *(f"{at}: {line}" for at, line in words.told(finding).items() if at in _TOLD)),
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(sanitise(text)).replace(":", "%3A").replace(",", "%2C")
