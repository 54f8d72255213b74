"""Ignores: findings that a project has looked at and decided to live with, each with its reason.

An ignore rots: the tensor is renamed, the bug is mended, the reason runs out. So one that fits nothing and one whose
date has passed are findings themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase, translate
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.raised_by import raised_by
from ampdoctor.evidence.paths import checkpoint_path, file_within, scanned_path
from ampdoctor.evidence.report import Finding, Report, Suppressed
from ampdoctor.evidence.where import Source, Where
from ampdoctor.gates.severities import everything, suppressed_worst_first, worst_first

UNUSED, EXPIRED = "AMP911", "AMP912"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """One entry: findings of a rule, at the places that it names.

    A pattern is a shell's (`*`, `?`, `[abc]`), fits the whole name with its case, and its `*` crosses dots and slashes.

    Attributes:
        rule: Code of the rule.
        reason: Why; in a sentence, for whoever reads it next year.
        tensor: Pattern of the tensor's name; None: any, and none.
        module: Pattern of the module's name.
        file: Pattern of the file: the checkpoint's, or the user's source file; its path relative to the working
            directory where it lies below it, else absolute, whichever path of it or above it was scanned.
        expires: The last day on which it holds; None: for good.
        written: Where it stands.
    """

    rule: str
    reason: str
    tensor: str | None = None
    module: str | None = None
    file: str | None = None
    expires: date | None = None
    written: Source | None = None

    def matcher(self, target: Mapping[str, Any]) -> Callable[[Finding], bool]:
        """Return what says whether a finding is one that it names; made once, for patterns are slow to compile.

        Args:
            target: That of the findings' report.
        """
        tensor, module, file = (_pattern(pattern) for pattern in (self.tensor, self.module, self.file))

        def fits(finding: Finding) -> bool:
            where = finding.where
            return (
                finding.code == self.rule
                and (tensor is None or tensor(where.tensor or ""))
                and (module is None or module(where.module))
                and (file is None or any(map(file, _files(where, target))))
            )

        return fits


def _pattern(pattern: str | None) -> Callable[[str], bool] | None:
    if pattern is None:
        return None
    compiled = re.compile(translate(pattern))
    return lambda name: compiled.match(name) is not None


def _files(where: Where, target: Mapping[str, Any]) -> list[str]:
    lines = (line.file for line in (where.source, where.forward_source) if line is not None)
    file = scanned_path(target) if where.file is None else file_within(checkpoint_path(target), where.file)
    return [name for name in (file, *lines) if name is not None]


def apply_ignores(report: Report, ignores: Sequence[Ignore], today: date) -> Report:
    """Return the report with what is ignored set aside, and a finding for each ignore that has outlived its use.

    Unused (AMP911) is only said where this run could have used it: see `_could_have_been_used`. An expired one (AMP912)
    sets nothing aside any more, and is said where it would have.

    Args:
        report: Any.
        ignores: In the order in which they stand; the first that fits a finding gives the reason.
        today: The day on which it is judged.
    """
    if not ignores:
        return report
    expired = [ignore.expires is not None and today > ignore.expires for ignore in ignores]
    matchers = [ignore.matcher(report.target) for ignore in ignores]
    current = [(entry, fits) for entry, fits, past in zip(ignores, matchers, expired, strict=True) if not past]
    kept: list[Finding] = []
    suppressed = list(report.suppressed)
    for finding in report.findings:
        fitting = next((ignore for ignore, fits in current if fits(finding)), None)
        if fitting is not None:
            suppressed.append(Suppressed(finding=finding, by="ignore", reason=fitting.reason))
        else:
            kept.append(finding)
    found = everything(report)
    said = {finding.fingerprint for finding in found}  # by an earlier turn of this, where reports are merged
    aside = [one.finding for one in suppressed]  # no ignore that holds fits any other
    outlived = (
        _outlived(ignore, report, used=any(map(fits, found if past else aside)), expired=past)
        for ignore, fits, past in zip(ignores, matchers, expired, strict=True)
    )
    kept += [finding for finding in outlived if finding is not None and finding.fingerprint not in said]
    return replace(report, findings=worst_first(kept), suppressed=suppressed_worst_first(suppressed))


def _outlived(ignore: Ignore, report: Report, *, used: bool, expired: bool) -> Finding | None:
    """The finding about an ignore that has outlived its use."""
    if used:
        return _expired(ignore) if expired else None
    return _unused(ignore) if _could_have_been_used(ignore, report) else None


def _could_have_been_used(ignore: Ignore, report: Report) -> bool:
    """Whether this run looked at what the ignore names.

    Many commands and many checkpoints share one list. So the rule must be one of this command's own, the report judged
    and whole, and the ignore's file one of those that were examined.
    """
    if report.verdict == "not_judged" or not report.complete or report.command not in raised_by(ignore.rule):
        return False
    return ignore.file is None or any(fnmatchcase(name, ignore.file) for name in _examined(report))


def _examined(report: Report) -> list[str]:
    """The files and folders of the report's target, by the names that findings use too."""
    target = report.target
    named = [entry for key in ("files", "members") for entry in target.get(key) or () if isinstance(entry, dict)]
    inside = [entry.get("path") or entry.get("name") for entry in named]
    names = [checkpoint_path(target), *(target.get("paths") or ())]
    names += [file_within(checkpoint_path(target), name) for name in inside if isinstance(name, str)]
    factory = target.get("factory")
    names += [factory, factory.rpartition(":")[0]] if isinstance(factory, str) else []
    return [name for name in names if isinstance(name, str)]


def _unused(ignore: Ignore) -> Finding:
    message = f"the ignore of {_named(ignore)} fits nothing that was found"
    return _finding(UNUSED, ignore, message, {}, "Take it out, or mend what it names.")


def _expired(ignore: Ignore) -> Finding:
    day = ignore.expires.isoformat() if ignore.expires is not None else ""
    message = f"the ignore of {_named(ignore)} held until {day}: it sets nothing aside any more"
    return _finding(
        EXPIRED, ignore, message, {"expires": day}, "Look at its findings again; then mend, or set a new date."
    )


def _named(ignore: Ignore) -> str:
    places = [
        f"{kind} {pattern}"
        for kind, pattern in (("tensor", ignore.tensor), ("module", ignore.module), ("file", ignore.file))
        if pattern is not None
    ]
    return " in ".join([ignore.rule, ", ".join(places)]) if places else ignore.rule


def _finding(code: str, ignore: Ignore, message: str, more: dict[str, Any], cure: str) -> Finding:
    return Finding(
        code=code,
        name=RULES[code].name,
        severity=RULES[code].worst,
        message=message,
        where=Where(
            phase="configuration",
            module=ignore.module or "",
            op=f"ignore:{ignore.rule}",
            tensor=ignore.tensor,
            source=ignore.written,
        ),
        evidence={"rule": ignore.rule, "file": ignore.file, "reason": ignore.reason, **more},
        help=cure,
    )
