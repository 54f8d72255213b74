"""Reads what any training program prints: lines with a step and a loss among other output.

First the beginning of a file decides which of its lines belong to the training: a program may print a loss at each
step, its mean at each epoch, and that of an evaluation. Then the lines are read one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, pairwise

from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_files import as_number
from ampdoctor.health.reading.log_kind import Epochs, LineRows, ReadIssues, Row
from ampdoctor.health.reading.printed_line import Printed, printed

# -- skipped steps, and logs with nothing else: with Accelerate's configuration DeepSpeed prints only overflows --

OVERFLOW = re.compile(
    rb"(?:OVERFLOW! Rank 0|\[Rank 0\] Overflow detected\.) Skipping step\. Attempted loss scale: ([0-9.e+]+),"
    rb"(?: reducing to ([0-9.e+]+))?"
)
"""DeepSpeed's message for a skipped step; it prints none for other steps."""
_REDUCED = re.compile(
    rb"radient overflow(?: detected, ignoring gradient, setting loss scale to: |\.\s+Skipping step, loss scaler \d+ "
    rb"reducing loss scale to )([0-9.e+-]+)"
)
"""The message of fairseq and Apex, with the loss scale after the step, which is half of the one before."""
_TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})")
_GROWN = 1.5  # growth of the scale between overflows that counts: scalers double it, but only some digits are printed
_LONGER = 1.5  # times the shortest time between two overflows; after a longer time other steps were taken in between
_WHY = "DeepSpeed has printed overflows alone: steps between them are estimated from their times (steps_per_print=N)"


@dataclass(frozen=True, slots=True)
class Overflow:
    """A skipped step."""

    begins: int  # where it begins in its line
    attempted: float  # the loss scale of the step; where it is not printed, twice the one after it
    scale: float  # the loss scale after it
    seconds: float | None  # when it was printed, since 1970; None where the line does not say
    is_told: bool  # whether the line has the scale of the step

    def has_grown(self, before: float) -> bool:
        """Whether the scale is larger than after the skipped step before, so that steps were taken in between."""
        return self.attempted > _GROWN * before


def overflow_in(line: bytes) -> Overflow | None:
    """Returns the skipped step that a line reports."""
    if b"verflow" not in line and b"OVERFLOW" not in line:
        return None
    attempted_is_told = True
    if (found := OVERFLOW.search(line)) is not None:
        attempted, scale = (as_number((found[at] or found[1]).decode()) for at in (1, 2))
    elif (found := _REDUCED.search(line)) is not None:
        scale = as_number(found[1].decode())
        attempted = None if scale is None else 2 * scale
        attempted_is_told = False
    else:
        return None
    if attempted is None or scale is None:
        return None
    return Overflow(found.start(), attempted, scale, _seconds(line), is_told=attempted_is_told)


class OverflowRows(LineRows):
    """Makes rows from overflows, which are printed without their step.

    Steps between them are not printed. At least one was taken where the scale has grown, or where more time has passed
    than between the closest two overflows: as many steps as fit are counted, with one row for all of them.
    """

    def __init__(self) -> None:
        self._step = 0
        self._scale: float | None = None
        self._at: float | None = None
        self._shortest: float | None = None

    def _rows_of(self, line: bytes) -> Iterator[Row]:
        found = overflow_in(line)
        return iter(()) if found is None else self.put(found)

    def rest(self, noticed: ReadIssues) -> Iterator[Row]:
        """As in `LineRows`."""
        noticed.skipped.append(Skipped(what="steps that were taken", reason=_WHY))
        return iter(())

    def put(self, found: Overflow) -> Iterator[Row]:
        """Yields the skipped step, preceded by the last taken step where there was one."""
        steps = self._steps(found)
        if steps > 1:
            taken = {"skipped": 0.0} if self._scale is None else {"skipped": 0.0, "loss_scale": self._scale}
            yield Row(self._step + steps - 1, taken)
        self._step += steps
        yield Row(self._step, {"loss_scale": found.attempted, "skipped": 1.0})
        self._scale, self._at = found.scale, found.seconds

    def _steps(self, found: Overflow) -> int:
        """Returns the number of steps since the overflow before."""
        at = found.seconds
        steps = 2 if self._scale is not None and found.has_grown(self._scale) else 1
        passed = None if at is None or self._at is None else at - self._at
        if passed is not None and passed > 0.0:
            if self._shortest is not None and passed > _LONGER * self._shortest:
                steps = max(steps, round(passed / self._shortest))
            if self._shortest is None or passed < self._shortest:
                self._shortest = passed
        return steps


def _seconds(line: bytes) -> float | None:
    found = _TIME.search(line)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1].decode()).timestamp() + int(found[2]) / 1000
    except (ValueError, OverflowError, OSError):
        return None


MOST_TRIED = 2000  # lines with numbers that decide the layout of a file
_MAIN = ("loss", "gradient_norm")
_COUNTED = "no line says which step it is of: the lines are counted"
_MARKS = ("step", "bar", "fraction", "epoch", "count")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which lines of a file belong to its training."""

    place: str  # how steps are given: the name of the step, or one of `_MARKS`
    rank: int  # the rank whose lines are read: each process may print them
    names: dict[str, str]  # by field, the name of its number
    bars: bool  # whether the step of a printed dictionary is that of the bar beside it
    counted: bool  # whether no line has a step, so that rows and the overflows between them are counted
    rows: int  # the number of such lines in the beginning
    first: int  # the step of the first, as printed


def layout_of(lines: Iterable[bytes]) -> Layout | None:
    """Returns the layout of a file, from its beginning; None where no line belongs to a training."""
    found: list[Printed] = []
    for line in lines:
        one = printed(line)
        if one is None or not (one.numbers or one.is_bar):
            continue
        if not one.numbers and len(found) > 1 and not (found[-1].numbers or found[-2].numbers):
            found.pop()  # of the bars between two rows only the first and the last count
        found.append(one)
        if len(found) >= MOST_TRIED:
            break
    rows = [one for one in found if not one.numbers.keys().isdisjoint(_MAIN) and _place(one)]
    for main in _MAIN:
        told = [one for one in rows if main in one.numbers]
        if told:
            break
    else:
        return None
    counts = Counter((one.evaluates, _place(one), one.numbers[main].name) for one in told)
    (evaluates, place, _), _ = min(counts.items(), key=lambda one: (one[0][0], -one[1]))
    own = [one for one in rows if _place(one) == place and (main not in one.numbers or one.evaluates == evaluates)]
    first = own[0].step if own[0].step is not None else 1
    rank = min(one.rank for one in own if main in one.numbers)
    own = [one for one in own if one.rank == rank]
    names = {}
    for field_ in {name for one in own for name in one.numbers}:
        names[field_] = Counter(one.numbers[field_].name for one in own if field_ in one.numbers).most_common(1)[0][0]
    own = [
        one for one in own if any(one.numbers[main].name == names.get(main) for main in _MAIN if main in one.numbers)
    ]
    bars = place == "count" and _rises(_beside_bars(found, rank))
    counted = place == "count" and not bars
    if place == "epoch":
        counted = not _rises([one.epoch for one in own])
    return Layout(place=place, rank=rank, names=names, bars=bars, counted=counted, rows=len(own), first=first)


def _place(one: Printed) -> str:
    """Returns how a line gives its step; "" where it does not."""
    if one.named:
        return one.named
    if one.is_dictionary:
        return "count"
    if one.step is not None:
        return "bar" if one.is_bar else "fraction"
    return "epoch" if one.epoch is not None else ""


def _rises(places: list[int | float | None]) -> bool:
    if not places or None in places:
        return False
    known = [place for place in places if place is not None]
    falls = sum(after <= before for before, after in pairwise(known))
    return all(place == int(place) for place in known) and falls <= len(known) // 16


def _beside_bars(found: list[Printed], rank: int) -> list[int | float | None]:
    """Returns the step that each dictionary of a rank gets from its bar."""
    reader = _Bars()
    places: list[int | float | None] = []
    for one in found:
        if one.is_bar:
            places += [place for _, place in reader.bar(one.step)]
        if one.is_dictionary and one.rank == rank and not one.numbers.keys().isdisjoint(_MAIN):
            places += [place for _, place in reader.row(one)]
    return places + [place for _, place in reader.rest()]


@dataclass(slots=True)
class _Bars:
    """Gives each printed dictionary the step of the bar that is drawn after it, or else of the one before."""

    last: int | None = None
    _waiting: Printed | None = None

    def bar(self, place: int | None) -> Iterator[tuple[Printed, int | None]]:
        self.last = place
        yield from self.rest()

    def row(self, one: Printed) -> Iterator[tuple[Printed, int | None]]:
        yield from self.rest()
        self._waiting = one

    def rest(self) -> Iterator[tuple[Printed, int | None]]:
        one, self._waiting = self._waiting, None
        if one is not None:
            yield one, self.last


@dataclass(slots=True)
class ConsoleRows(LineRows):
    """Makes rows from the lines of a file, as they come.

    A skipped step is printed without its number. It belongs between the lines around it, right after the step of the
    line before. Where lines have no step numbers, each skipped step counts as one step. The largest number of skipped
    steps between two lines is taken as the number of steps per line: a line with that many is itself skipped, and one
    with fewer also took steps.
    """

    layout: Layout
    unplaced: int = 0  # overflows without a known step, though they may be counted
    _epochs: Epochs = field(default_factory=Epochs)
    _bars: _Bars = field(default_factory=_Bars)
    _drawn: Printed | None = None
    _epoch: float | None = None
    _count: int = 0
    _at: int = field(init=False)
    _scale: float | None = None
    _behind: list[tuple[int, Overflow]] = field(default_factory=list)
    _most: int = 0
    _takes: bool = True

    def __post_init__(self) -> None:
        self._at = min(self.layout.first, 1) - 1

    def rest(self, noticed: ReadIssues) -> Iterator[Row]:
        """As in `LineRows`."""
        yield from self._rows(self._bars.rest())
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            yield from self._rows([(drawn, drawn.step)])
        yield from self._last_overflows()
        if self.layout.counted:
            noticed.skipped.append(Skipped(what="the numbers of the steps", reason=_COUNTED))
        noticed.unplaced += self.unplaced
        if self.unplaced:
            what = "an overflow" if self.unplaced == 1 else f"{self.unplaced:,} overflows"
            noticed.skipped.append(
                Skipped(what=what, reason="what is printed of a skipped step does not say which it was")
            )

    def _rows_of(self, line: bytes) -> Iterator[Row]:
        overflow = overflow_in(line)
        if overflow is not None:
            yield from self._rows_of(line[: overflow.begins])  # a bar without newline
            self._behind.append((self._at, overflow))
            return
        one = printed(line)
        if one is None:
            return
        if one.is_bar and self.layout.bars:
            yield from self._rows(self._bars.bar(one.step))
            self._at = one.step or self._at
        if not self._is_a_row(one):
            self._epoch = one.epoch if one.epoch is not None and not one.numbers else self._epoch
            return
        if self.layout.bars:
            yield from self._rows(self._bars.row(one))
        elif one.is_bar:  # a bar is drawn again with the loss of its step
            before, self._drawn = self._drawn, one
            if before is not None and (before.step, before.of, before.epoch) != (one.step, one.of, one.epoch):
                yield from self._rows([(before, before.step)])
        else:
            yield from self._rows([(one, one.step)])

    def _is_a_row(self, one: Printed) -> bool:
        """Whether a line fits the layout; if so, it keeps only numbers with the layout's names."""
        own = {name: number for name, number in one.numbers.items() if self.layout.names.get(name) == number.name}
        main = one.numbers.keys() & _MAIN
        if not main or not own.keys() >= main or one.rank != self.layout.rank or _place(one) != self.layout.place:
            return False
        one.numbers = own
        return True

    def _rows(self, placed: Iterable[tuple[Printed, int | None]]) -> Iterator[Row]:
        for one, place in placed:
            behind, self._behind = self._behind, []
            values = {name: number.value for name, number in one.numbers.items()}
            if self.layout.counted:
                yield from self._counted(behind)
                skipped = 0 < len(behind) == self._most
                step = self._count = self._count + (not skipped)
            else:
                step = self._step(one, place)
                skipped = False
                for row in self._between(behind, step):
                    skipped = row.step == step
                    yield row
            if self._scale is not None and not skipped:  # the row of a skipped step has the scale that it tried
                values.setdefault("loss_scale", self._scale)
                if not self._by_epochs:
                    values["skipped"] = 0.0
            if self.layout.place == "num_updates":  # fairseq's counter, of steps that were taken only
                values.setdefault("skipped", 0.0)
            self._at, self._takes = step, not skipped
            yield Row(step, values)

    def _counted(self, behind: Sequence[tuple[int, Overflow]]) -> Iterator[Row]:
        """Counts skipped steps, and a taken step where the scale has grown and no line shows one."""
        self._most = max(self._most, len(behind))
        self.unplaced += len(behind)  # a line may stand for several steps
        for _, one in behind:
            attempted = one.attempted
            if not self._takes and self._scale is not None and one.has_grown(self._scale):
                if one.is_told or self.layout.place == "epoch":
                    self._count += 1
                    yield Row(self._count, {"loss_scale": self._scale, "skipped": 0.0})
                else:  # at a minimum that the line does not show: between two lines no scale grows
                    attempted = self._scale
            self._count += 1
            yield Row(self._count, {"loss_scale": attempted, "skipped": 1.0})
            self._scale, self._takes = one.scale, False

    def _between(self, behind: Sequence[tuple[int, Overflow]], step: int) -> Iterator[Row]:
        """Places skipped steps before a line's step; counts none where there are not enough steps."""
        if not behind:
            return
        places = list(accumulate((at + 1 for at, _ in behind), lambda before, at: max(before + 1, at)))
        if self.layout.place in ("num_updates", "epoch") or places[-1] > step:
            self.unplaced += len(behind)
        else:
            for at, (_, one) in zip(places, behind, strict=True):
                yield Row(at, {"loss_scale": one.attempted, "skipped": 1.0})
        self._scale = None if self.layout.place == "num_updates" else behind[-1][1].scale

    @property
    def _by_epochs(self) -> bool:
        """Whether a row stands for more steps than its number."""
        return self.layout.place == "epoch" and not self.layout.counted

    def _step(self, one: Printed, place: int | None) -> int:
        self._count += 1
        if place is None and one.epoch is None:
            return self._count
        if self.layout.place == "epoch":
            return int(one.epoch or 0)
        if self.layout.bars:
            return place if place is not None else self._count
        epoch = self._epoch if one.epoch is None else one.epoch
        return self._epochs.step(epoch, place or 0, one.of)

    def _last_overflows(self) -> Iterator[Row]:
        """Yields the overflows after the last row, with steps counted on from it."""
        behind, self._behind = self._behind, []
        if self._by_epochs:
            self.unplaced += len(behind)
            return
        if self.layout.counted:
            by_time = OverflowRows()
            for _, one in behind:
                yield from (Row(self._at + row.step, row.values) for row in by_time.put(one))
            return
        for at, one in behind:
            self._at = max(self._at, at) + 1
            yield Row(self._at, {"loss_scale": one.attempted, "skipped": 1.0})
