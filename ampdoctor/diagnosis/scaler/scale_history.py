"""The history of a loss scale in a training log, in pieces that say something."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry, ScalerState

LEAST_SETTLING = 100
"""Steps without a backoff that end a first descent (hysteresis and noise make shorter rests on its way), and steps that
it may take at least, whatever the growth interval."""
SLOW_REST = 10
"""Clean steps after which a backoff is a slow one: far above what the gradients bear, nearly every step backs off."""
SLOW_BACKOFFS = 8
"""Slow backoffs that no first descent has.

Gradients whose largest values have a power-law tail of index a overflow 2^a times as seldom a binade lower: from one
step in 10 to one in a growth interval of N are log2(N / 10) / a binades, 7.6 with the default N at a = 1, where norms
cease to have a mean. Measured in 300 simulated descents each, hysteresis 1 or 2: at most 3 with norms that scatter by
0.7 binades (log-normal), 7 by 2.5.
"""
DEFAULT_INTERVAL = 2000
"""GradScaler's growth interval."""
History = list[tuple[LogEntry, float]]


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """What a log shows of a loss scale.

    Attributes:
        scaler: The checkpoint's first, else one that the log lets infer; None where it shows too little.
        starts: The history in pieces, each with a first scale of its own.
        settled: Of each piece what follows its first descent; [] while that lasts.
    """

    scaler: ScalerState | None
    starts: list[History]
    settled: list[History]


def scale_history(summary: CheckpointSummary) -> ScaleHistory:
    """Read the scale's history off a checkpoint's log."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    history = [(e, e.scale) for e in entries if e.scale is not None and 0 < e.scale < math.inf]
    scaler = summary.scalers[0] if summary.scalers else _inferred(history)
    starts = _starts_of(history, scaler)
    return ScaleHistory(scaler, starts, [_settled_part(one, scaler) for one in starts])


def _inferred(history: History) -> ScalerState | None:
    """A scaler whose interval the log shows: growths come no sooner than that after the change before them.

    None without a growth after another change. Of entries that lie apart, the shortest time that they leave is taken.
    """
    interval, changed = math.inf, None
    for (before, scale), (entry, after) in itertools.pairwise(history):
        if changed is not None and scale < after <= 2 * scale:
            interval = min(interval, before.step - changed + 1)
        if after != scale:
            changed = entry.step
    if math.isinf(interval):
        return None
    return ScalerState(scale=history[-1][1], growth_interval=max(int(interval), 1))


def _starts_of(history: History, scaler: ScalerState | None) -> list[History]:
    """The history in pieces: a jump up by more than growths can do in that time is another scaler's first scale."""
    starts: list[History] = [history[:1]] if history else []
    growth = math.log2(scaler.growth_factor) if scaler is not None and scaler.growth_factor > 1 else 1.0
    for (before, scale), (entry, after) in itertools.pairwise(history):
        growths = 1 + (max(entry.step - before.step - 1, 0) // interval_of(scaler))
        if math.log2(after) - math.log2(scale) > growth * growths * (1 + 1e-6):
            starts.append([])
        starts[-1].append((entry, after))
    return starts


def _settled_part(start: History, scaler: ScalerState | None) -> History:
    """A piece of the history from where its first descent has ended; [] while it lasts.

    It ends with a growth, a long rest, or when there was time for a growth. A fall with clean stretches between many of
    its backoffs is none: it counts from the first of them. Where entries lie apart, only those between which the scale
    stays are known to be clean, and a drop between two counts as one backoff.
    """
    until = start[0][0].step + max(interval_of(scaler), LEAST_SETTLING)
    resting = 0
    slow: list[int] = []
    settled: int | None = None
    for index in range(1, len(start)):
        old, (entry, new) = start[index - 1][1], start[index]
        if new > old or entry.step >= until:
            settled = index - 1
        elif new < old:
            if start[index - 1][0].step - start[resting][0].step >= SLOW_REST:
                slow.append(resting)
            resting = index
        elif entry.step - start[resting][0].step >= LEAST_SETTLING:
            settled = resting
        if settled is not None:
            break
    if len(slow) >= SLOW_BACKOFFS:
        return start[slow[0] :]
    return [] if settled is None else start[settled:]


def interval_of(scaler: ScalerState | None) -> int:
    """Clean steps after which it grows; torch's own where that is not known."""
    return scaler.growth_interval if scaler is not None and scaler.growth_interval > 0 else DEFAULT_INTERVAL
