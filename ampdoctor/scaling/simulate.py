"""`torch.amp.GradScaler`, step by step and exactly, over a trace of gradient magnitudes.

The rules were read in torch 2.13 (`torch/amp/grad_scaler.py`, `AmpGradScalerKernels.cpp`) and are held to the real
object in the tests: the growth count is compared with ==, growth that would be infinite in fp32 is refused, and there
is no floor: at a scale of 2^-128 and below its inverse is infinite, and a clean step ruins the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ampdoctor.numerics import FORMATS
from ampdoctor.scaling.settings import ScalerSettings

OVERFLOW_AT = FORMATS["fp16"].overflow_at


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step of a simulated scaler.

    Attributes:
        scale: Loss scale during the step.
        skipped: The optimizer did not step.
        poisoned: It stepped on gradients multiplied by an infinite inverse: the weights are not finite any more.
    """

    scale: float
    skipped: bool
    poisoned: bool


def simulate(settings: ScalerSettings, maxima: Iterable[float | None]) -> tuple[SimulatedStep, ...]:
    """What the scaler does over a trace.

    Args:
        settings: The scaler before the first step.
        maxima: Largest magnitude of all unscaled half gradients of each step; None or 0.0 where all were zero, inf (or
            NaN) where a value was not finite at any scale.

    Returns:
        One entry a step.
    """
    scale, tracker = _fp32(settings.scale), settings.growth_tracker
    steps = []
    for largest in maxima:
        found = _overflows(largest, scale)
        steps.append(SimulatedStep(scale, found, not found and math.isinf(_inverse(scale))))
        scale, tracker = _update(settings, scale, tracker, found=found)
    return tuple(steps)


def skip_rate(steps: Iterable[SimulatedStep]) -> float:
    """Share of skipped steps, 0.0 for no steps."""
    taken = [step.skipped for step in steps]
    return sum(taken) / len(taken) if taken else 0.0


def _overflows(largest: float | None, scale: float) -> bool:
    if largest is not None and not math.isfinite(largest):
        return True
    if not math.isfinite(scale):
        return True  # zero times infinity is NaN
    return largest is not None and abs(largest * scale) >= OVERFLOW_AT


def _update(settings: ScalerSettings, scale: float, tracker: int, *, found: bool) -> tuple[float, int]:
    if found:
        return _fp32(scale * settings.backoff_factor), 0
    if tracker + 1 != settings.growth_interval:
        return scale, tracker + 1
    grown = _fp32(scale * settings.growth_factor)
    return (grown if math.isfinite(grown) else scale), 0


def _fp32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return float(np.float32(value))


def _inverse(scale: float) -> float:
    return _fp32(1.0 / scale) if scale != 0.0 else math.inf
