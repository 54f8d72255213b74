"""Simulates loss scalers over traces of gradient magnitudes: which steps they skip, and the scale of the others.

The walk leaps from one change of a scaler to the next (`rules`), so its cost depends on the changes, not on the steps.
torch's scaler has no floor: at a scale of 2^-128 and below, its inverse is infinite in fp32, and a clean step ruins the
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.targets import Framework
from ampdoctor.numerics import FORMATS
from ampdoctor.scaling.rules import RULES, Flags, Floats, Integers, Lanes, fp32
from ampdoctor.scaling.settings import ScalerSettings

OVERFLOW_AT = FORMATS["fp16"].overflow_at
LEAP = 256
"""Longest leap, in steps: a look ahead of this length finds the next overflow of every lane (256 and 512 were the
fastest of 32 to 512 for a few hundred lanes)."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step of a simulated scaler.

    Attributes:
        scale: Loss scale during the step.
        skipped: The optimizer did not step.
        poisoned: It stepped on gradients multiplied by an infinite inverse: the weights are no longer finite.
    """

    scale: float
    skipped: bool
    poisoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What scalers do over traces; every array has the shape (settings, traces, steps).

    Attributes:
        scale: float64, loss scale during each step; after the run's end, the last one.
        skipped: bool, the optimizer did not step.
        poisoned: bool, it stepped on gradients multiplied by an infinite inverse.
        ended: bool, the step was not run: the scaler had raised an exception.
    """

    scale: Floats
    skipped: Flags
    poisoned: Flags
    ended: Flags


def simulate(
    settings: ScalerSettings, maxima: Iterable[float | None], framework: Framework = "torch"
) -> tuple[SimulatedStep, ...]:
    """Returns what the scaler does over a trace.

    Args:
        settings: The scaler before the first step.
        maxima: Largest magnitude of all unscaled half gradients of each step; None or 0.0 if all were zero, inf (or
            NaN) if a value was not finite at any scale.
        framework: The framework whose rules it follows.

    Returns:
        One entry per step, up to the one at which the scaler raises an exception.
    """
    trace = np.array([[0.0 if m is None else abs(m) for m in maxima]], np.float64)
    run = simulate_lanes([settings], trace, framework)
    steps = zip(run.scale[0, 0].tolist(), run.skipped[0, 0].tolist(), run.poisoned[0, 0].tolist(), strict=True)
    return tuple(SimulatedStep(*step) for step, over in zip(steps, run.ended[0, 0].tolist(), strict=True) if not over)


def simulate_lanes(settings: Sequence[ScalerSettings], maxima: NDArray[np.float64], framework: Framework) -> Simulation:
    """Returns what each scaler does over each trace.

    Args:
        settings: The scalers before the first step.
        maxima: float64 of shape (traces, steps): largest magnitude of all unscaled half gradients, 0.0 if all were
            zero, inf or NaN if one was not finite at any scale.
        framework: The framework whose rules they follow.
    """
    traces, steps = maxima.shape
    trace_of_lane = np.tile(np.arange(traces), len(settings))
    lanes = RULES[framework]([s for s in settings for _ in range(traces)])
    shape = (len(settings), traces, steps)
    with np.errstate(all="ignore"):
        lengths, scales, kinds = _walk(lanes, trace_of_lane, maxima)
        poisons = np.isinf(fp32(1.0 / scales)) & (kinds == _TAKEN)
    lengths, kinds = lengths.ravel(), kinds.ravel()

    return Simulation(
        scale=np.repeat(scales.ravel(), lengths).reshape(shape),
        skipped=np.repeat(kinds == _SKIPPED, lengths).reshape(shape),
        poisoned=np.repeat(poisons.ravel(), lengths).reshape(shape),
        ended=np.repeat(kinds == _ENDED, lengths).reshape(shape),
    )


def skip_rate(steps: Iterable[SimulatedStep]) -> float:
    """Returns the share of skipped steps, 0.0 for no steps."""
    taken = [step.skipped for step in steps]
    return sum(taken) / len(taken) if taken else 0.0


_TAKEN, _SKIPPED, _ENDED = 0, 1, 2


def _walk(lanes: Lanes, trace_of_lane: Integers, maxima: Floats) -> tuple[Integers, Floats, NDArray[np.int8]]:
    """Returns lengths, scales and kinds of each lane's runs of equal steps, each of shape (lanes, runs)."""
    traces, steps = maxima.shape
    padded = np.concatenate([maxima, np.zeros((traces, LEAP))], axis=1)
    ahead = np.lib.stride_tricks.sliding_window_view(padded, LEAP, axis=1)
    at = np.zeros(len(trace_of_lane), np.int64)
    lengths, scales, kinds = [], [], []

    def note(length: Integers, kind: int) -> None:
        lengths.append(length)
        scales.append(lanes.scale)
        kinds.append(kind)

    while (live := np.flatnonzero((at < steps) & ~lanes.stopped)).size:
        free = np.zeros_like(at)
        free[live] = _clean_ahead(ahead[trace_of_lane[live], at[live]], lanes.scale[live])
        to_growth = lanes.to_growth()
        passed = np.minimum(np.minimum(free, to_growth), steps - at)
        passed[lanes.stopped] = 0
        note(passed, _TAKEN)
        lanes.clean(passed)
        at = at + passed
        # at the end of a leap without an overflow, or after a growth, the next step has to be checked first
        hit = (passed == free) & (free < LEAP) & (passed < to_growth) & (at < steps) & ~lanes.stopped
        note(hit.astype(np.int64), _SKIPPED)
        lanes.overflow(hit)
        at = at + hit
        stuck = hit & ~np.isfinite(lanes.scale) & ~lanes.stopped  # no factor makes it finite again
        note(np.where(stuck, steps - at, 0), _SKIPPED)
        at = np.where(stuck, steps, at)
    note(steps - at, _ENDED)
    kind_of_run = np.broadcast_to(np.array(kinds, np.int8), (len(at), len(kinds)))
    return np.stack(lengths, axis=1), np.stack(scales, axis=1), kind_of_run


def _clean_ahead(maxima: Floats, scale: Floats) -> Integers:
    """Returns the number of steps before the first overflow in each row, all of them if there is none.

    A gradient is multiplied by the scale in fp32; zero times an infinite scale is NaN, which counts as an overflow.

    Args:
        maxima: Shape (lanes, steps).
        scale: Shape (lanes,).
    """
    over = ~(maxima * np.abs(fp32(scale))[:, None] < OVERFLOW_AT)
    free: Integers = np.where(over.any(axis=1), over.argmax(axis=1), maxima.shape[1])
    return free
