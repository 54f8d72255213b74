from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.scaling.choose import (
    MAX_EXPONENT,
    NOTHING,
    Interval,
    alarm_scale,
    backoff_factor,
    choose_scale,
    growth_factor,
    growth_interval,
    hysteresis,
    stab,
)
from ampdoctor.scaling.closed_forms import Spikes
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.scaling.search import predict
from tests.ranges.known import collected, place


def site(name, steps, *, kind="activation_grad", half=True, weight=100):
    """A place with the values of each step."""
    return place(name, kind), steps, half, weight


def profile(*sites, **facts):
    steps = [{s[0]: v for s, v in zip(sites, row, strict=True)} for row in zip(*(s[1] for s in sites), strict=True)]
    wide = [where.name for where, _, half, _ in sites if not half]
    return collected(steps, wide=wide, sizes={where.module: weight for where, _, _, weight in sites}, **facts)


def chosen(measured):
    return choose_scale(measured, DEFAULT_THRESHOLDS)


def gaussian(log2_size, steps=3, seed=0, count=4000):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) * 2.0**log2_size for _ in range(steps)]


@pytest.mark.slow
@given(st.integers(-40, 20), st.integers(0, 5))
def test_the_chosen_scale_is_the_largest_that_overflows_nothing(size, seed):
    steps = gaussian(size, seed=seed, count=64)
    choice = chosen(profile(site("fc", steps)))
    scaled = torch.cat(steps).double() * 2.0**choice.exponent
    assert torch.isfinite(scaled.half()).all()
    if choice.exponent < MAX_EXPONENT:
        assert choice.bound_by == "fc.output (activation_grad)"
        assert choice.exponent >= 14 - size - 4  # and no more than a few binades below what was seen to fit
    assert choice.fp32_modules == ()


def test_the_largest_gradient_binds_and_fp32_tensors_do_not_count():
    choice = chosen(
        profile(
            site("a", gaussian(-10)),
            site("b.weight", gaussian(-4), kind="weight_grad"),
            site("norm", gaussian(10), half=False),
            site("a", gaussian(12), kind="activation"),
        )
    )
    assert choice.bound_by == "b.weight (weight_grad)"


def test_without_a_gradient_there_is_nothing_to_choose():
    assert chosen(profile(site("a", [torch.zeros(4)] * 3))) is None
    assert chosen(profile(site("a", gaussian(0), kind="activation"))) is None


def test_a_loss_that_stays_fp16_binds():
    choice = chosen(profile(site("a", gaussian(-12)), loss_in_half=True, loss_amax=100.0))
    assert choice.exponent == 9
    assert math.isinf((torch.tensor(100.0, dtype=torch.float64) * 2.0**10).half())
    assert "the loss" in choice.bound_by


def test_modules_too_far_apart_are_named():
    quiet, loud = gaussian(-50), gaussian(5)
    choice = chosen(
        profile(
            site("loud", loud, weight=1000),
            site("quiet", quiet, weight=10),
            site("quiet.weight", quiet, kind="weight_grad", weight=10),
        )
    )
    assert choice.fp32_modules == ("quiet",)
    assert choice.share == pytest.approx(10 / 1010)
    cheap = chosen(profile(site("loud", loud, weight=10), site("quiet", quiet, weight=1000)))
    assert (cheap.fp32_modules, cheap.exponent) == (("loud",), MAX_EXPONENT)
    many = chosen(profile(site("loud", loud, weight=10), site("quiet", quiet, weight=10)))
    assert many.fp32_modules == ()
    assert many.modules_not_covered == ("quiet",)  # nothing overflows; what is lost is named
    assert many.exponent == choice.exponent


def test_rounding_noise_is_no_reason_for_fp32():
    noise = site("key.bias", gaussian(-50), kind="weight_grad")
    assert chosen(profile(site("key", gaussian(-10)), noise)).fp32_modules == ()


intervals = st.lists(
    st.builds(Interval, st.uuids().map(str), st.integers(1, 50), st.integers(-8, 8), st.integers(-8, 8)),
    min_size=1,
    max_size=7,
)


@given(intervals)
def test_stabbing_misses_the_cheapest_set(given_intervals):
    best, missed, share = stab(given_intervals)
    total = sum(i.weight for i in given_intervals)
    cost = sum(i.weight for i in given_intervals if i.module in missed)
    assert share == pytest.approx(cost / total)
    assert all((i.lowest <= best <= i.highest) != (i.module in missed) for i in given_intervals)
    cheapest = total
    for size in range(len(given_intervals) + 1):
        for kept in itertools.combinations(given_intervals, size):
            if not kept or max(i.lowest for i in kept) <= min(i.highest for i in kept):
                cheapest = min(cheapest, total - sum(i.weight for i in kept))
    assert cost == cheapest


def test_a_prediction_follows_the_scaler_down():
    expected = predict(profile(site("a", gaussian(10))), ScalerSettings(scale=2.0**6))
    assert expected.skipped == 3
    assert not expected.settled
    calm = predict(profile(site("a", gaussian(10))), ScalerSettings(scale=2.0**4))
    assert (calm.skipped, calm.settled, calm.inf_in_weights) == (1, True, False)
    assert calm.scale == 2.0**3
    assert predict(profile(site("a", gaussian(0))), ScalerSettings(scale=0.0)).inf_in_weights


# -- settings in closed form --

QUIET = Spikes(steps=1000)
ISOLATED = Spikes(steps=1000, lengths=(1,), heights=(8.0,))
FREQUENT = Spikes(steps=1000, lengths=(1,) * 5, heights=(8.0,) * 5)
BURSTS = Spikes(steps=1000, lengths=(30, 30), heights=(3.0, 4.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2000, NOTHING)),
        ({"drift": -1e-4, "spikes": QUIET}, (2000, NOTHING)),
        ({"drift": +1e-2}, (2000, NOTHING)),
        ({"drift": -1e-3}, (694, "gradients that shrink")),  # ln 2 / 1e-3, which is below 1 / 1e-3
        ({"drift": -2e-3}, (500, "gradients that shrink")),
        ({"drift": -1e-2}, (100, "gradients that shrink")),  # the upper bound wins where the clamp is empty
        ({"spikes": ISOLATED}, (346, "spikes that would ratchet the scale down")),
        ({"drift": -2e-3, "spikes": ISOLATED}, (346, "spikes that would ratchet the scale down")),
        ({"skip_rate": 1e-4}, (6932, "the skip rate aimed at")),
        ({"skip_rate": 0.1, "drift": -1e-3}, (200, "gradients that shrink")),
    ],
)
def test_what_binds_the_growth_interval(options, expected):
    bound = growth_interval(2.0, 0.5, **{"skip_rate": 1e-3, **options})
    assert (bound.value, bound.by) == expected


@pytest.mark.parametrize(
    ("spikes", "expected"),
    [
        (QUIET, 0.5),
        (ISOLATED, 0.5),
        (FREQUENT, 0.75),
        (BURSTS, 0.25),
        (Spikes(steps=100, lengths=(9,), heights=(40.0,)), 0.125),
        (Spikes(steps=100, lengths=(9,), heights=(float("inf"),)), 0.125),
    ],
)
def test_the_backoff_factor_follows_the_overflows(spikes, expected):
    assert backoff_factor(spikes).value == expected


def test_growth_hysteresis_and_the_alarm():
    assert growth_factor(-1e-3, 2000) == SettingBound(value=4.0, by="gradients that shrink")  # doubling cannot follow
    assert growth_factor(-1e-3, 1000).value == growth_factor(+1e-1, 2000).value == 2.0
    assert [hysteresis(s).value for s in (QUIET, ISOLATED, FREQUENT, BURSTS)] == [1, 2, 2, 1]
    assert [alarm_scale(lowest).value for lowest in (10, -3, -20)] == [2.0**6, 2.0**-7, 2.0**-10]
