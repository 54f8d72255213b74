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
from itertools import starmap
from typing import Any, TypeAlias

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.diagnosis.configuration.outlived_ignores import EXPIRED_IGNORE, UNUSED_IGNORE
from ampdoctor.evidence.report import Finding, Report, Suppressed
from ampdoctor.evidence.where import Source, Where
from ampdoctor.gates.files import examined, files_of
from ampdoctor.gates.severities import suppressed_worst_first, worst_first


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

    def matcher(self, target: Mapping[str, Any]) -> _Matcher:
        """Return what says whether it names a rule's finding at an address; made once: patterns are slow to compile.

        Args:
            target: That of the findings' report.
        """
        tensor, module, file = (_pattern(pattern) for pattern in (self.tensor, self.module, self.file))

        def fits(code: str, where: Where) -> bool:
            return (
                code == self.rule
                and (tensor is None or tensor(where.tensor or ""))
                and (module is None or module(where.module))
                and (file is None or any(map(file, files_of(where, target))))
            )

        return fits


_Matcher: TypeAlias = Callable[[str, Where], bool]


def _pattern(pattern: str | None) -> Callable[[str], bool] | None:
    if pattern is None:
        return None
    compiled = re.compile(translate(pattern))
    return lambda name: compiled.match(name) is not None


def apply_ignores(report: Report, ignores: Sequence[Ignore], today: date) -> Report:
    """Return the report with what is ignored set aside, and a finding for each ignore that has outlived its use.

    A finding about many tensors is set aside where the ignores together name every one of them.

    Unused (AMP911) is only said where this run could have used it: see `_could_have_been_used`. An expired one (AMP912)
    sets nothing aside any more, and is said where it would have.

    Args:
        report: Any.
        ignores: In the order in which they stand; the first that fits an address gives the reason.
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
        reasons = _reasons(finding, current)
        if reasons:
            suppressed.append(Suppressed(finding=finding, by="ignore", reason="; ".join(reasons)))
        else:
            kept.append(finding)
    said = {finding.fingerprint for finding in report.found}  # by an earlier turn of this, where reports are merged
    addresses = [(finding.code, where) for finding in report.found for where in finding.places]
    outlived = (
        _outlived(ignore, report, used=any(starmap(fits, addresses)), expired=past)
        for ignore, fits, past in zip(ignores, matchers, expired, strict=True)
    )
    kept += [finding for finding in outlived if finding is not None and finding.fingerprint not in said]
    return replace(report, findings=worst_first(kept), suppressed=suppressed_worst_first(suppressed))


def _reasons(finding: Finding, current: Sequence[tuple[Ignore, _Matcher]]) -> list[str]:
    """The reasons for which a finding is set aside; [] where it is not."""
    reasons: dict[str, None] = {}
    for where in finding.places:
        fitting = next((ignore for ignore, fits in current if fits(finding.code, where)), None)
        if fitting is None:
            return []
        reasons[fitting.reason] = None
    return list(reasons)


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
    if report.verdict == "not_judged" or not report.complete or report.command not in rules()[ignore.rule].commands:
        return False
    return ignore.file is None or any(fnmatchcase(name, ignore.file) for name in examined(report))


def _unused(ignore: Ignore) -> Finding:
    message = f"the ignore of {_named(ignore)} fits nothing that was found"
    return _finding(UNUSED_IGNORE, ignore, message, {}, "Take it out, or mend what it names.")


def _expired(ignore: Ignore) -> Finding:
    day = ignore.expires.isoformat() if ignore.expires is not None else ""
    message = f"the ignore of {_named(ignore)} held until {day}: it sets nothing aside any more"
    return _finding(
        EXPIRED_IGNORE, ignore, message, {"expires": day}, "Look at its findings again; then mend, or set a new date."
    )


def _named(ignore: Ignore) -> str:
    places = [
        f"{kind} {pattern}"
        for kind, pattern in (("tensor", ignore.tensor), ("module", ignore.module), ("file", ignore.file))
        if pattern is not None
    ]
    return " in ".join([ignore.rule, ", ".join(places)]) if places else ignore.rule


def _finding(rule: Rule, ignore: Ignore, message: str, more: dict[str, Any], cure: str) -> Finding:
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=rule.worst,
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
