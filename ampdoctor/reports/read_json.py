"""Reads a report back from JSON or JSON lines; rendered again, it is the same. Merges the reports of one job's ranks.

Numbers come back as they were written: floats with 6 significant digits. Derived fields (`url`, `fingerprint`,
`verified`, the `code` to paste) are computed anew and not read. A non-finite number in the free form of `evidence`,
`target` or `headroom` stays a word, since a name may be that word. Keys of free forms stay sorted, as in JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

from ampdoctor.errors import ReportError, UsageError
from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.json_records import MismatchError, RecordReader
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import (
    NOT_IN_HALF,
    SCHEMA_VERSION,
    STEPS_AFTER,
    Finding,
    Report,
    Skipped,
    SkippedKind,
    Suppressed,
    Verdict,
    finding_order,
)
from ampdoctor.reports.json_report import DERIVED, HEADER, LISTS, SUMMARY, strict_json_line

T = TypeVar("T")

_READER = RecordReader(DERIVED)


def report_from_text(text: str) -> Report:
    """Return the report in a JSON or JSONL text, decided by the first line; ReportError for any other text."""
    first, _, rest = text.lstrip().partition("\n")
    begun = _parsed(first)
    if isinstance(begun, dict) and begun.get("type") == HEADER:
        return report_from_dict(_joined(_loaded(first, "line 1"), rest))
    return report_from_dict(_loaded(text, "the text"))


def report_from_dict(data: Any) -> Report:
    """Return the report in the values of a JSON report; raises ReportError where they are none."""
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ReportError("no report of ampdoctor: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ReportError(
            f"a report of schema version {data['schema_version']}; this version of ampdoctor reads {SCHEMA_VERSION}"
        )
    try:
        report = _completed(_READER.read(Report, data))
    except MismatchError as mismatch:
        raise ReportError(f"no report that this version reads: {mismatch}") from None
    _refuse_contradictions(report)
    return report


def _completed(read: Report) -> Report:
    return replace(
        read,
        findings=tuple(map(_finding, read.findings)),
        skipped=tuple(replace(one, kind=_kind(one)) for one in read.skipped),
        suppressed=tuple(replace(one, finding=_finding(one.finding)) for one in read.suppressed),
    )


def _finding(read: Finding) -> Finding:
    """Returns the finding whose further addresses, which come as objects, are in the same part of a step."""
    places: Any = read.also
    return replace(read, also=tuple(Where(phase=read.where.phase, **place) for place in places)) if places else read


def _kind(skipped: Skipped) -> SkippedKind:
    """Return the kind of a skipped part from its text, since a report has nothing else."""
    if skipped.what.startswith(STEPS_AFTER):
        return "not_replayed"
    if skipped.what == NOT_IN_HALF:
        return "not_in_half"
    return "lfs_pointer" if "Git LFS pointer" in skipped.reason else "left_out"


def _refuse_contradictions(report: Report) -> None:
    """Refuse a report that no run can have produced, since it will decide an exit code."""
    # A watched run that died is sick and may have no finding, but then it is incomplete
    errors = any(finding.severity == "error" for finding in report.found)
    if report.complete and report.errors:
        raise ReportError("a report that contradicts itself: it is complete, and something could not be examined")
    allowed = ("sick", "not_judged") if errors else get_args(Verdict)
    if report.verdict not in allowed or (report.verdict == "sick" and report.complete and not errors):
        said = "an error was found" if errors else "no error was found"
        raise ReportError(f"a report that contradicts itself: its verdict is {report.verdict}, and {said}")
    if report.complete and not report.found and any(check.result == "found" for check in report.checks):
        raise ReportError("a report that contradicts itself: a check has found something, and no finding says what")


def _joined(header: dict[str, Any], rest: str) -> dict[str, Any]:
    *texts, last = rest.rstrip().split("\n")
    summary = _parsed(last)
    if not isinstance(summary, dict) or summary.get("type") != SUMMARY:
        raise ReportError("the report has been cut: its last line is no summary")
    lines = [_loaded(text, f"line {number}") for number, text in enumerate(texts, 2)]
    lists: dict[str, list[Any]] = {key: [] for key in LISTS.values()}
    for number, line in enumerate(lines, 2):
        key = LISTS.get(str(line.pop("type", ""))) if isinstance(line, dict) else None
        if key is None:
            raise ReportError(f"line {number} is of no type that a report has")
        lists[key].append(line)
    for key, entries in lists.items():
        announced = summary.get(key) or 0
        if announced != len(entries):
            raise ReportError(f"the summary counts {announced} {key}, and {len(entries)} are there")
    whole = {key: value for key, value in header.items() if key != "type"}
    return whole | {key: None if summary.get(key) is None else entries for key, entries in lists.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _loaded(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ReportError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ReportError(f"{what} is no JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


# -- the reports of the ranks of one job --
#
# A finding of several ranks (same fingerprint, same file) is kept once, from the rank where it is worst and earliest,
# with `ranks` in its evidence. Checks and their like are those of all reports, equal ones once, and `run` is what all
# agree on. Every other section describes one run or checkpoint and cannot be merged: the first one is kept, and a note
# in `run` says if another report has a different one.

_WORST_FIRST: tuple[Verdict, ...] = ("sick", "inconclusive", "not_reproduced", "not_judged", "healthy")
_KEPT_ONCE = tuple(it.name for it in fields(Report) if it.default is None and it.name not in ("tensors", "gate"))


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
    sections: dict[str, Any] = {name: _first(getattr(report, name) for report in reports) for name in _KEPT_ONCE}
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
    for name in _KEPT_ONCE:
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
