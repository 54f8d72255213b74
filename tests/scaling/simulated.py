"""One scaler over one trace, step by step; traces without losses; the libraries that `make scalers` installs."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import pytest

from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.scalers import simulate_lanes
from ampdoctor.scaling.trace import StepTrace


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


def bare_trace(log2_amax):
    """A trace of largest gradients, of which nothing is lost at any scale."""
    nothing = np.zeros((len(log2_amax), len(EXPONENTS)))
    maxima = np.asarray(log2_amax, np.float64)
    return StepTrace(log2_amax=maxima, error=nothing, activation_flushed=nothing, weight_flushed=nothing)


def library(name):
    """The module, or a skip; some warn while they are imported of the accelerators that they lack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)
