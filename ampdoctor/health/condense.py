"""Turns a log's lines into what a report shows of its run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

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
from ampdoctor.evidence.report_health import ActionMark, CheckpointMark, Curve, CurveName, Ending, HealthRun, LookMark
from ampdoctor.health.curves import (
    Column,
    Columns,
    axis_of,
    curve_of,
    scaler_histories,
    spans_of,
    steps_without_loss,
    with_proved_skips,
)
from ampdoctor.health.heat_maps import Maps

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
                checkpoints=self._checkpoints(),
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

    def _checkpoints(self) -> tuple[CheckpointMark, ...]:
        by_path = {line.path: line for _, line in self._marks if isinstance(line, CheckpointLine)}
        marks = [
            CheckpointMark(step=one.step, path=one.path, health=one.health, reason=one.reason)
            for one in by_path.values()
        ]
        return tuple(sorted(marks, key=lambda mark: mark.step))

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
