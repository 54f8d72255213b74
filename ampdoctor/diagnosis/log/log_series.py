"""A training log beside a checkpoint as the rules on it read it.

A log shows a step now and then, and only the last of several. What is alarming in one line (a skipped step's infinite
norm, one large gradient) is everyday life of a scaler; what a run does not come back from is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, LogEntry

Series = list[tuple[LogEntry, float]]
LEAST_LOSSES = 8
"""Losses from which a fall of theirs is told from noise."""
CLEAR_FALL = 4.0
"""Standard errors between the mean losses of two halves: by chance once in 30,000 such logs."""
LEAST_FALL = 0.01
"""Share of itself by which a loss falls that is said to fall: one without noise falls by momentum's remainder too."""
MOMENTUM_STEPS = 50
"""Steps in which momentum alone may lower the loss: 0.9^50 is 0.5 %."""


def series(summary: CheckpointSummary, of: Callable[[LogEntry], float | None]) -> Series:
    """The entries that have a value, with it, by step."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    return [(entry, value) for entry in entries if (value := of(entry)) is not None]


def trailing_entries(entries: Sequence[LogEntry], test: Callable[[LogEntry], bool]) -> list[LogEntry]:
    """The entries at the end that all pass the test."""
    found: list[LogEntry] = []
    for entry in reversed(entries):
        if not test(entry):
            break
        found.append(entry)
    return found[::-1]


def loss_fell(entries: Iterable[LogEntry]) -> bool:
    """Whether the loss falls over these entries, far beyond its noise: somebody learns, whatever the norms read.

    The mean of the later half lies `CLEAR_FALL` standard errors, and `LEAST_FALL` of itself, below that of the earlier.
    """
    losses = [e.loss for e in sorted(entries, key=lambda e: e.step) if e.loss is not None]
    return falls_over(losses)


def falls_over(values: Sequence[float]) -> bool:
    """The same of the losses themselves, in the order of their steps; those that are not finite are passed over."""
    largest = max((abs(loss) for loss in values if math.isfinite(loss)), default=0.0)
    losses = [loss / largest for loss in values if math.isfinite(loss)] if largest else []  # squares may be too large
    if len(losses) < LEAST_LOSSES:
        return False
    half = len(losses) // 2
    early, late = losses[:half], losses[-half:]
    error = math.sqrt((statistics.variance(early) + statistics.variance(late)) / half)
    before = statistics.fmean(early)
    return before - statistics.fmean(late) > max(CLEAR_FALL * error, LEAST_FALL * abs(before))
