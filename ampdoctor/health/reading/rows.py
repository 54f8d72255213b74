"""Rows of other people's logs as lines of a run's log: a row has a step and some numbers of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampdoctor.checkpoints.log_files import step_of
from ampdoctor.evidence.log_records import EndLine, Line, RunLine, Stamp, Stamped, StepLine
from ampdoctor.health.reading.order import LATE, Order

_SAYS_SOMETHING = frozenset({"loss", "gradient_norm", "grad_norm", "loss_scale", "scale", "seconds", "skipped"})
OF_A_NETWORK = "loss/"
"""How the name of a loss begins that one of several networks minimises; each is a series of its own."""
_LARGEST = 2.0**63
_MOST_STEPS = 2**53
"""What is beyond is no step: numbers are kept as floats, which tell no two such steps apart."""


@dataclass(slots=True)
class Row:
    """A row of a log.

    Attributes:
        step: Its step, as the log counts them.
        values: Its numbers, by the names of `StepLine` or of `LogEntry`, and losses of several networks by theirs.
        time_ms: Milliseconds since 1970; 0 where the log does not say.
    """

    step: int
    values: dict[str, float] = field(default_factory=dict)
    time_ms: int = 0


def row_of(fields: Mapping[str, float], time_ms: int = 0) -> Row | None:
    """Returns the row that these fields are; None without a step."""
    step = step_of(fields)
    if step is None:
        return None
    return Row(step, {name: value for name, value in fields.items() if name != "step"}, time_ms)


class SkipCount:
    """Makes of a count of skipped steps, as ampdoctor's exports have it, whether a step was skipped."""

    def __init__(self) -> None:
        self._before = 0.0

    def of_a_step(self, values: dict[str, float]) -> dict[str, float]:
        """Returns a row's numbers with `skipped` in place of `skips`."""
        skips = values.pop("skips", None)
        if skips is not None:
            values["skipped"] = float(skips > self._before)
            self._before = skips
        return values


def milliseconds(seconds: object) -> int:
    """Returns a time of a log, which is in seconds since 1970; 0 for what is none."""
    if not isinstance(seconds, int | float) or not abs(seconds) < _LARGEST / 1000:
        return 0
    return int(seconds * 1000)


def lines_of(
    rows: Iterable[Row], run: RunLine, order: Order, *, ended: Callable[[], EndLine | None] = lambda: None
) -> Iterator[Stamped]:
    """Yields the lines of a run; rows of one step become one step, and a number that is no step's makes no line.

    Where the step falls back, and the row is no late one that only adds to its step, the run was started again from an
    earlier checkpoint: what follows is its next attempt, which undoes what came before it from there on.

    Args:
        rows: In the order in which they were logged.
        run: What is known of the run.
        order: Told in which order they come.
        ended: Asked behind the last row for what the log says of the run's end; None where it does not.
    """
    made = RunLines(run, order)
    yield made.header()
    for row in rows:
        yield from made.hear(row)
    yield from made.rest()
    end = ended()
    if end is not None:
        yield made.end(end)


class RunLines:
    """Makes the lines of a run from its rows, as they come.

    Args:
        run: What is known of the run.
        order: Told in which order they come.
    """

    def __init__(self, run: RunLine, order: Order) -> None:
        self._run, self._order = run, order
        self._waiting: list[Row] = []
        self._attempt = self._steps = self._last = 0

    def header(self) -> Stamped:
        """Returns the first line."""
        return self._stamped(self._run, 0, 0)

    def end(self, end: EndLine) -> Stamped:
        """Returns the last line, with the count of the steps."""
        return self._stamped(replace(end, steps=self._steps), self._last, self._attempt)

    def hear(self, row: Row) -> Iterator[Stamped]:
        """Takes a row, and yields the lines of the steps to which nothing can be added any more."""
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
            if not says_something(row.values):  # a rate or an average of something that has passed
                return
            yield from self.rest()
            self._attempt += 1
        self._order.goes_on(row.step)
        self._waiting.append(row)
        if len(self._waiting) > LATE:
            yield from self._lines([self._waiting.pop(0)])

    def waiting(self) -> list[Stamped]:
        """Returns the lines of the steps to which something may still be added, as they are now."""
        steps = self._steps
        lines = list(self._lines(self._waiting))
        self._steps = steps
        return lines

    def rest(self) -> Iterator[Stamped]:
        """Yields the lines of the steps that wait."""
        rows, self._waiting = self._waiting, []
        yield from self._lines(rows)

    def _lines(self, rows: Iterable[Row]) -> Iterator[Stamped]:
        for row in rows:
            line = _step(row)
            if line is not None:
                self._steps += 1
                if _hides_a_nan(row.values):
                    self._order.zeros.add(row.step)
                self._last = row.time_ms
                if not self._run.optimizers and (networks := _networks(row.values)):
                    self._run = replace(self._run, optimizers=networks)
                    yield self._stamped(self._run, row.time_ms, self._attempt)
                for one in _of_networks(line, row.values, self._run.optimizers) or (line,):
                    yield self._stamped(one, row.time_ms, self._attempt)

    def _stamped(self, line: Line, time_ms: int, attempt: int) -> Stamped:
        branch = attempt - 1 if attempt else None
        return Stamped(Stamp(run_id=self._run.name or "-", attempt=attempt, branch=branch, time_ms=time_ms), line)


def _adds(known: Row, late: Row) -> bool:
    """Does a row add new values to its step, and contradict none?"""
    new = late.values.keys() - known.values.keys()
    return bool(new) and all(known.values[name] == late.values[name] for name in late.values.keys() - new)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def says_something(values: Mapping[str, float]) -> bool:
    """Is one of these numbers a step's?"""
    return not values.keys().isdisjoint(_SAYS_SOMETHING) or bool(_networks(values))


def _networks(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(name.removeprefix(OF_A_NETWORK) for name in values if name.startswith(OF_A_NETWORK))


def _of_networks(line: StepLine, values: Mapping[str, float], networks: Sequence[str]) -> list[StepLine]:
    """Returns a step of each network that has a loss in it; what the row says of none of them is the first one's."""
    losses = {at: loss for at, name in enumerate(networks) if (loss := values.get(OF_A_NETWORK + name)) is not None}
    return [
        replace(line, loss=loss, optimizer=at)
        if at == min(losses)
        else StepLine(step=line.step, optimizer=at, loss=loss)
        for at, loss in losses.items()
    ]


def _step(row: Row) -> StepLine | None:
    values = row.values
    if not says_something(values):
        return None
    rate, skipped = values.get("learning_rate"), values.get("skipped")
    return StepLine(
        step=row.step,
        loss=_loss(values),
        gradient_norm=values.get("gradient_norm", values.get("grad_norm")),
        max_norm=values.get("max_norm"),
        loss_scale=values.get("loss_scale", values.get("scale")),
        skipped=None if skipped is None else bool(skipped),
        learning_rates=() if rate is None else (rate,),
        seconds=values.get("seconds"),
        data_seconds=values.get("data_seconds"),
        memory_bytes=_count(values.get("memory_bytes")),
        samples=_count(values.get("samples")),
        tokens=_count(values.get("tokens")),
    )


def _loss(values: Mapping[str, float]) -> float | None:
    """Returns the loss; NaN for a 0.0 beside a norm that is not finite: the Trainer and its trackers write it so."""
    return math.nan if _hides_a_nan(values) else values.get("loss")


def _hides_a_nan(values: Mapping[str, float]) -> bool:
    norm = values.get("gradient_norm", values.get("grad_norm"))
    return values.get("loss") == 0 and norm is not None and not math.isfinite(norm)


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < _LARGEST else None
