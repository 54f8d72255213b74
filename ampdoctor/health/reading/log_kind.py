"""Base of all log readers: a kind of log claims its own files, and yields their content as lines of a run's log."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, Line, LogRecord, RunLine, Stamp, StepLine
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.health.reading.log_files import SkippedLines, lines_in, step_of, unread_in

# -- the order of rows, and rows that a later one replaces --

LATE = 8  # rows that wait for late numbers of their step; only more rows than this form a stretch that is repeated


@dataclass(slots=True)
class StepOrder:
    """Counts the rows of a log that a later row repeats, or undoes by falling back behind their step.

    A restart from a checkpoint is in order: it follows a stretch of steps and repeats it. A single row, or a few, form
    no stretch and are no restart.
    """

    rows: int = 0  # without rows that only add to a step
    repeated: int = 0  # rows that say the same as the row before
    undone: int = 0  # rows that contradict the value used for their step, or lie behind the point where a row fell back
    zeros: set[int] = field(default_factory=set)  # steps whose loss is 0.0 in the log, and is read as NaN
    _standing: array[int] = field(default_factory=lambda: array("q"))
    _stretch: int = 0
    _begun_again: int = 0
    _until: int = -1

    def goes_on(self, step: int) -> None:
        """Takes the step of a row, which differs from the step of the row before, or has fallen back."""
        self.rows += 1
        last = self._standing[-1] if self._standing else -1
        if step <= last:
            at = bisect_left(self._standing, step)
            gone = len(self._standing) - at
            del self._standing[at:]
            if self._stretch > LATE:
                self._begun_again, self._until = self._begun_again + gone, max(self._until, last)
            else:
                self.undone += gone
            self._stretch = 0
        elif self._begun_again and step > self._until:
            if self._stretch <= LATE and 2 * self._stretch < self._begun_again:
                self.undone += self._begun_again
            self._begun_again = 0
        self._stretch += 1
        self._standing.append(step)

    def repeats(self, *, alike: bool) -> None:
        """Takes a row of the same step as the row before, with the same values (`alike`) or others."""
        self.rows += 1
        self.repeated += alike
        self.undone += not alike

    @property
    def lost(self) -> int:
        """The number of rows that are not used."""
        return self.repeated + self.undone

    def left_out(self) -> Iterator[Skipped]:
        """Yields the note about unused rows."""
        if self.lost:
            rows = "a row of a step" if self.lost == 1 else f"{self.lost:,} rows of steps"
            them = "it" if self.lost == 1 else "each of them"
            yield Skipped(what=rows, reason=f"a later row repeats or precedes {them}")

    def errors(self, name: str) -> Iterator[ErrorNote]:
        """Yields an error where at least half of the rows are lost, unless all of these only repeat others."""
        if self.undone and 2 * self.lost >= self.rows:
            message = (
                f"A later row repeats or precedes {self.lost:,} of the {self.rows:,} rows of {name}, which are out of "
                "order: sort them, with one row for each step, or give each run its own file."
            )
            yield ErrorNote(what=name, kind="out_of_order", message=message)


# -- rows of other tools' logs as lines of a run's log --

_SAYS_SOMETHING = frozenset({"loss", "gradient_norm", "loss_scale", "seconds", "skipped"})
_LARGEST = 2.0**63
_MOST_STEPS = 2**53  # larger values are not steps: numbers are kept as floats, which cannot tell such steps apart


@dataclass(slots=True)
class Row:
    """A row of a log: a step and some of its numbers."""

    step: int  # as the log counts
    values: dict[str, float] = field(default_factory=dict)  # names as in `StepLine`
    time_ms: int = 0  # since 1970; 0 where the log does not say


def row_of(fields: Mapping[str, float], time_ms: int = 0) -> Row | None:
    """Returns the row with these fields; None without a step."""
    step = step_of(fields)
    if step is None:
        return None
    return Row(step, {name: value for name, value in fields.items() if name != "step"}, time_ms)


def milliseconds(seconds: object) -> int:
    """Returns milliseconds for a log's time in seconds since 1970; 0 for an invalid one."""
    if not isinstance(seconds, int | float) or not abs(seconds) < _LARGEST / 1000:
        return 0
    return int(seconds * 1000)


def lines_of(
    rows: Iterable[Row], run: RunLine, order: StepOrder, *, ended: Callable[[], EndLine | None] = lambda: None
) -> Iterator[LogRecord]:
    """Yields the lines of a run: rows of one step become one line, and rows without a number of a step make none.

    `rows` come in the order in which they were logged; `order` counts repeated ones. `ended` is called after the last
    row for the run's end. Where the step falls back, and the row does not only add to its step, the run was restarted
    from an earlier checkpoint: a new attempt begins, which undoes the old one from that step on.
    """
    made = _RunLines(run, order)
    yield made.stamped(run, 0)
    for row in rows:
        yield from made.add(row)
    yield from made.rest()
    end = ended()
    if end is not None:
        yield made.stamped(replace(end, steps=made.steps), made.last)


class _RunLines:
    """Makes the lines of a run from its rows, as they come; `order` counts repeated ones."""

    def __init__(self, run: RunLine, order: StepOrder) -> None:
        self._run, self._order = run, order
        self._waiting: list[Row] = []
        self.steps = self.last = self._attempt = 0

    def add(self, row: Row) -> Iterator[LogRecord]:
        """Takes a row, and yields the lines of the steps that are complete."""
        if not 0 <= row.step < _MOST_STEPS:
            return
        waiting = self._waiting
        known = next((one for one in reversed(waiting) if one.step == row.step), None)
        if known is not None and (known is waiting[-1] or _adds(known, row)):
            if told := known.values.keys() & row.values.keys() & _SAYS_SOMETHING:
                alike = all(_same(known.values[name], row.values[name]) for name in told)
                if known is waiting[-1] and (not alike or not row.values.keys() - known.values.keys()):
                    self._order.repeats(alike=alike)
            known.values |= row.values
            known.time_ms = row.time_ms or known.time_ms
            return
        if waiting and row.step <= waiting[-1].step:
            if not says_something(row.values):  # a rate or an average over earlier steps
                return
            yield from self.rest()
            self._attempt += 1
        self._order.goes_on(row.step)
        self._waiting.append(row)
        if len(self._waiting) > LATE:
            yield from self._lines([self._waiting.pop(0)])

    def rest(self) -> Iterator[LogRecord]:
        """Yields the lines of the waiting steps."""
        rows, self._waiting = self._waiting, []
        yield from self._lines(rows)

    def _lines(self, rows: Iterable[Row]) -> Iterator[LogRecord]:
        for row in rows:
            line = _step(row)
            if line is not None:
                self.steps += 1
                if _hides_a_nan(row.values):
                    self._order.zeros.add(row.step)
                self.last = row.time_ms
                yield self.stamped(line, row.time_ms)

    def stamped(self, line: Line, time_ms: int) -> LogRecord:
        """Returns a line of the current attempt."""
        branch = self._attempt - 1 if self._attempt else None
        stamp = Stamp(run_id=self._run.name or "-", attempt=self._attempt, branch=branch, time_ms=time_ms)
        return LogRecord(stamp, line)


def _adds(known: Row, late: Row) -> bool:
    new = late.values.keys() - known.values.keys()
    return bool(new) and all(known.values[name] == late.values[name] for name in late.values.keys() - new)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def says_something(values: Mapping[str, float]) -> bool:
    """Whether one of these numbers belongs to a step."""
    return not values.keys().isdisjoint(_SAYS_SOMETHING)


def _step(row: Row) -> StepLine | None:
    values = row.values
    if not says_something(values):
        return None
    rate, skipped = values.get("learning_rate"), values.get("skipped")
    return StepLine(
        step=row.step,
        loss=math.nan if _hides_a_nan(values) else values.get("loss"),
        gradient_norm=values.get("gradient_norm"),
        max_norm=values.get("max_norm"),
        loss_scale=values.get("loss_scale"),
        skipped=None if skipped is None else bool(skipped),
        learning_rates=() if rate is None else (rate,),
        seconds=values.get("seconds"),
        data_seconds=values.get("data_seconds"),
        memory_bytes=_count(values.get("memory_bytes")),
        samples=_count(values.get("samples")),
        tokens=_count(values.get("tokens")),
    )


def _hides_a_nan(values: Mapping[str, float]) -> bool:
    """Whether the loss is 0.0 beside a norm that is not finite, as the Trainer and its trackers write a NaN."""
    norm = values.get("gradient_norm")
    return values.get("loss") == 0 and norm is not None and not math.isfinite(norm)


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < _LARGEST else None


# -- columns without numbers: texts, booleans, empty cells --

_JUDGED = {"loss": "loss", "gradient_norm": "gradient norm", "loss_scale": "loss scale"}
_TOLD = {"step": "number of the step", **_JUDGED}


@dataclass(slots=True)
class _Column:
    numbers: int = 0
    texts: int = 0
    empty: int = 0

    @property
    def rows(self) -> int:
        return self.numbers + self.texts + self.empty


@dataclass(slots=True)
class Unread:
    """Counts, for each number that is judged, the rows with a number and the rows with a column but no number."""

    _columns: dict[str, _Column] = field(default_factory=dict)
    empty_losses: array[int] = field(default_factory=lambda: array("q"))  # steps of rows whose loss is empty

    def add(self, row: Mapping[str, Any], fields: Mapping[str, float], step: int | None) -> None:
        """Takes a row of a step: its values by column name, and its known fields."""
        for name in fields.keys() & _TOLD.keys():
            if name == "step" and step_of(fields) is None:
                self._column("step").texts += 1
            else:
                self._column(name).numbers += 1
        for name, empty in unread_in(row):
            if name in _TOLD:
                column = self._column(name)
                column.texts += not empty
                column.empty += empty
                if empty and name == "loss" and step is not None:
                    self.empty_losses.append(step)

    def _column(self, name: str) -> _Column:
        return self._columns.setdefault(name, _Column())

    def checks(self) -> dict[str, str]:
        """Returns a note for each check whose column never has a number."""
        return {
            _JUDGED[name]: f"not judged: none of {one.texts + one.empty} values is a number"
            for name, one in self._columns.items()
            if name in _JUDGED and not one.numbers and (one.texts or name == "loss")
        }

    def errors(self, log: str) -> Iterator[ErrorNote]:
        """Yields the reasons why a log cannot be judged."""
        for name, one in self._columns.items():
            if name not in {"loss", "step"}:
                continue
            what = _TOLD[name]
            if one.texts >= max(one.numbers, 1) or (name == "loss" and one.empty and not one.numbers):
                count = one.rows - one.numbers
                message = f"The {what} is no number in {count:,} of {one.rows:,} rows of {log}."
                yield ErrorNote(what=f"{log}: {what}", kind="unreadable", message=message)

    def left_out(self) -> Iterator[Skipped]:
        """Yields notes about other values that are not numbers."""
        for name, one in self._columns.items():
            if one.numbers > one.texts > 0:
                what = f"a {_TOLD[name]}" if one.texts == 1 else f"{one.texts:,} values of the {_TOLD[name]}"
                yield Skipped(what=what, reason="it is no number" if one.texts == 1 else "they are no numbers")


LOOKED_THROUGH = 64 * 1024 * 1024  # most bytes that are searched for a log: a folder may hold a thousand outputs


@dataclass(slots=True)
class Budget:
    """Limits how much is read while a log is searched."""

    left: int = LOOKED_THROUGH  # bytes
    passed_by: set[Path] = field(default_factory=set)  # files that were not read because nothing was left


@dataclass(frozen=True, slots=True)
class LogLocation:
    """A file that was named, or a folder with the names of its files."""

    folder: Path
    names: tuple[str, ...]  # in order; for a named file its own name only
    named: bool = False  # one file was named, and is read under any name
    refused: dict[str, str] = field(default_factory=dict)  # by name, why a possible log cannot be read; grows
    budget: Budget = field(default_factory=Budget)  # shared with other places
    known: dict[tuple[str, str], Any] = field(default_factory=dict)  # results, so that each file is searched once

    def head(self, name: str, count: int) -> bytes:
        """Returns the first `count` bytes of a file; b"" where it cannot be read, with the reason in `refused`."""
        try:
            with RegularFile(self.folder / name, name) as file:
                return file.head(count)
        except CheckpointError as error:
            self.refused[name] = str(error)
            return b""

    def latest(self, names: Iterable[str]) -> list[str]:
        """Returns files by their modification time, the latest first; of equal times the last by name."""

        def written(name: str) -> tuple[int, str]:
            try:
                return (self.folder / name).stat().st_mtime_ns, name
            except OSError:
                return 0, name

        return sorted(names, key=written, reverse=True)


@dataclass(slots=True)
class ReadIssues:
    """Notes that are collected while a log is read."""

    left: defaultdict[str, SkippedLines] = field(
        default_factory=lambda: defaultdict(SkippedLines)
    )  # by file: lost lines
    skipped: list[Skipped] = field(default_factory=list)  # what else was left out, and why
    order: StepOrder = field(default_factory=StepOrder)
    unplaced: int = 0  # skipped steps whose number is not in the log
    unread: Unread = field(default_factory=Unread)  # columns without numbers

    def lines_lost(self) -> list[Skipped]:
        """Returns a note for each file that has lost lines."""
        return [Skipped(what=name, reason=said) for name, left in sorted(self.left.items()) if (said := left.said())]

    def errors(self, name: str, read: int) -> Iterator[ErrorNote]:
        """Yields an error where a quarter of the lines is lost beside the `read` ones: they may hold the failure."""
        lost = sum(left.damaged + left.too_long + left.other_version for left in self.left.values())
        if lost and 3 * lost >= read:
            yield ErrorNote(what=name, kind="unreadable", message=f"{lost:,} lines of {name} could not be read.")
        ambiguous = sum(left.ambiguous for left in self.left.values())
        if ambiguous:
            lines = "a line" if ambiguous == 1 else f"{ambiguous:,} lines"
            message = f"In {lines} of {name} a name has two values, and readers disagree which of them counts."
            yield ErrorNote(what=name, kind="ambiguous", message=message)
        yield from self.order.errors(name)
        yield from self.unread.errors(name)

    def unfinished(self) -> tuple[str, ...]:
        """Returns the files whose last line was left out because it has no newline."""
        return tuple(name for name, left in sorted(self.left.items()) if left.unfinished)


class LineRows:
    """Makes rows from a file's lines."""

    def rows(self, lines: Iterator[bytes], left: SkippedLines) -> Iterator[Row]:  # noqa: ARG002 - most lose none
        """Yields the rows of whole lines; `left` counts those that cannot be used."""
        for line in lines:
            yield from self._rows_of(line)

    def _rows_of(self, line: bytes) -> Iterator[Row]:
        raise NotImplementedError

    def rest(self, noticed: ReadIssues) -> Iterator[Row]:  # noqa: ARG002 - in most nothing waits
        """Yields rows that wait for a line that has not come, and adds notes to `noticed`."""
        return iter(())

    def end(self) -> EndLine | None:
        """Returns how the run ended; None where the lines do not say."""
        return None


Begin: TypeAlias = Callable[[RegularFile], LineRows]
Read: TypeAlias = Callable[[Path, Sequence[str], ReadIssues], Iterator[LogRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKind:
    """A kind of log.

    Attributes:
        format: As in `HealthRun.format`.
        claims: Returns the logs of this kind in a place, the latest first, each as its files in reading order.
        read: Yields the lines of these files in the order of arrival, up to the size that each file has when opened.
        lacks: Yields missing or unreadable parts of a place's log. With an error the run cannot be called healthy.
    """

    format: str
    claims: Callable[[LogLocation], Sequence[Sequence[str]]]
    read: Read
    lacks: Callable[[LogLocation], Iterator[ErrorNote | Skipped]] = lambda _: iter(())


def kind_of_one_file(
    format: str,  # noqa: A002
    of_place: Callable[[LogLocation], Iterable[str]],
    begin: Begin,
) -> LogKind:
    """Returns a kind where each file is a log; `begin` makes rows of its lines."""
    return LogKind(format=format, claims=lambda place: [[name] for name in of_place(place)], read=reading(begin))


def reading(begin: Begin) -> Read:
    """Returns a function that reads a log of one file; `begin` makes rows of its lines."""

    def read(folder: Path, names: Sequence[str], noticed: ReadIssues) -> Iterator[LogRecord]:
        (name,) = names
        left = noticed.left[name]
        with RegularFile(folder / name, name) as file:
            made = begin(file)
            rows = chain(made.rows(lines_in(file, left=left), left), _rest(made, noticed))
            yield from lines_of(rows, run_of(folder, name), noticed.order, ended=made.end)

    return read


def _rest(made: LineRows, noticed: ReadIssues) -> Iterator[Row]:
    yield from made.rest(noticed)  # a generator: it must run after the last line


def run_of(folder: Path, name: str) -> RunLine:
    """Returns the header of the run whose log is this file."""
    return RunLine(name=folder.name if name == "metrics.csv" else Path(name).stem)


# -- steps that restart at each epoch --


@dataclass(slots=True)
class Epochs:
    """Turns steps that restart at each epoch into steps of the whole run.

    A step that falls back within an epoch, or to an earlier one, is a restart, and falls back in the result too. Where
    the epoch is not known, a new one begins after the last step of the old one.
    """

    _epoch: float | None = None
    _offset: int = 0
    _offsets: dict[float, int] = field(default_factory=dict)
    _last: int = -1
    _gap: int = 1
    _of: int | None = None

    def step(self, epoch: float | None, step: int, of: int | None = None) -> int:
        """Returns the step of the run; `of` is the number of steps in an epoch, where it is known."""
        if epoch is not None and self._epoch is not None and epoch != self._epoch:
            if epoch < self._epoch:
                self._offset = self._offsets.get(epoch, 0)
            elif step <= self._last:
                whole = of if of is not None and of >= self._last else self._last + self._gap - step
                self._offset += max(whole, self._last + 1 - step)
        elif epoch is None and of is not None and of == self._of and step <= self._last > of - self._gap:
            self._offset += max(of, self._last + 1 - step)
        elif step > self._last >= 0:
            self._gap = step - self._last
        if epoch is not None:
            self._epoch = epoch
            self._offsets[epoch] = self._offset
        self._last, self._of = step, of
        return self._offset + step
