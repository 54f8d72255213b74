"""Merges several reports of one command: those of the ranks of one job, or of several jobs.

- `verdict`: the worst; `complete` if all are.
- `findings`, `suppressed`: a finding of several ranks (same fingerprint, file and target) is kept once, from the rank
  where it is worst and earliest, with `ranks` in its evidence; a repeated report adds nothing. If the targets differ,
  its file says which one it belongs to.
- `checks`, `skipped`, `errors`, `tensors`, `thresholds`: those of all reports, equal ones once.
- `run`: what all agree on. `target`: the common one; if there are several, what all agree on, with the `paths` of all,
  and in `merged` the target and verdict of each.
- `health`: the runs of all reports in their order, equal ones once.
- every other section describes one run or checkpoint and cannot be merged: the first one is kept, and a note in `run`
  says if another report has a different one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.report import Finding, Report, Suppressed, Verdict, finding_order, with_files
from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.reports import text
from ampdoctor.reports.json_report import strict_json_line
from ampdoctor.reports.text import file_in, target_file

T = TypeVar("T")

_WORST_FIRST: tuple[Verdict, ...] = ("sick", "inconclusive", "not_reproduced", "not_judged", "healthy")
_SECTIONS = (
    "scaler",
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
    """Return the reports as one; a single one unchanged. No report, or several commands, raise UsageError."""
    if not reports:
        raise UsageError("there is no report to merge")
    first = reports[0]
    commands = sorted({report.command for report in reports})
    if len(commands) > 1:
        raise UsageError(f"reports of several commands ({', '.join(commands)}): one report is of one command")
    if len(reports) == 1:
        return first
    sections: dict[str, Any] = {name: _first(getattr(report, name) for report in reports) for name in _SECTIONS}
    placed = _placed(reports)
    return Report(
        command=first.command,
        target=_target(reports),
        run=_run(reports),
        verdict=min((report.verdict for report in reports), key=_WORST_FIRST.index),
        complete=all(report.complete for report in reports),
        findings=_findings(placed),
        checks=_once(report.checks for report in reports),
        skipped=_once(report.skipped for report in reports),
        errors=_once(report.errors for report in reports),
        suppressed=_suppressed(placed),
        tensors=_tensors(reports),
        health=_health(reports),
        thresholds=_once(report.thresholds for report in reports),
        **sections,
    )


def _placed(reports: Sequence[Report]) -> list[Report]:
    """Return the reports with files in their findings that differ where the targets differ."""
    if not _differ(reports):
        return list(reports)

    def named(finding: Finding, target: Mapping[str, Any]) -> Finding:
        if finding.where.source is not None:
            return finding
        return with_files(finding, lambda file: file_in(file, target))

    return [
        replace(
            report,
            findings=tuple(named(finding, report.target) for finding in report.findings),
            suppressed=tuple(replace(one, finding=named(one.finding, report.target)) for one in report.suppressed),
        )
        for report in reports
    ]


def _findings(reports: Iterable[Report]) -> tuple[Finding, ...]:
    found = [(_subject(report), [(finding, finding) for finding in report.findings]) for report in reports]
    return tuple(sorted((_one_of_ranks(group) for group in _alike(found)), key=finding_order))


def _suppressed(reports: Iterable[Report]) -> tuple[Suppressed, ...]:
    found = [(_subject(report), [(one.finding, one) for one in report.suppressed]) for report in reports]
    merged = [replace(group[0], finding=_one_of_ranks([one.finding for one in group])) for group in _alike(found)]
    return tuple(sorted(merged, key=lambda one: finding_order(one.finding)))


def _alike(found: Iterable[tuple[str, Sequence[tuple[Finding, T]]]]) -> list[list[T]]:
    """Group findings that differ only in rank.

    `found` has each report's target and its findings with the grouped items. The second equal finding of a report is
    grouped with the second of the others.
    """
    groups: dict[tuple[str, str, str | None, int], list[T]] = {}
    for target, entries in found:
        seen: Counter[tuple[str, str | None]] = Counter()
        for finding, entry in entries:
            kind = (finding.fingerprint, finding.where.file)
            seen[kind] += 1
            groups.setdefault((target, *kind, seen[kind]), []).append(entry)
    return list(groups.values())


def _ranks_of(finding: Finding) -> Sequence[int]:
    """Return the ranks in a merged report's finding; in a log's finding `ranks` is only their number."""
    named = finding.evidence.get("ranks")
    return named if isinstance(named, list | tuple) and named else [finding.where.rank]


def _one_of_ranks(findings: Sequence[Finding]) -> Finding:
    ranks = sorted({rank for one in findings for rank in _ranks_of(one)})
    kept = min(findings, key=lambda finding: (finding_order(finding), finding.where.rank))
    return replace(kept, evidence={**kept.evidence, "ranks": ranks}) if len(ranks) > 1 else kept


def _target(reports: Sequence[Report]) -> dict[str, Any]:
    targets = [report.target for report in reports]
    if not _differ(reports):
        return dict(targets[0])
    agreed = {key: value for key, value in _agreed(targets).items() if key not in ("path", "location")}
    paths = list(dict.fromkeys(map(target_file, targets)))
    merged = [{"target": report.target, "verdict": report.verdict} for report in reports]
    return {"path": text.count(len(reports), "report"), "paths": paths, **agreed, "merged": merged}


def _differ(reports: Sequence[Report]) -> bool:
    return len(set(map(_subject, reports))) > 1


def _subject(report: Report) -> str:
    """Return the report's target, regardless of which clone of the repository its folder lies in."""
    place = (report.target.get("repository") or {}).get("folder")
    return _key({**report.target, "repository": place})


def _run(reports: Sequence[Report]) -> dict[str, Any]:
    runs = [{key: value for key, value in report.run.items() if key != "notes"} for report in reports]
    agreed = _agreed(runs)
    notes = list(_once(report.run.get("notes") or () for report in reports))
    notes += [
        f"{key}, by report: {', '.join(text.value(run.get(key)) for run in runs)}"
        for key in dict.fromkeys(key for run in runs for key in run)
        if key not in agreed
    ]
    for name in _SECTIONS:
        known = {_key(section) for report in reports if (section := getattr(report, name)) is not None}
        if len(known) > 1:
            notes.append(f"{name}: of the first report that has it; it differs in another")
    return {**agreed, "notes": notes} if notes else agreed


def _agreed(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        key: value
        for key, value in maps[0].items()
        if all(key in other and _key(other[key]) == _key(value) for other in maps[1:])
    }


def _health(reports: Sequence[Report]) -> HealthSection | None:
    known = [report.health for report in reports if report.health is not None]
    if not known:
        return None
    axes = {one.axis for one in known}
    every = next((one.detail_every for one in known if one.detail_every is not None), None)
    axis = known[0].axis if len(axes) == 1 else "step"
    return HealthSection(runs=_once(one.runs for one in known), axis=axis, detail_every=every)


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
