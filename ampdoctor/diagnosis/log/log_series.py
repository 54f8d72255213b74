"""A training log beside a checkpoint as the rules on it read it.

A log shows a step now and then, and only the last of several. What is alarming in one line (a skipped step's infinite
norm, one large gradient) is everyday life of a scaler; what a run does not come back from is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ampdoctor.diagnosis.over_time.descent import falls_over
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry

Series = list[tuple[LogEntry, float]]
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
    """Whether the loss falls over these entries, far beyond its noise: training works, whatever the norms read."""
    losses = [e.loss for e in sorted(entries, key=lambda e: e.step) if e.loss is not None]
    return falls_over(losses)
