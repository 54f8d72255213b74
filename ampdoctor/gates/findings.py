"""A project's own severities and ignores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

from ampdoctor.diagnosis.catalogue import EXPIRED_IGNORE, UNUSED_IGNORE, Rule, rules
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.paths import checkpoint_path, file_within, scanned_path
from ampdoctor.evidence.report import SEVERITIES, Finding, Report, Suppressed, Verdict, verdict_of

SeverityOrIgnore = Literal["error", "warning", "note", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """A project's settings for one rule."""

    severity: SeverityOrIgnore | None = None  # `ignore` suppresses its findings; None: the rule decides
    thresholds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by name


def apply_severities(report: Report, rules: Mapping[str, RuleSettings]) -> Report:
    """Return the report with a project's severities (`rules` by code), again sorted with the worst first."""
    # The verdict follows: a report is sick if an error is among its findings, suppressed or not. Suppressing an error
    # does not make a checkpoint healthy; lowering its severity does.
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
    """Return suppressed findings in the order of `worst_first`."""
    return tuple(sorted(suppressed, key=lambda one: SEVERITIES.index(one.finding.severity)))


def _graded(finding: Finding, rules: Mapping[str, RuleSettings]) -> Finding:
    settings = rules.get(finding.code)
    if settings is None or settings.severity is None or settings.severity == "ignore":
        return finding
    return replace(finding, severity=settings.severity)


def _verdict(before: Report, after: Report) -> Verdict:
    """Return the new verdict; one that is not sick despite an error stays, as its workflow decided it so."""
    was, now = (any(f.severity == "error" for f in report.found) for report in (before, after))
    if was == now or before.verdict == "not_judged":
        return before.verdict
    if was and before.verdict != "sick":
        return before.verdict
    return verdict_of(after.found, settled=after.complete)


# -- ignores: findings that a project has examined and accepted, each with its reason --
#
# An ignore becomes outdated: the tensor is renamed, the bug is fixed, the reason no longer holds. So an ignore that
# matches nothing, or whose date has passed, is itself a finding.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """Accepted findings of a rule, at the places that the patterns name.

    A pattern is a shell's (`*`, `?`, `[abc]`), matches the whole name with its case, and its `*` crosses dots and
    slashes. A pattern that is None matches anything, also a finding without such a name.
    """

    rule: str  # code of the rule
    reason: str  # why they are accepted; a sentence for later readers
    tensor: str | None = None
    module: str | None = None
    file: str | None = None  # the checkpoint's or the user's source file; a path as below
    expires: date | None = None  # the last day on which it holds
    written: Source | None = None  # where the entry is written

    def fits(self, code: str, where: Where, target: Mapping[str, Any]) -> bool:
        """Whether it matches a rule's finding at an address of a report about `target`."""
        if code != self.rule:
            return False
        files = files_of(where, target) if self.file is not None else []
        named = ((self.tensor, [where.tensor or ""]), (self.module, [where.module]), (self.file, files))
        return all(pattern is None or any(fnmatchcase(name, pattern) for name in names) for pattern, names in named)


def apply_ignores(report: Report, ignores: Sequence[Ignore], today: date) -> Report:
    """Return the report with ignored findings suppressed, and a finding for each outdated ignore.

    The first ignore that matches an address gives the reason. A finding about many tensors is suppressed if the ignores
    together name every one of them. "Unused" (AMP911) is only reported if this run could have used the ignore: see
    `_could_have_been_used`. An ignore that expired before `today` (AMP912) suppresses nothing any more, and is reported
    if it would have.
    """
    if not ignores:
        return report
    current = [ignore for ignore in ignores if ignore.expires is None or today <= ignore.expires]
    kept: list[Finding] = []
    suppressed = list(report.suppressed)
    for finding in report.findings:
        reasons = _reasons(finding, current, report.target)
        if reasons:
            suppressed.append(Suppressed(finding=finding, by="ignore", reason="; ".join(reasons)))
        else:
            kept.append(finding)
    said = {finding.fingerprint for finding in report.found}  # from an earlier call, if reports are merged
    outlived = (_outlived(ignore, report, today) for ignore in ignores)
    kept += [finding for finding in outlived if finding is not None and finding.fingerprint not in said]
    return replace(report, findings=worst_first(kept), suppressed=suppressed_worst_first(suppressed))


def _reasons(finding: Finding, current: Sequence[Ignore], target: Mapping[str, Any]) -> list[str]:
    reasons: dict[str, None] = {}
    for where in finding.places:
        fitting = next((ignore for ignore in current if ignore.fits(finding.code, where, target)), None)
        if fitting is None:
            return []
        reasons[fitting.reason] = None
    return list(reasons)


def _outlived(ignore: Ignore, report: Report, today: date) -> Finding | None:
    if not any(ignore.fits(one.code, where, report.target) for one in report.found for where in one.places):
        message = f"the ignore of {_named(ignore)} fits nothing that was found"
        unused = _finding(UNUSED_IGNORE, ignore, message, {}, "Take it out, or mend what it names.")
        return unused if _could_have_been_used(ignore, report) else None
    if ignore.expires is None or today <= ignore.expires:
        return None
    day = ignore.expires.isoformat()
    message = f"the ignore of {_named(ignore)} held until {day}: it sets nothing aside any more"
    cure = "Look at its findings again; then mend, or set a new date."
    return _finding(EXPIRED_IGNORE, ignore, message, {"expires": day}, cure)


def _could_have_been_used(ignore: Ignore, report: Report) -> bool:
    """Whether this run examined what the ignore names."""
    # Many commands and many checkpoints share one list. So the rule must belong to this command, the report must be
    # judged and complete, and the ignore's file must be among the examined ones.
    commands = rules()[ignore.rule].commands
    if report.verdict == "not_judged" or not report.complete or report.command not in commands:
        return False
    if report.command == "recommend" and report.profile is None and "bisect-nan" not in commands:
        return False  # it ended with another cause, before ranges were measured
    return ignore.file is None or any(fnmatchcase(name, ignore.file) for name in examined(report))


def _named(ignore: Ignore) -> str:
    places = [
        f"{kind} {pattern}"
        for kind, pattern in (("tensor", ignore.tensor), ("module", ignore.module), ("file", ignore.file))
        if pattern is not None
    ]
    return " in ".join([ignore.rule, ", ".join(places)]) if places else ignore.rule


def _finding(rule: Rule, ignore: Ignore, message: str, more: dict[str, Any], cure: str) -> Finding:
    return rule.finding(
        rule.worst,
        message,
        where=Where(
            phase="configuration",
            module=ignore.module or "",
            op=f"ignore:{ignore.rule}",
            tensor=ignore.tensor,
            source=ignore.written,
        ),
        evidence={"rule": ignore.rule, "file": ignore.file, "reason": ignore.reason, **more},
        advice=cure,
    )


# -- the files of findings and reports, under the names that ignores and baselines use --
#
# A path is relative to the working directory if it lies below it, else absolute. It does not matter through which path
# the file was scanned.


def checkpoint_file(where: Where, target: Mapping[str, Any]) -> str | None:
    """Return the checkpoint's file with the address, else the checkpoint; None if there is none."""
    return scanned_path(target) if where.file is None else file_within(checkpoint_path(target), where.file)


def files_of(where: Where, target: Mapping[str, Any]) -> list[str]:
    """Return the files of an address: the checkpoint's file, and those with the lines of the user's code."""
    lines = (line.file for line in (where.source, where.forward_source) if line is not None)
    return [name for name in (checkpoint_file(where, target), *lines) if name is not None]


def examined(report: Report) -> list[str]:
    """Return the files and folders of the report's target."""
    target = report.target
    named = [entry for key in ("files", "members") for entry in target.get(key) or () if isinstance(entry, dict)]
    inside = [entry.get("path") or entry.get("name") for entry in named]
    names = [checkpoint_path(target), *(target.get("paths") or ())]
    names += [file_within(checkpoint_path(target), name) for name in inside if isinstance(name, str)]
    factory = target.get("factory")
    names += [factory, factory.rpartition(":")[0]] if isinstance(factory, str) else []
    return [name for name in names if isinstance(name, str)]
