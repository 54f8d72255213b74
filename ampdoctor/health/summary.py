"""Reads a log once for its curves and maps, and for the findings of the rules on runs over time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ampdoctor.diagnosis.catalogue import codes_in
from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.errors import CheckpointError, NoStepError
from ampdoctor.evidence.checkpoint_stats import LogTail
from ampdoctor.evidence.json_records import Count, Positive
from ampdoctor.evidence.log_records import AlertLine, LogRecord, LookLine, Stamp
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import ErrorNote, Finding, Skipped
from ampdoctor.evidence.report_health import HealthRun
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.condense import RunSummarizer
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import FoundLog

OnProgress: TypeAlias = Callable[[int], None]  # called with the number of lines read

LATELY_S = 600  # a log without last line counts as growing if written within this time: the longest step or save
_TELLS_ITS_END = frozenset({"ampdoctor"})
_EVERY = 20_000
_NAMED = 3  # stretches of missing losses that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """The result of reading a log."""

    runs: tuple[HealthRun, ...]  # one for each optimizer
    findings: tuple[Finding, ...] = ()  # in the order of arrival, without undone ones
    over: tuple[int, ...] = ()  # places of those in `findings` that the run has come back from
    tail: LogTail = field(default_factory=LogTail)
    undone: tuple[Finding, ...] = ()  # findings at steps that a rollback or a restart has undone
    ranks: Positive = 1  # ranks that have lines in the log
    detail_every: Positive | None = None  # steps between two measurements of single tensors
    skipped: tuple[Skipped, ...] = ()  # what was left out
    errors: tuple[ErrorNote, ...] = ()  # why the log cannot be judged
    unfinished: tuple[str, ...] = ()  # files whose last line was left out, since it has no newline
    unplaced: Count = 0  # skipped steps whose number is not in the log
    unread: Mapping[str, str] = field(default_factory=dict)  # by check: a note on a number that is never there


def look(found: FoundLog, thresholds: Thresholds, told: OnProgress | None = None) -> LogSummary:
    """Reads a log; raises NoStepError where it has no step, and CheckpointError where it cannot be read."""
    noticed = ReadIssues()
    reader = _Reader(thresholds)
    number = 0
    for number, whole in enumerate(found.lines(noticed), 1):
        reader.add(whole)
        if told is not None and number % _EVERY == 0:
            told(number)
    reader.ends()
    kind = found.kind.format
    runs = reader.condenser.runs(
        name=found.name, source=shown_path(found.folder), kind=kind, lately=False if kind in _TELLS_ITS_END else None
    )
    lost = noticed.lines_lost()
    if not runs:
        if lost:
            known = "; ".join(f"of {one.what}, {one.reason}" for one in lost)
            raise CheckpointError(f"{found.name} has no step that can be read: {known}.")
        for error in noticed.unread.errors(found.name):
            raise CheckpointError(error.message)
        raise NoStepError(f"{found.name} has no step: nothing was trained yet, or nothing was logged.")
    gaps = reader.condenser.steps_without_loss(noticed.unread.empty_losses)
    findings, undone = reader.findings()
    over = tuple(at for at, finding in enumerate(findings) if reader.is_over(finding))
    findings = tuple(_as_written(finding, noticed.order.zeros) for finding in findings)
    return LogSummary(
        runs=runs,
        findings=findings,
        over=over,
        tail=reader.condenser.tail(),
        undone=undone,
        ranks=max(len(reader.ranks), 1),
        detail_every=reader.condenser.header.detail_every,
        skipped=(
            *found.skipped,
            *noticed.skipped,
            *lost,
            *noticed.order.left_out(),
            *noticed.unread.left_out(),
            *reader.mixed(found.name),
        ),
        errors=(*noticed.errors(found.name, number), *_missing_losses(gaps, found.name)),
        unfinished=noticed.unfinished(),
        unplaced=noticed.unplaced,
        unread={**noticed.unread.checks(), **({"loss": f"not judged: it is missing {_at(gaps)}"} if gaps else {})},
    )


def _missing_losses(gaps: Sequence[tuple[int, int]], log: str) -> Iterator[ErrorNote]:
    """Yields an error where losses are missing: they may have been NaN."""
    if gaps:
        message = f"The loss is missing {_at(gaps)} of {log}: some loggers write nothing, or null, for NaN."
        yield ErrorNote(what=f"{log}: loss", kind="unreadable", message=message)


def _at(gaps: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"{first:,} to {last:,}" for first, last in gaps[:_NAMED])
    return f"in steps {named}{f' and {len(gaps) - _NAMED:,} more stretches' if len(gaps) > _NAMED else ''}"


def grown_lately(found: FoundLog) -> bool:
    """Whether a log was written to within `LATELY_S`."""
    newest = max((file.written_ns for file in found.state()), default=0)
    return time.time() - newest / 1e9 < LATELY_S


class _Reader:
    """Takes all lines: those of the first rank are condensed, those of every rank are judged."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.condenser = RunSummarizer()
        self.ranks: dict[int, Judge] = {}
        self._restarts: dict[int, int] = {}
        self._runs: dict[int, str] = {}
        self._turn: tuple[int, str, int] | None = None
        self._judge: Judge  # of the current turn
        self._turns: set[tuple[int, str, int]] = set()
        self._taken_turns = False
        self._shown: int | None = None
        self._found: list[tuple[int, Finding]] = []
        self._judged = codes_in("health")
        self._last: dict[int, LogRecord] = {}

    def add(self, whole: LogRecord) -> None:
        stamp, line = whole.stamp, whole.line
        if self._turn != (turn := (stamp.rank, stamp.run_id, stamp.restarts)):
            self._taken_turns |= turn in self._turns
            self._turns.add(turn)
            self._turn = turn
            self._judge = self._judge_of(stamp)
        if stamp.rank == self._shown:
            self.condenser.add(whole)
        self._last[stamp.rank] = whole
        if isinstance(line, AlertLine):
            if line.finding.code not in self._judged:  # the others are found anew, with the current thresholds
                self._add(whole, line.finding)
        elif isinstance(line, LookLine):
            self._judge.knows(line)
            for finding in line.findings:  # which have the step of the replay
                self._add(whole, replace(finding, where=replace(finding.where, step=line.step)))
        else:
            for finding in self._judge.add(line):
                self._add(whole, finding)

    def ends(self) -> None:
        """Ends the log: if it just breaks off, its last steps are judged as they are."""
        for rank, judge in self.ranks.items():
            for finding in judge.ends():
                self._add(self._last[rank], finding)

    def _judge_of(self, stamp: Stamp) -> Judge:
        rank, restarts = stamp.rank, self._restarts.get(stamp.rank, stamp.restarts)
        if self._runs.setdefault(rank, stamp.run_id) != stamp.run_id:
            self._runs[rank] = stamp.run_id
            if stamp.restarts <= restarts:  # another run, which has another past
                self.ranks.pop(rank, None)
        judge = self.ranks.get(rank)
        if judge is None:
            judge = self.ranks[rank] = Judge(self._thresholds)
            self._shown = rank if self._shown is None else self._shown
        if stamp.restarts > restarts:
            judge.resumes()
        self._restarts[rank] = stamp.restarts
        return judge

    def mixed(self, name: str) -> list[Skipped]:
        """Returns a note if lines of several runs take turns."""
        reason = "lines of several runs take turns in it, as if two trainings wrote at once: the last to begin counts"
        return [Skipped(what=name, reason=reason)] if self._taken_turns else []

    def _add(self, whole: LogRecord, finding: Finding) -> None:
        rank = whole.stamp.rank
        placed = replace(finding, where=replace(finding.where, rank=rank)) if rank else finding
        self._found.append((self.condenser.groups.of(whole.stamp), placed))

    def is_over(self, finding: Finding) -> bool:
        """Returns whether the run has come back from it, by the end of the log."""
        judge = self.ranks.get(finding.where.rank)
        return judge is None or judge.is_over(finding)

    def findings(self) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Returns the valid findings and the undone ones; a finding of several ranks at one step is there once."""
        standing: dict[Hashable, Finding] = {}
        ranks: dict[Hashable, set[int]] = {}
        undone = []
        for group, finding in self._found:
            step = finding.where.step
            if step is not None and step >= self.condenser.groups.undone_from(group):
                undone.append(finding)
                continue
            key = (finding.code, finding.where.tensor, step, finding.evidence.get("optimizer"))
            ranks.setdefault(key, set()).add(finding.where.rank)
            if key not in standing or finding.where.rank == standing[key].where.rank:  # which says more than before
                standing[key] = finding
        return tuple(_of_ranks(finding, len(ranks[key])) for key, finding in standing.items()), tuple(undone)


def _as_written(finding: Finding, zeros: AbstractSet[int]) -> Finding:
    """Adds to a finding about a non-finite loss that the log has 0.0 there, which is what the user sees."""
    loss = finding.evidence.get("loss")
    if finding.where.step not in zeros or not isinstance(loss, float) or math.isfinite(loss):
        return finding
    said = f"the loss of step {finding.where.step} was not finite (the Trainer writes 0.0)"
    return replace(finding, message=f"{finding.message.removesuffix('.')}; {said}.")


def _of_ranks(finding: Finding, ranks: int) -> Finding:
    return finding if ranks == 1 else replace(finding, evidence={**finding.evidence, "ranks": ranks})
