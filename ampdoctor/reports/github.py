"""The renderer of GitHub annotations: workflow commands that a step prints (`::error file=...,line=...::...`).

GitHub shows ten annotations of a kind for a step and silently drops the others, so at most ten are made, the worst
first, and the last one says how many more there are. One more line, which is no command, gives the verdict for readers
of the log. Escapes: docs.github.com, "Workflow commands", as the runner decodes them (ActionCommand.cs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ampdoctor.evidence.report import Finding, Report, Severity
from ampdoctor.reports import text as words
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.text import Location, in_repository, location_of, target_file

MAX_ANNOTATIONS = 10
_TOLD = ("where", "change", "proof")
_LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def render_github(report: Report, _: RenderOptions | None = None) -> str:
    """Return workflow commands, one a line, and a line with the verdict."""
    unanswered = list(_without_answer(report))
    found = report.findings[: MAX_ANNOTATIONS - len(unanswered)]
    rest = len(report.findings) - len(found)
    more = [f"and {rest} more: the whole report has them"] if rest else []
    told = [_of_finding(one, report, more if at == len(found) else ()) for at, one in enumerate(found, 1)]
    return "".join([*unanswered, *told]) + f"ampdoctor {report.command}: {sanitise(words.verdict(report))}\n"


def _without_answer(report: Report) -> Iterator[str]:
    """Yield what could not be examined or settled; it comes before the findings, since it decides the exit code."""
    about = Location(target_file(report.target))
    if not report.complete:
        parts = [f"{error.what} ({error.kind}): {error.message}" for error in report.errors]
        yield _command("error", about, "ampdoctor: not examined", parts, report.target)
    if report.verdict in ("not_reproduced", "inconclusive"):
        yield _command("error", about, "ampdoctor: no answer", [words.verdict(report)], report.target)


def _of_finding(finding: Finding, report: Report, more: Iterable[str]) -> str:
    said = [finding.message, *(f"{at}: {line}" for at, line in words.told(finding).items() if at in _TOLD), *more]
    at, title = location_of(finding, report.target), f"{finding.code} {finding.name}"
    return _command(_LEVELS[finding.severity], at, title, said, report.target)


def _command(level: str, at: Location, title: str, message: Iterable[str], target: Mapping[str, Any]) -> str:
    placed = in_repository(at, target)
    known = {"file": placed.file, "line": placed.line, "title": title}
    properties = ",".join(f"{key}={_property(str(value))}" for key, value in known.items() if value is not None)
    return f"::{level} {properties}::{_data(chr(10).join(map(sanitise, message)))}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(sanitise(text)).replace(":", "%3A").replace(",", "%2C")
