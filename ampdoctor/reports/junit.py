"""The JUnit XML renderer: GitLab, Jenkins and other CI servers show it as tests.

A test case stands for a rule in a file with a finding, and for each check that passed. Rules without a finding have no
case: listing them as passed would claim that each was decided, even if the checkpoint lacks what it needs. A check with
a finding is the failed case of its rule, so nothing is counted twice. One case is the verdict: a report without an
answer is an error there, and no report is empty.

A finding below the gate (`--fail-on`) passes with its message: tests fail where the exit code does, except under
`--exit-zero`, where only the tests fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias
from xml.etree import ElementTree as ET

from ampdoctor.evidence.report import SEVERITIES, Check, Finding, Gate, Report, Severity
from ampdoctor.package import version
from ampdoctor.reports import text as words
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.text import location_of, target_file

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document may contain, not even escaped (its production 2, Char)."""

_Result: TypeAlias = Literal["passed", "failure", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    group: str  # its class name: the file
    name: str  # the rule or the check
    result: _Result = "passed"
    kind: str = ""  # a short word for a failure or an error
    message: str = ""  # a line
    lines: tuple[str, ...] = ()  # the rest


def render_junit(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as one test suite, in XML 1.0."""
    cases = list(_cases(report))
    numbers = {
        "tests": str(len(cases)),
        "failures": str(sum(case.result == "failure" for case in cases)),
        "errors": str(sum(case.result == "error" for case in cases)),
    }
    name = f"ampdoctor {report.command}"
    suites = ET.Element("testsuites", {"name": name, **numbers})
    skipped = str(sum(case.result == "skipped" for case in cases))
    suite = ET.SubElement(suites, "testsuite", {"name": name, **numbers, "skipped": skipped})
    properties = ET.SubElement(suite, "properties")
    facts = {"version": version(), "verdict": report.verdict, "target": words.target(report.target)}
    for key, value in facts.items():
        ET.SubElement(properties, "property", {"name": key, "value": _xml(value)})
    seen: Counter[tuple[str, str]] = Counter()
    for case in cases:
        seen[case.group, case.name] += 1
        _add(suite, case, seen[case.group, case.name])
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _cases(report: Report) -> Iterator[_Case]:
    about = target_file(report.target)
    yield _verdict(report, about)
    yield from _found(report)
    for check in report.checks:
        if check.result != "found":
            yield _checked(check, about)
    for one in report.suppressed:
        finding, where = one.finding, one.finding.where
        yield _Case(
            group=location_of(finding, report.target).file,
            name=f"{_rule(finding)} (suppressed: {where.tensor or where.module or finding.fingerprint})",
            result="skipped",
            message=f"{one.by}: {one.reason}",
        )
    for error in report.errors:
        yield _Case(
            group=about, name=f"not examined: {error.what}", result="error", kind=error.kind, message=error.message
        )
    for skipped in report.skipped:
        yield _Case(group=about, name=f"left out: {skipped.what}", result="skipped", message=skipped.reason)


def _verdict(report: Report, about: str) -> _Case:
    said = words.verdict(report)
    if report.verdict in ("not_reproduced", "inconclusive"):
        return _Case(group=about, name="verdict", result="error", kind=report.verdict, message=said)
    return _Case(group=about, name="verdict", lines=(said,))


def _found(report: Report) -> Iterator[_Case]:
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        alike.setdefault((location_of(finding, report.target).file, finding.code), []).append(finding)
    failing = _failing(report.gate)
    for (file, _), findings in alike.items():
        worst = findings[0]
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        yield _Case(
            group=file,
            name=_rule(worst),
            result="failure" if worst.severity in failing else "passed",
            kind=worst.severity,
            message=f"{worst.message}{more}",
            lines=tuple(line for finding in findings for line in _told(finding)),
        )


def _failing(gate: Gate | None) -> tuple[Severity, ...]:
    """Return the severities that fail, by --fail-on and regardless of --exit-zero; without a gate all but notes."""
    fail_on = "warning" if gate is None else gate.fail_on
    return () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]


def _rule(finding: Finding) -> str:
    return f"{finding.code} {finding.name}"


def _told(finding: Finding) -> Iterable[str]:
    yield f"{finding.severity}: {finding.message}"
    yield from (f"  {label}: {line}" for label, line in words.told(finding).items())
    yield f"  fingerprint: {finding.fingerprint}"


def _checked(check: Check, about: str) -> _Case:
    margin = (words.record(check.headroom),) if check.headroom else ()
    if check.result == "not_run":
        return _Case(group=about, name=check.name, result="skipped", message="not run")
    said = () if check.result == "ok" else (check.result,)
    return _Case(group=about, name=check.name, lines=(*said, *margin))


def _add(suite: ET.Element, case: _Case, time: int) -> None:
    """Add a case; repeated names get a number, since CI servers show only one case of a name."""
    name = case.name if time == 1 else f"{case.name} ({time})"
    element = ET.SubElement(suite, "testcase", {"classname": _xml(case.group), "name": _xml(name)})
    text = "\n".join(map(_xml, case.lines))
    if case.result == "passed":
        if text:
            ET.SubElement(element, "system-out").text = text
        return
    said = {"message": _xml(case.message)} | ({"type": _xml(case.kind)} if case.kind else {})
    ET.SubElement(element, case.result, said).text = text or None


def _xml(text: str) -> str:
    """Return the text in one line, with characters that XML forbids as readable escapes."""
    return _NOT_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", sanitise(text))
