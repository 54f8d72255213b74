"""One scaler over one trace, step by step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ampdoctor.scaling.scalers import simulate_lanes


class Step(NamedTuple):
    scale: float
    skipped: bool
    inf_in_weights: bool


def simulate(settings, maxima, framework="torch"):
    """The steps up to the one at which the scaler raises; `maxima` are the largest magnitudes of the gradients."""
    run = simulate_lanes([settings], np.array([[abs(m or 0.0) for m in maxima]], np.float64), framework)
    steps = zip(*(values[0, 0].tolist() for values in (run.scale, run.skipped, run.inf_in_weights)), strict=True)
    return tuple(Step(*step) for step, over in zip(steps, run.ended[0, 0].tolist(), strict=True) if not over)


def skip_rate(steps):
    return sum(step.skipped for step in steps) / len(steps)
