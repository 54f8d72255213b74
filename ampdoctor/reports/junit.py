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
from xml.etree import ElementTree as ET

from ampdoctor.evidence.report import SEVERITIES, Finding, Gate, Report, Severity
from ampdoctor.package import version
from ampdoctor.reports import text as words
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.text import location_of, target_file

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document may contain, not even escaped (its production 2, Char)."""


def render_junit(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as one test suite, in XML 1.0."""
    cases = list(_cases(report))
    seen: Counter[tuple[str | None, str]] = Counter()
    for case in cases:  # CI servers show only one case of a name
        name = case.get("name", "")
        seen[case.get("classname"), name] += 1
        time = seen[case.get("classname"), name]
        case.set("name", name if time == 1 else f"{name} ({time})")
    ended = Counter(part.tag for case in cases for part in case)
    numbers = {"tests": str(len(cases)), "failures": str(ended["failure"]), "errors": str(ended["error"])}
    name = f"ampdoctor {report.command}"
    suites = ET.Element("testsuites", {"name": name, **numbers})
    suite = ET.SubElement(suites, "testsuite", {"name": name, **numbers, "skipped": str(ended["skipped"])})
    properties = ET.SubElement(suite, "properties")
    facts = {"version": version(), "verdict": report.verdict, "target": words.target(report.target)}
    for key, value in facts.items():
        ET.SubElement(properties, "property", {"name": key, "value": _xml(value)})
    suite.extend(cases)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _case(
    file: str, name: str, result: str = "", message: str = "", *, kind: str = "", lines: Iterable[str] = ()
) -> ET.Element:
    """Return the case of a rule or a check: failure, error or skipped with a message, or "" if it has passed."""
    case = ET.Element("testcase", {"classname": _xml(file), "name": _xml(name)})
    text = "\n".join(map(_xml, lines)) or None
    if result:
        said = {"message": _xml(message)} | ({"type": _xml(kind)} if kind else {})
        ET.SubElement(case, result, said).text = text
    elif text:
        ET.SubElement(case, "system-out").text = text
    return case


def _cases(report: Report) -> Iterator[ET.Element]:
    about, said = target_file(report.target), words.verdict(report)
    if report.verdict in ("not_reproduced", "inconclusive"):
        yield _case(about, "verdict", "error", said, kind=report.verdict)
    else:
        yield _case(about, "verdict", lines=(said,))
    yield from _found(report)
    for check in report.checks:
        if check.result == "not_run":
            yield _case(about, check.name, "skipped", "not run")
        elif check.result != "found":
            margin = (words.record(check.headroom),) if check.headroom else ()
            yield _case(about, check.name, lines=(*(() if check.result == "ok" else (check.result,)), *margin))
    for one in report.suppressed:
        finding, where = one.finding, one.finding.where
        name = f"{_rule(finding)} (suppressed: {where.tensor or where.module or finding.fingerprint})"
        yield _case(location_of(finding, report.target).file, name, "skipped", f"{one.by}: {one.reason}")
    for error in report.errors:
        yield _case(about, f"not examined: {error.what}", "error", error.message, kind=error.kind)
    for skipped in report.skipped:
        yield _case(about, f"left out: {skipped.what}", "skipped", skipped.reason)


def _found(report: Report) -> Iterator[ET.Element]:
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        alike.setdefault((location_of(finding, report.target).file, finding.code), []).append(finding)
    failing = _failing(report.gate)
    for (file, _), findings in alike.items():
        worst = findings[0]
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        result = "failure" if worst.severity in failing else ""
        lines = [line for finding in findings for line in _told(finding)]
        yield _case(file, _rule(worst), result, f"{worst.message}{more}", kind=worst.severity, lines=lines)


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


def _xml(text: str) -> str:
    """Return the text in one line, with characters that XML forbids as readable escapes."""
    return _NOT_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", sanitise(text))
