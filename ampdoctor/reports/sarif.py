"""The SARIF 2.1.0 renderer, for code-scanning services.

GitHub refuses a whole file if one result has no physical location, so each has one: the user's source line if known,
else line 1 of the checkpoint's file, with the tensor as a logical location. It takes 25 000 results a run
(docs.github.com, "SARIF support for code scanning"): the worst are kept, and a notification says how many are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import quote

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.evidence.report import Finding, Report, Severity
from ampdoctor.package import version
from ampdoctor.reports import text as words
from ampdoctor.reports.escape import prose, sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.json_report import strict_json
from ampdoctor.reports.text import Location, in_repository, location_of

MAX_RESULTS = 25_000
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT, _REPOSITORY = "ROOT", "%SRCROOT%"  # bases of URIs: the machine's root for other files, and the repository
_PROBLEM: Mapping[Severity, str] = {"error": "error", "warning": "warning", "note": "recommendation"}
"""GitHub's `problem.severity`; SARIF's own `level` has our three words."""

_Object: TypeAlias = dict[str, Any]


def render_sarif(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as SARIF 2.1.0: one run, one result for each finding."""
    results = list(_results(report))
    kept = min(len(results), MAX_RESULTS)
    driver = {"name": "ampdoctor", "version": version(), "semanticVersion": version(), "rules": _rules(report)}
    notes = _notifications(report, len(results) - kept)
    run: _Object = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {_ROOT: {"uri": "file:///"}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": report.complete, "toolExecutionNotifications": notes}],
        "results": results[:kept],
        "properties": {"command": report.command, "verdict": report.verdict},
    }
    return strict_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rules(report: Report) -> list[_Object]:
    """Return each code that a result uses, with its page of the catalogue; its level is that of its worst finding."""
    first: dict[str, _Object] = {}
    for finding in (*report.findings, *(one.finding for one in report.suppressed)):
        if finding.code not in first:
            first[finding.code] = _rule_of(finding)
    return [rule for _, rule in sorted(first.items())]


def _rule_of(finding: Finding) -> _Object:
    rule = rules().get(finding.code)
    if rule is not None:
        title, meaning, sections = rule.title, rule.page.texts["meaning"], rule.page.sections
    else:  # a saved report of another version
        title = finding.name.replace("-", " ").capitalize()
        meaning, sections = f"{title}.", (("What to do", finding.help or "Read the finding."),)
    return {
        "id": finding.code,
        "name": "".join(word.capitalize() for word in finding.name.split("-")),
        "shortDescription": {"text": sanitise(title)},
        "fullDescription": {"text": sanitise(meaning)},
        "help": {
            "text": "\n\n".join(f"{heading}: {sanitise(text)}" for heading, text in sections),
            "markdown": "\n\n".join(f"**{heading}.** {prose(text)}" for heading, text in sections),
        },
        "defaultConfiguration": {"level": finding.severity},
        "properties": {"tags": ["mixed-precision"], "problem.severity": _PROBLEM[finding.severity]},
    }


def _results(report: Report) -> Iterable[_Object]:
    """Yield a result for each finding, worst first, and for suppressed ones."""
    # Fixed entries of the baseline have none: GitHub treats each result as an open alert, and a missing one as fixed.
    compared = report.baseline is not None
    for finding in report.findings:
        yield _result(finding, report) | ({"baselineState": "new"} if compared else {})
    for one in report.suppressed:
        accepted = {"kind": "external", "status": "accepted", "justification": sanitise(one.reason)}
        known = {"baselineState": "unchanged"} if one.by == "baseline" else {}
        yield _result(one.finding, report) | {"suppressions": [accepted]} | known


def _result(finding: Finding, report: Report) -> _Object:
    where, at = finding.where, in_repository(location_of(finding, report.target), report.target)
    return {
        "ruleId": finding.code,
        "level": finding.severity,
        "message": {"text": "\n".join(map(sanitise, _sentences(finding)))},
        "locations": [_location(at, where.module, where.tensor)],
        # GitHub's own, a hash of line 1, is the same for all findings on a checkpoint
        "partialFingerprints": dict.fromkeys(("ampdoctor/v1", "primaryLocationLineHash"), finding.fingerprint),
    }


def _sentences(finding: Finding) -> Iterable[str]:
    yield finding.message
    for label, line in words.told(finding).items():
        yield line if label == "help" else f"{label.capitalize()}: {line}"


def _location(at: Location, module: str, tensor: str | None) -> _Object:
    base, uri = _uri(at.file)
    location: _Object = {
        "physicalLocation": {"artifactLocation": {"uri": uri, "uriBaseId": base}, "region": {"startLine": at.line or 1}}
    }
    named = [(kind, sanitise(name)) for kind, name in (("module", module), ("member", tensor)) if name]
    logical = [
        {"kind": kind, "name": name.rpartition(".")[2] or name, "fullyQualifiedName": name} for kind, name in named
    ]
    return location | ({"logicalLocations": logical} if logical else {})


def _uri(file: str) -> tuple[str, str]:
    path = PurePosixPath(file)
    base = _ROOT if path.is_absolute() else _REPOSITORY
    relative = path.relative_to(path.anchor) if path.is_absolute() else path
    return base, quote(str(relative), errors="surrogatepass")


def _notifications(report: Report, left_out: int) -> list[_Object]:
    said = [("error", f"{error.what} ({error.kind}): {error.message}", error.kind) for error in report.errors]
    if report.verdict in ("not_reproduced", "inconclusive"):
        said.append(("warning", words.verdict(report), report.verdict))
    said += [("note", f"{skipped.what}: {skipped.reason}", "skipped") for skipped in report.skipped]
    if left_out:
        more = f"{words.count(left_out, 'result')} left out, the least severe: more than a code-scanning service takes"
        said.append(("warning", more, "truncated"))
    return [
        {"level": level, "message": {"text": sanitise(text)}, "descriptor": {"id": sanitise(kind)}}
        for level, text, kind in said
    ]
