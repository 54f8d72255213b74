from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.closed_forms import LIM, TAIL, highest_exponent, upper_log2
from ampdoctor.scaling.scalers import DEFAULTS, ScalerSettings, expressible
from ampdoctor.scaling.search import search
from ampdoctor.scaling.trace import StepTrace
from tests.scaling.simulated import simulate, skip_rate


def trace_of(log2_amax):
    """A trace whose bulk of weight gradients lies 12 binades below the largest one, and activation gradients' 2."""
    log2_amax = np.asarray(log2_amax, np.float64)
    scaled = log2_amax[:, None] + EXPONENTS
    with np.errstate(over="ignore"):
        error = np.where(np.isfinite(scaled), 2e-4 + 1.0 / (1.0 + np.exp2(scaled + 12.0)), 0.0)
        flushed = np.where(np.isfinite(scaled), 1.0 / (1.0 + np.exp2((scaled + 2.0) / 2.0)), 0.0)
    error[scaled >= LIM] = np.inf
    return StepTrace(log2_amax=log2_amax, error=error, activation_flushed=flushed, weight_flushed=flushed / 10.0)


def start_of(trace):
    finite = trace.log2_amax[np.isfinite(trace.log2_amax)].tolist()
    return SettingBound(value=min(24, highest_exponent(upper_log2(finite, TAIL)) if finite else 16), by="a site")


def searched(log2_amax, current=None, framework="torch", **options):
    trace = trace_of(log2_amax)
    options = {"thresholds": DEFAULT_THRESHOLDS, "start": start_of(trace), **options}
    return search(trace, current=current, framework=framework, **options)


def noise(center, steps=300, seed=0):
    return np.random.default_rng(seed).normal(center, 0.7, steps)


@pytest.mark.parametrize(
    ("log2_amax", "framework"),
    [
        pytest.param(noise(-6.0), "torch", id="stationary"),
        pytest.param(noise(-6.0), "deepspeed", id="deepspeed"),
        pytest.param(noise(-6.0), "megatron", id="megatron"),
        pytest.param(noise(-6.0, 20), "torch", id="twenty steps"),
        pytest.param([-6.0], "torch", id="one step"),
        pytest.param(np.full(50, -6.0), "lightning", id="constant"),
        pytest.param(np.full(50, -np.inf), "torch", id="all zero"),
    ],
)
def test_a_scaler_that_works_is_left_alone(log2_amax, framework):
    current = ScalerSettings(scale=2.0**15)
    outcome = searched(log2_amax, current, framework)
    assert not outcome.change
    assert outcome.settings == expressible(current, framework)
    assert outcome.margin.skip_rate < 1e-3
    assert outcome.margin.relative_error < 1e-3
    assert outcome.expected_chosen == outcome.expected_current


def test_a_run_without_a_scaler_gets_the_frameworks_default_where_that_works():
    outcome = searched(noise(-6.0))
    assert outcome.settings == DEFAULTS["torch"]
    assert not outcome.change
    assert outcome.expected_current is None
    assert outcome.expected_default == outcome.expected_chosen


def test_small_gradients_get_a_larger_scale_and_nothing_else():
    outcome = searched(noise(-24.0), ScalerSettings())
    assert outcome.change
    assert outcome.settings == ScalerSettings(scale=2.0**24)
    assert outcome.margin.headroom == 8.0
    assert outcome.expected_chosen.relative_error < 1e-3 < outcome.expected_current.relative_error
    assert outcome.expected_chosen.activation_flushed < outcome.expected_current.activation_flushed


def test_no_scale_above_the_bound_is_proposed():
    outcome = searched(noise(-36.0), ScalerSettings(), start=SettingBound(value=20, by="the loss"))
    assert outcome.change
    assert outcome.settings.scale <= 2.0**20
    assert outcome.bounds["scale"] == SettingBound(value=2.0**20, by="the loss")


@pytest.mark.parametrize("framework", ["torch", "deepspeed", "megatron"])
def test_a_collapsed_scale_counts_in_every_framework_also_where_no_run_can_start_there(framework):
    outcome = searched(noise(-6.0), ScalerSettings(scale=2.0**-18), framework)
    assert outcome.change
    assert outcome.margin.headroom > 30.0
    assert outcome.expected_current.relative_error > 0.1 > outcome.expected_chosen.relative_error
    gained = outcome.expected_current.relative_error - outcome.expected_chosen.relative_error
    assert outcome.margin.relative_error == pytest.approx(gained, rel=1e-2)  # the figures that are shown beside it
    assert outcome.settings == expressible(outcome.settings, framework)  # what is to be written down can be


def test_skips_at_the_start_weigh_in_a_short_run_only():
    long, short = (
        searched(noise(4.0), ScalerSettings(), thresholds=thresholds_from({"AMP723": {"horizon": steps}}))
        for steps in (50_000, 300)
    )
    assert not long.change
    assert short.change
    assert short.settings.scale < 2.0**16
    assert short.expected_chosen.skip_rate < short.expected_current.skip_rate - 1e-2


def test_expected_skips_are_those_of_the_simulation():
    outcome = searched(np.full(50, 3.5), ScalerSettings(), thresholds=thresholds_from({"AMP723": {"horizon": 4100}}))
    assert outcome.confidence.exceedances == 4100 / 51
    steps = simulate(ScalerSettings(), [2.0**3.5] * 4100)
    assert outcome.expected_current.skips == (sum(s.skipped for s in steps),) * 3
    assert outcome.expected_current.skip_rate == skip_rate(steps)
    assert outcome.expected_current.final_scale == steps[-1].scale


@pytest.mark.parametrize(
    "change",
    [
        {"scale": math.inf},
        {"scale": math.nan},
        {"scale": 0.0},
        {"scale": 2.0**-130},
        {"backoff_factor": -0.5, "scale": 2.0**40},
    ],
)
def test_settings_with_which_no_run_goes_well_are_replaced(change):
    current = dataclasses.replace(ScalerSettings(), **change)
    outcome = searched(noise(-6.0), current)
    assert outcome.change
    assert outcome.settings.scale == pytest.approx(2.0**18, rel=3.0)
    assert outcome.expected_chosen.skip_rate < 2e-3
    assert outcome.expected_current.inf_in_weights == (1.0 if current.scale in (0.0, 2.0**-130) else 0.0)
    assert outcome.expected_chosen.inf_in_weights == 0.0


def test_spikes_that_ratchet_the_scale_down_are_answered():
    spiky = noise(-20.0, 2000) + 30.0 * (np.random.default_rng(1).random(2000) < 5e-3)
    outcome = searched(spiky, ScalerSettings(), start=SettingBound(value=20, by="a site"))
    assert outcome.change
    assert outcome.settings.growth_interval < 2000
    assert outcome.expected_chosen.relative_error < outcome.expected_current.relative_error / 2
    assert outcome.confidence.spiky
    assert "ratchet" in outcome.bounds["growth_interval"].by


def test_confidence_says_what_it_rests_on():
    outcome = searched(noise(-6.0, 300), ScalerSettings(), censored=0.3)
    assert outcome.confidence.steps == 300
    assert outcome.confidence.low
    assert outcome.confidence.exceedances == pytest.approx(10_000 / 301)
    assert not searched(noise(-6.0), ScalerSettings()).confidence.low
    assert searched(noise(-6.0, 20), ScalerSettings()).confidence.low


def test_it_needs_a_recorded_step():
    with pytest.raises(UsageError, match="recorded step"):
        searched([], ScalerSettings(), start=SettingBound(value=16, by="a site"))
