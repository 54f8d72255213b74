"""Turns a log's lines into what a report shows of its run: curves of at most 2,000 spans with the extremes of each."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ampdoctor.diagnosis.health.rolling import falls_over
from ampdoctor.evidence.checkpoint_stats import LogTail
from ampdoctor.evidence.log_records import (
    ActionLine,
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    LookLine,
    LostLine,
    RunLine,
    Stamp,
    StepLine,
)
from ampdoctor.evidence.paths import LAST_GOOD
from ampdoctor.evidence.report_health import (
    ActionMark,
    CheckpointMark,
    Curve,
    CurveName,
    Ending,
    HealthAxis,
    HealthRun,
    LookMark,
    ScalerHistory,
)
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments
from ampdoctor.health.heat_maps import Maps
from ampdoctor.scaling.search import drawn_changes, drawn_skips

# -- steps as columns of numbers --

Column: TypeAlias = NDArray[np.float64]

_NUMBERS = (
    *("step", "loss", "gradient_norm", "norm", "clipped_norm", "loss_scale", "skipped"),
    *("growth_tracker", "seconds", "data_seconds", "memory_bytes", "samples", "tokens", "scaler"),
)
_MORE = ("samples_per_second", "tokens_per_second", "rate", "time_ms", "group")
"""Beside the fields: throughput, first learning rate, the stamp's time, the number in `Attempts`."""
_BLOCK = 1024


class Columns:
    """Steps of one optimizer. An unknown number is NaN; a loss or norm that was NaN is stored as infinite.

    A curve treats both as not finite. Whole numbers up to 2^53 are exact.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float | None, ...]] = []
        self._blocks: list[NDArray[np.float64]] = []
        self._before: StepLine | None = None

    def add(self, whole: LogRecord, step: StepLine, group: int) -> None:
        """Adds a step from the line `whole`; `group` is its number in `Attempts`."""
        rates, before, self._before = step.learning_rates, self._before, step
        throughput = [step.per_second("samples", before), step.per_second("tokens", before)]
        if step.loss != step.loss or step.gradient_norm != step.gradient_norm:  # NaN
            step = replace(step, loss=_infinite(step.loss), gradient_norm=_infinite(step.gradient_norm))
        rate, time_ms = rates[0] if rates else None, whole.stamp.time_ms or None
        self._rows.append((*_VALUES(step), *throughput, rate, time_ms, group))
        if len(self._rows) == _BLOCK:
            self._fold()

    def whole(self) -> Mapping[str, Column]:
        """Returns all columns by name, in the order of arrival."""
        self._fold()
        table = np.concatenate(self._blocks) if self._blocks else np.empty((0, len(_NUMBERS) + len(_MORE)))
        self._blocks = [table]
        return {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate((*_NUMBERS, *_MORE))}

    def _fold(self) -> None:
        if self._rows:
            self._blocks.append(np.array(self._rows, dtype=np.float64))  # None becomes NaN
            self._rows = []


def with_proved_skips(columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """Returns the columns, ordered by step, with skipped steps that the log does not mark and later rows prove."""
    # `diagnosis.health.step_state.proves_a_skip` has the rule for single rows. Where a skip is proved, a finite norm
    # means that the step was taken.
    skipped, loss, norm, scale = (columns[name] for name in ("skipped", "loss", "gradient_norm", "loss_scale"))
    unknown = np.isnan(skipped)
    if not unknown.any() or len(skipped) < 2:
        return columns
    told = np.where(np.isnan(loss), norm, loss)[1:]
    falls = (np.diff(columns["step"]) == 1) & (scale[1:] < scale[:-1])
    ill = np.isinf(loss) | np.isinf(norm)
    proved = unknown[:-1] & (falls | (ill[:-1] & np.isfinite(told)))
    if not proved.any() or (np.isinf(norm[~np.isnan(norm)]).all() and falls_over(loss.tolist())):
        return columns  # the optimizer did not see this norm: it is never finite while the loss falls
    known = np.where(unknown & ~ill & np.isfinite(norm), 0.0, skipped)
    known[:-1][proved] = 1.0
    return {**columns, "skipped": known}


_MANY = 8  # so many steps without a loss may stand for NaN, as for AMP722
_AROUND = 8  # gaps on either side that show how often a loss is logged


def steps_without_loss(columns: Mapping[str, Column], empty: Sequence[int]) -> list[tuple[int, int]]:
    """Returns first and last step of each stretch of taken steps, ordered by step, whose loss alone is missing.

    `empty` are further steps whose loss is empty. A loss that is logged now and then leaves even gaps: a gap counts
    from `_MANY` steps on, where it is more than twice as long as each of the `_AROUND` gaps before and after it.
    """
    steps, known = columns["step"], ~np.isnan(columns["loss"])
    beside = ~(np.isnan(columns["gradient_norm"]) & np.isnan(columns["loss_scale"])) & (columns["skipped"] != 1)
    there = np.unique(steps[known])
    lacks = np.setdiff1d(np.append(steps[~known & beside], empty), there)
    gap_of = np.searchsorted(there, lacks)  # 0: before the first loss
    gaps = np.bincount(gap_of, minlength=1)
    found = []
    for at in (np.flatnonzero(gaps[1:] >= _MANY) + 1).tolist():
        if gaps[at] > 2 * max(*gaps[max(at - _AROUND, 0) : at], *gaps[at + 1 : at + 1 + _AROUND]):
            inside = lacks[gap_of == at]
            found.append((int(inside[0]), int(inside[-1])))
    return found


_VALUES = attrgetter(*_NUMBERS)


def _infinite(value: float | None) -> float | None:
    return math.inf if value is not None and math.isnan(value) else value


MOST_SPANS = 2000


@dataclass(frozen=True, slots=True)
class Spans:
    """Equal shares of the rows of columns that are ordered by step."""

    starts: NDArray[np.intp]  # the first row of each span
    rows: int  # the number of rows

    @property
    def ends(self) -> NDArray[np.intp]:
        """The row after the last of each span."""
        return np.append(self.starts[1:], self.rows)

    def grid(self, values: Column) -> Column:
        """Returns a row of values for each span, padded with NaN."""
        lengths = self.ends - self.starts
        grid = np.full((len(self.starts), int(lengths.max(initial=0))), np.nan)
        grid[np.arange(grid.shape[1]) < lengths[:, None]] = values
        return grid


def spans_of(steps: Column) -> Spans:
    """Returns the spans of ordered steps; the lines of one step share a span where there are few enough steps."""
    firsts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])) if len(steps) else np.empty(0, np.intp)
    if len(firsts) > MOST_SPANS:
        firsts = firsts[np.linspace(0, len(firsts), MOST_SPANS, endpoint=False).astype(np.intp)]
    return Spans(firsts, len(steps))


def axis_of(columns: Mapping[str, Column], spans: Spans) -> HealthAxis:
    """Returns the steps of the spans, with the counts at the end of each."""
    steps, last = columns["step"], spans.ends - 1
    skipped = np.add.reduceat(columns["skipped"] == 1, spans.starts) if len(spans.starts) else np.empty(0)
    return HealthAxis(
        first=_integers(steps[spans.starts]),
        last=_integers(steps[last]),
        samples=_counted(columns["samples"], spans),
        tokens=_counted(columns["tokens"], spans),
        time_ms=_counted(columns["time_ms"], spans),
        skipped=_integers(skipped),
    )


def curve_of(name: CurveName, values: Column, spans: Spans) -> Curve | None:
    """Returns the curve of `values` (NaN: unknown, infinite: not finite) over the spans; None where all are unknown."""
    if np.isnan(values).all():
        return None
    grid = spans.grid(values)
    nonfinite = np.isinf(grid).sum(axis=1)
    grid[np.isinf(grid)] = np.nan
    grid.sort(axis=1)  # NaN sorts last
    known = np.isfinite(grid).sum(axis=1)
    row, some, last = np.arange(len(grid)), known > 0, np.maximum(known - 1, 0)
    middle = grid[row, last // 2] / 2 + grid[row, (last + 1) // 2] / 2  # their sum may overflow
    return Curve(
        name=name,
        low=_floats(grid[:, 0], some),
        middle=_floats(middle, some),
        high=_floats(grid[row, last], some),
        p99=_floats(grid[row, np.maximum(np.ceil(0.99 * known).astype(np.intp) - 1, 0)], some)
        if name == "step_seconds"
        else None,
        nonfinite=_integers(nonfinite) if nonfinite.any() else None,
    )


def _counted(values: Column, spans: Spans) -> tuple[int | None, ...] | None:
    if np.isnan(values).all():
        return None
    last = np.where(np.isnan(values), -1.0, values)
    found = np.maximum.reduceat(last, spans.starts)
    return tuple(None if value < 0 else int(value) for value in found.tolist())


def _integers(values: NDArray[Any]) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).tolist())


def _floats(values: Column, some: NDArray[np.bool_]) -> tuple[float | None, ...]:
    return tuple(value if there else None for value, there in zip(values.tolist(), some.tolist(), strict=True))


# -- loss scaling --


def scaler_histories(
    columns: Mapping[str, Column], names: Sequence[str], state: Mapping[str, Any] | None
) -> tuple[ScalerHistory, ...]:
    """Returns the history of each scaler in an optimizer's steps; `state` is the first one's at the run's start."""
    known = np.isfinite(columns["loss_scale"])
    if not known.any() or np.all(columns["loss_scale"][known] == 1):  # the scaler is disabled
        return ()
    scalers = np.where(np.isnan(columns["scaler"]), 0, columns["scaler"])
    found = sorted({int(one) for one in np.unique(scalers[known])})
    return tuple(
        _history(
            {name: values[known & (scalers == at)] for name, values in columns.items()},
            (names[at] if at < len(names) else str(at)) if len(found) > 1 else "",
            arguments_in(state) if at == 0 else None,
        )
        for at in found
    )


def arguments_in(state: Mapping[str, Any] | None) -> ScalerArguments | None:
    """Returns the settings in a scaler's `state_dict()`; None where they are missing."""
    if state is None:
        return None
    try:
        return ScalerArguments(
            init_scale=float(state["scale"]),
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=max(int(state["growth_interval"]), 1),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _history(columns: Mapping[str, Column], name: str, arguments: ScalerArguments | None) -> ScalerHistory:
    steps, scales = columns["step"], columns["loss_scale"]
    moves = np.diff(scales)
    starts = np.append(0, np.flatnonzero(moves) + 1)
    skips = steps[columns["skipped"] == 1]
    tracker = columns["growth_tracker"][np.isfinite(columns["growth_tracker"])]
    return ScalerHistory(
        scaler=name,
        path=ScalePath(
            points=tuple((float(steps[at]), float(scales[at])) for at in drawn_changes(starts, scales)),
            changes=len(starts),
            skips=drawn_skips(skips.astype(np.int64)),
            skipped=len(skips),
            replica=0,
        ),
        growths=int(((moves > 0) & (columns["skipped"][:-1] != 1)).sum()),  # after a skipped step, it is a new scaler
        backoffs=int((moves < 0).sum()),
        growth_tracker=int(tracker[-1]) if len(tracker) else None,
        arguments=arguments,
    )


# -- steps that a later attempt, restart or run has repeated, and thereby undone --


@dataclass(slots=True)
class Attempts:
    """The attempts, restarts and runs of a log, in the order in which they began."""

    first: list[int] = field(default_factory=list)  # the first step of each
    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def of(self, stamp: Stamp) -> int:
        """Returns the number of a line's group."""
        key = (stamp.run_id, stamp.restarts, stamp.attempt)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.first)
            self.first.append(2**63 - 1)
        return number

    def begins(self, group: int, step: int) -> bool:
        """Takes a step of a group; returns whether it is the group's first so far."""
        if step >= self.first[group]:
            return False
        self.first[group] = step
        return True

    def undone_from(self, group: int) -> int:
        """Returns the step from which on later groups have undone this one."""
        return min(self.first[group + 1 :], default=2**63 - 1)


def standing(columns: Mapping[str, Column], groups: Attempts) -> Mapping[str, Column]:
    """Drops rows that a later restart repeated; sorts the others by step, those of one step in the order of arrival."""
    limits = np.array([groups.undone_from(group) for group in range(len(groups.first))], dtype=np.float64)
    steps, of = columns["step"], columns["group"].astype(np.intp)
    kept: NDArray[np.intp] = np.flatnonzero(steps < limits[of]) if len(steps) else np.empty(0, np.intp)
    if np.any(np.diff(steps[kept]) < 0):
        kept = kept[np.argsort(steps[kept], kind="stable")]
    if len(kept) == len(steps) and not np.any(np.diff(kept) != 1):
        return columns
    return {name: values[kept] for name, values in columns.items()}


Mark: TypeAlias = CheckpointLine | LookLine | ActionLine
LAST_NORMS = 10  # norms whose median stands for a gradient of late
MOST_MARKS = 10_000  # most checkpoints, looks and actions that are kept: the last ones


@dataclass(slots=True)
class RunSummarizer:
    """Takes the lines of one rank in the order of arrival, in bounded memory: some 150 bytes a step."""

    groups: Attempts = field(default_factory=Attempts)
    header: RunLine = field(default_factory=lambda: RunLine(name=""))  # the last line that described the run
    _steps: dict[int, Columns] = field(default_factory=dict)
    _maps: dict[int, Maps] = field(default_factory=dict)
    _marks: list[tuple[int, Mark]] = field(default_factory=list)
    _lost: dict[tuple[str, int], int] = field(default_factory=dict)
    _end: EndLine | None = None

    def add(self, whole: LogRecord) -> None:
        """Takes a line."""
        line = whole.line
        if isinstance(line, StepLine):
            group = self._group(whole, line.step)
            columns = self._steps.get(line.optimizer)
            if columns is None:
                columns = self._steps[line.optimizer] = Columns()
            columns.add(whole, line, group)
        elif isinstance(line, DetailLine):
            self._group(whole, line.step)
            self._maps.setdefault(line.optimizer, Maps()).add(line, self.header.tensors)
        elif isinstance(line, RunLine):
            if line.scaler is None:  # a later file does not repeat the scaler's initial state
                line = replace(line, scaler=self.header.scaler)
            self.header, self._end = line, None
        elif isinstance(line, CheckpointLine | LookLine | ActionLine):
            self._marks.append((self.groups.of(whole.stamp), line))
            del self._marks[: -MOST_MARKS or None]
        elif isinstance(line, LostLine):
            key = (whole.stamp.run_id, whole.stamp.restarts)
            self._lost[key] = line.details + line.steps + line.others + line.unmade
        elif isinstance(line, EndLine):
            self._end = line

    def _group(self, whole: LogRecord, step: int) -> int:
        group = self.groups.of(whole.stamp)
        if self.groups.begins(group, step) and group:
            for maps in self._maps.values():
                maps.forget_from(step)
        return group

    def runs(self, *, name: str, source: str, kind: str, lately: bool | None) -> tuple[HealthRun, ...]:
        """Returns the run, or one for each of several optimizers.

        `name` is used where the log has none; `source` is its path as the user gave it; `kind` is its format. `lately`
        says whether it has grown lately; None where logs of this kind do not say whether a run has ended.
        """
        names = self.header.optimizers
        ending: Ending = "ended" if self._end is not None else "unknown"
        if self._end is None and lately is not None:
            ending = "running" if lately else "cut_off"
        made = []
        for optimizer in sorted(self._steps):
            columns = with_proved_skips(standing(self._steps[optimizer].whole(), self.groups))
            steps, skipped = columns["step"], int((columns["skipped"] == 1).sum())
            # a line stands for the steps since the last line
            since = np.maximum(np.diff(steps, prepend=steps[:1] - 1), 1)
            told = int(since[~np.isnan(columns["skipped"])].sum())
            maps = self._maps.get(optimizer) or Maps()
            own_name = names[optimizer] if optimizer < len(names) else str(optimizer)
            run = HealthRun(
                name=self.header.name or name,
                source=source,
                format=kind,
                optimizer=own_name if len(self._steps) > 1 else "",
                ending=ending,
                exit_code=None if self._end is None else self._end.exit_code,
                precision=self.header.precision,
                steps=len(steps),
                skipped=skipped,
                first_step=int(steps[0]) if len(steps) else 0,
                last_step=int(steps[-1]) if len(steps) else 0,
                lost=sum(self._lost.values()),
                skip_share=skipped / told if told else None,
                axis=axis_of(columns, spans_of(steps)),
                curves=_curves(columns, maps.headroom),
                maps=maps.heat_maps(),
                scalers=scaler_histories(columns, self.header.scalers, self.header.scaler),
                checkpoints=self._checkpoints(source),
                looks=self._looks(source),
                actions=tuple(
                    ActionMark(step=line.step, action=line.action, reason=line.reason)
                    for _, line in self._marks
                    if isinstance(line, ActionLine)
                ),
            )
            made.append(run)
        return tuple(made)

    def steps_without_loss(self, empty: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the stretches of steps whose loss is missing; `empty` are steps with an empty one."""
        of_all = (with_proved_skips(standing(one.whole(), self.groups)) for one in self._steps.values())
        return [stretch for columns in of_all for stretch in steps_without_loss(columns, empty)]

    def tail(self) -> LogTail:
        """Returns the last numbers of the first optimizer."""
        columns = standing(self._steps[min(self._steps)].whole(), self.groups)
        norms, scales = columns["norm"], columns["loss_scale"]
        good, known = norms[(norms > 0) & np.isfinite(norms)], scales[~np.isnan(scales)]
        return LogTail(norms=tuple(good[-LAST_NORMS:].tolist()), scale=float(known[-1]) if len(known) else None)

    def _checkpoints(self, source: str) -> tuple[CheckpointMark, ...]:
        """Returns each checkpoint as it is known last; the newest good one has the link's path, where that is."""
        by_path = {line.path: line for _, line in self._marks if isinstance(line, CheckpointLine)}
        marks = [
            CheckpointMark(step=one.step, path=one.path, health=one.health, reason=one.reason)
            for one in by_path.values()
        ]
        marks.sort(key=lambda mark: mark.step)
        newest = next((at for at in reversed(range(len(marks))) if marks[at].health == "good"), None)
        if newest is not None and Path(source, LAST_GOOD).exists():
            marks[newest] = replace(marks[newest], path=str(PurePath(source) / LAST_GOOD))
        return tuple(marks)

    def _looks(self, source: str) -> tuple[LookMark, ...]:
        looks = sorted((line for _, line in self._marks if isinstance(line, LookLine)), key=lambda line: line.step)
        return tuple(_look(line, source) for line in looks)


def _look(line: LookLine, source: str) -> LookMark:
    bundle = None if line.bundle is None else str(PurePath(source) / line.bundle)
    code = [] if line.model is None else ["--model", line.model]
    return LookMark(
        step=line.step,
        verdict=line.verdict,
        says=line.findings[0].message if line.findings else "",
        bundle=bundle,
        command=None if bundle is None else shlex.join(["ampdoctor", "bisect-nan", bundle, *code]),
        device=line.device,
        precision=line.precision,
        autocast=line.autocast,
    )


_COLUMN_OF = {
    "gradient_norm": "norm", "learning_rate": "rate", "log2_headroom": "headroom", "step_seconds": "seconds",
}  # fmt: skip
"""Columns with other names than their curves."""


def _curves(columns: Mapping[str, Column], headroom: Mapping[int, float]) -> tuple[Curve, ...]:
    spans = spans_of(columns["step"])
    least = np.array([headroom.get(int(step), np.nan) for step in columns["step"].tolist()], np.float64)
    columns = {**columns, "headroom": least}
    found = (curve_of(name, columns[_COLUMN_OF.get(name, name)], spans) for name in get_args(CurveName))
    return tuple(curve for curve in found if curve is not None)
