"""The steps of a run as columns of numbers, gathered while a log is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampdoctor.diagnosis.health.rolling import falls_over
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.log_records import Stamped, StepLine

Column: TypeAlias = NDArray[np.float64]

_NUMBERS = (
    *("step", "loss", "gradient_norm", "norm_scaled", "norm_clipped", "max_norm", "loss_scale", "skipped"),
    *("growth_tracker", "seconds", "data_seconds", "memory_bytes", "samples", "tokens", "scaler"),
)
_MORE = ("rate", "time_ms", "group")
"""What is no field of a step: the rate of its first group of parameters, its stamp's time, its number of `Groups`."""
_BLOCK = 8192


class Columns:
    """Steps of one optimizer. A number that is not known is NaN; a loss or norm that was NaN is infinite.

    To a curve the two are the same, not finite. Whole numbers up to 2^53 are exact.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float | None, ...]] = []
        self._blocks: list[NDArray[np.float64]] = []

    def add(self, whole: Stamped, step: StepLine, group: int) -> None:
        """Adds a step.

        Args:
            whole: Its line.
            step: What it says.
            group: Of those lines that stand or fall together, in the order of their beginnings.
        """
        rates = step.learning_rates
        if step.loss != step.loss or step.gradient_norm != step.gradient_norm:  # NaN
            step = replace(step, loss=_infinite(step.loss), gradient_norm=_infinite(step.gradient_norm))
        self._rows.append((*_VALUES(step), rates[0] if rates else None, whole.stamp.time_ms or None, group))
        if len(self._rows) == _BLOCK:
            self._fold()

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._blocks))

    def whole(self) -> Mapping[str, Column]:
        """Returns all columns by name, in the order of arrival."""
        self._fold()
        width = len(_NUMBERS) + len(_MORE)
        table = np.concatenate(self._blocks) if self._blocks else np.empty((0, width))
        self._blocks = [table]
        return {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate((*_NUMBERS, *_MORE))}

    def _fold(self) -> None:
        if self._rows:
            self._blocks.append(np.array(self._rows, dtype=np.float64))  # which makes NaN of None
            self._rows = []


def with_proved_skips(columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """Returns the columns with the skips that a log does not say and that the rows behind them prove.

    As `over_time.ill_steps.proves_a_skip` has it for single rows. Where one is proved, a finite norm says of the other
    rows that they were taken.

    Args:
        columns: In the order of the steps.
    """
    skipped, loss, norm, scale = (columns[name] for name in ("skipped", "loss", "gradient_norm", "loss_scale"))
    unknown = np.isnan(skipped)
    if not unknown.any() or len(skipped) < 2:
        return columns
    told = np.where(np.isnan(loss), norm, loss)[1:]
    falls = (np.diff(columns["step"]) == 1) & (scale[1:] < scale[:-1])
    ill = np.isinf(loss) | np.isinf(norm)
    proved = unknown[:-1] & (falls | (ill[:-1] & np.isfinite(told)))
    if not proved.any() or (np.isinf(norm[~np.isnan(norm)]).all() and falls_over(loss.tolist())):
        return columns  # a norm that is never finite while the loss falls is not what the optimizer saw
    known = np.where(unknown & ~ill & np.isfinite(norm), 0.0, skipped)
    known[:-1][proved] = 1.0
    return {**columns, "skipped": known}


def entries_of(columns: Mapping[str, Column], most: int) -> tuple[LogEntry, ...]:
    """Returns the last rows as a checkpoint's rules read them; a number that was NaN is infinite there.

    Args:
        columns: In the order of the steps.
        most: How many.
    """
    norm = np.where(columns["norm_clipped"] == 1, np.nan, columns["gradient_norm"])
    values = (columns["step"], columns["loss"], norm, columns["rate"], columns["loss_scale"], columns["skipped"])
    return tuple(
        LogEntry(
            step=int(step),
            loss=_known(loss),
            grad_norm=_known(norm),
            learning_rate=_known(rate),
            scale=_known(scale),
            skipped=None if math.isnan(skipped) else skipped == 1,
        )
        for step, loss, norm, rate, scale, skipped in zip(*(of[-most:].tolist() for of in values), strict=True)
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


_VALUES = attrgetter(*_NUMBERS)


def _infinite(value: float | None) -> float | None:
    return math.inf if value is not None and math.isnan(value) else value
