"""Severities that a project has chosen, rule by rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from ampdoctor.evidence.report import SEVERITIES, Finding, Report, Suppressed, Verdict, verdict_of

SeverityOrIgnore = Literal["error", "warning", "note", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """A project's settings for one rule.

    Attributes:
        severity: Severity of each of its findings; `ignore` sets them aside; None: the rule decides.
        thresholds: Numbers of the rule, by name; each rule has its own names.
    """

    severity: SeverityOrIgnore | None = None
    thresholds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def apply_severities(report: Report, rules: Mapping[str, RuleSettings]) -> Report:
    """Return the report with the severities that its rules were given, worst first again.

    The verdict follows: a report is sick if an error is among its findings, set aside or not. Setting an error aside
    does not make a checkpoint healthy; deciding that it is not an error does.

    Args:
        report: Any report.
        rules: Settings by the rule's code.
    """
    if not any(rules[f.code].severity for f in report.found if f.code in rules):
        return report
    suppressed = [replace(one, finding=_graded(one.finding, rules)) for one in report.suppressed]
    findings: list[Finding] = []
    for finding in report.findings:
        settings = rules.get(finding.code)
        if settings is not None and settings.severity == "ignore":
            reason = f"the severity of {finding.code} is set to ignore"
            suppressed.append(Suppressed(finding=finding, by="ignore", reason=reason))
        else:
            findings.append(_graded(finding, rules))
    graded = replace(report, findings=worst_first(findings), suppressed=suppressed_worst_first(suppressed))
    return replace(graded, verdict=_verdict(report, graded))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity; those of one severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def suppressed_worst_first(suppressed: Iterable[Suppressed]) -> tuple[Suppressed, ...]:
    """Return what was set aside in the order of `worst_first`."""
    return tuple(sorted(suppressed, key=lambda one: SEVERITIES.index(one.finding.severity)))


def _graded(finding: Finding, rules: Mapping[str, RuleSettings]) -> Finding:
    settings = rules.get(finding.code)
    if settings is None or settings.severity is None or settings.severity == "ignore":
        return finding
    return replace(finding, severity=settings.severity)


def _verdict(before: Report, after: Report) -> Verdict:
    """Return the new verdict. One that is not sick beside an error stays: its workflow knew about the error."""
    was, now = (any(f.severity == "error" for f in report.found) for report in (before, after))
    if was == now or before.verdict == "not_judged":
        return before.verdict
    if was and before.verdict != "sick":
        return before.verdict
    return verdict_of(after.found, settled=after.complete)
