"""Merges the reports of the ranks of one job.

- `verdict`: the worst; `complete` if all are.
- `findings`, `suppressed`: a finding of several ranks (same fingerprint and file) is kept once, from the rank where it
  is worst and earliest, with `ranks` in its evidence; a repeated report adds nothing.
- `checks`, `skipped`, `errors`, `tensors`, `thresholds`: those of all reports, equal ones once.
- `run`: what all agree on.
- every other section describes one run or checkpoint and cannot be merged: the first one is kept, and a note in `run`
  says if another report has a different one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.report import Finding, Report, Suppressed, Verdict, finding_order
from ampdoctor.reports.json_report import strict_json_line

T = TypeVar("T")

_WORST_FIRST: tuple[Verdict, ...] = ("sick", "inconclusive", "not_reproduced", "not_judged", "healthy")
_SECTIONS = (
    "scaler",
    "health",
    "profile",
    "precision",
    "plan",
    "trend",
    "change",
    "structure",
    "path",
    "proof",
    "baseline",
    "configuration",
)


def merge_reports(reports: Sequence[Report]) -> Report:
    """Return the reports, at least one, as one; several commands or targets raise UsageError."""
    first = reports[0]
    commands = sorted({report.command for report in reports})
    if len(commands) > 1:
        raise UsageError(f"reports of several commands ({', '.join(commands)}): one report is of one command")
    if len(reports) == 1:
        return first
    whole = [report for report in reports if report.complete or report.found] or reports  # others may name less
    if len(set(map(_subject, whole))) > 1:
        raise UsageError("reports of several targets: one report is of the ranks of one job; show each by itself")
    sections: dict[str, Any] = {name: _first(getattr(report, name) for report in reports) for name in _SECTIONS}
    return Report(
        command=first.command,
        target=whole[0].target,
        run=_run(reports),
        verdict=min((report.verdict for report in reports), key=_WORST_FIRST.index),
        complete=all(report.complete for report in reports),
        findings=_findings(reports),
        checks=_once(report.checks for report in reports),
        skipped=_once(report.skipped for report in reports),
        errors=_once(report.errors for report in reports),
        suppressed=_suppressed(reports),
        tensors=_tensors(reports),
        thresholds=_once(report.thresholds for report in reports),
        **sections,
    )


def _findings(reports: Iterable[Report]) -> tuple[Finding, ...]:
    groups = _alike([(finding, finding) for finding in report.findings] for report in reports)
    return tuple(sorted(map(_one_of_ranks, groups), key=finding_order))


def _suppressed(reports: Iterable[Report]) -> tuple[Suppressed, ...]:
    groups = _alike([(one.finding, one) for one in report.suppressed] for report in reports)
    merged = [replace(group[0], finding=_one_of_ranks([one.finding for one in group])) for group in groups]
    return tuple(sorted(merged, key=lambda one: finding_order(one.finding)))


def _alike(found: Iterable[Sequence[tuple[Finding, T]]]) -> list[list[T]]:
    """Group what differs only in rank; the second equal finding of a report goes with the second of the others."""
    groups: dict[tuple[str, str | None, int], list[T]] = {}
    for entries in found:
        seen: Counter[tuple[str, str | None]] = Counter()
        for finding, entry in entries:
            kind = (finding.fingerprint, finding.where.file)
            seen[kind] += 1
            groups.setdefault((*kind, seen[kind]), []).append(entry)
    return list(groups.values())


def _ranks_of(finding: Finding) -> Sequence[int]:
    """Return the ranks in a merged report's finding; in a log's finding `ranks` is only their number."""
    named = finding.evidence.get("ranks")
    return named if isinstance(named, list | tuple) and named else [finding.where.rank]


def _one_of_ranks(findings: Sequence[Finding]) -> Finding:
    ranks = sorted({rank for one in findings for rank in _ranks_of(one)})
    kept = min(findings, key=lambda finding: (finding_order(finding), finding.where.rank))
    return replace(kept, evidence={**kept.evidence, "ranks": ranks}) if len(ranks) > 1 else kept


def _subject(report: Report) -> str:
    """Return the report's target, regardless of which clone of the repository its folder lies in."""
    place = (report.target.get("repository") or {}).get("folder")
    return _key({**report.target, "repository": place})


def _run(reports: Sequence[Report]) -> dict[str, Any]:
    notes = list(_once(report.run.get("notes") or () for report in reports))
    for name in _SECTIONS:
        known = {_key(section) for report in reports if (section := getattr(report, name)) is not None}
        if len(known) > 1:
            notes.append(f"{name}: of the first report that has it; it differs in another")
    others = [{key: _key(value) for key, value in report.run.items()} for report in reports[1:]]
    first = {key: value for key, value in reports[0].run.items() if key != "notes"}
    agreed = {key: value for key, value in first.items() if all(run.get(key) == _key(value) for run in others)}
    return {**agreed, "notes": notes} if notes else agreed


def _tensors(reports: Sequence[Report]) -> tuple[TensorRow, ...] | None:
    known = [report.tensors for report in reports if report.tensors is not None]
    return _once(known) if known else None


def _once(lists: Iterable[Iterable[T]]) -> tuple[T, ...]:
    first: dict[str, T] = {}
    for entries in lists:
        for entry in entries:
            first.setdefault(_key(entry), entry)
    return tuple(first.values())


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _key(value: Any) -> str:
    """Return the same text for equal values, whose types may not be hashable."""
    return strict_json_line(value)
