from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.evidence.run_facts import Place
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.numerics.counting import count
from ampdoctor.ranges.profile import Collector, RunFacts
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
from ampdoctor.scaling.trace import Shift, trace_of


class Measured(NamedTuple):
    place: Place
    steps: list
    half: bool
    weight: int


def site(name, steps, *, kind="activation_grad", half=True, weight=100):
    """A place with the values of each step."""
    part = "parameter" if kind.startswith("weight") else "output"
    return Measured(Place(name, kind, part), steps, half, weight)


def profile(*sites, **facts):
    collector = Collector()
    for values in zip(*(s.steps for s in sites), strict=True):
        collector.add_step({s.place: count(v) for s, v in zip(sites, values, strict=True)})
    half = {s.place: s.half for s in sites}
    weight = {s.place.module: s.weight for s in sites}
    return collector.profile(RunFacts(precision="fp16", **facts), half=half.__getitem__, weight=weight.__getitem__)


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


def test_a_scale_made_by_hand_is_divided_out():
    plain = chosen(profile(site("a", gaussian(-8))))
    by_hand = chosen(profile(site("a", gaussian(-8 + 16)), base_scale=65536.0))
    assert by_hand.exponent == plain.exponent


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
    assert cheap.fp32_modules == ("loud",)
    assert cheap.exponent == MAX_EXPONENT
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


def test_a_prediction_is_what_a_cast_does():
    steps = gaussian(-20, seed=4)
    weights = gaussian(-16, seed=5)
    measured = profile(site("a", steps), site("a.weight", weights, kind="weight_grad"))
    for scale in (1.0, 2.0**-4, 2.0**8):
        expected = predict(measured, ScalerSettings(scale=scale))
        values = torch.cat(steps).double() * scale
        grads = torch.cat(weights).double() * scale
        assert expected.scale == scale
        assert expected.skip_rate == 0.0
        assert expected.activation_flushed == pytest.approx((values.half() == 0).double().mean().item(), abs=2e-4)
        error = (grads.half().double() - grads).norm() / grads.norm()
        assert expected.relative_error == pytest.approx(error.item(), rel=0.05)


def test_a_prediction_follows_the_scaler_down():
    expected = predict(profile(site("a", gaussian(10))), ScalerSettings(scale=2.0**6))
    assert expected.skipped == 3
    assert not expected.settled
    calm = predict(profile(site("a", gaussian(10))), ScalerSettings(scale=2.0**4))
    assert (calm.skipped, calm.settled, calm.inf_in_weights) == (1, True, False)
    assert calm.scale == 2.0**3
    assert predict(profile(site("a", gaussian(0))), ScalerSettings(scale=0.0)).inf_in_weights


def test_what_the_training_does_to_gradients_moves_the_scale():
    measured = profile(site("a", gaussian(-8)))
    plain = chosen(measured)
    summed = choose_scale(measured, DEFAULT_THRESHOLDS, Shift(highest=-6.0))  # 64 ranks, divided after an fp16 sum
    assert summed.exponent == plain.exponent - 6
    wide = profile(site("a", [torch.exp2(torch.linspace(-30, 0, 4000))] * 3), site("b", gaussian(-30), weight=1))
    assert chosen(wide).modules_not_covered == ()
    divided = choose_scale(wide, DEFAULT_THRESHOLDS, Shift(lowest=6.0))  # divided before: as many binades more flush
    assert divided.modules_not_covered == ("b",)


def test_a_shifted_trace_is_that_of_the_shifted_gradients():
    plain, eighth = (
        profile(site("a", gaussian(size)), site("a.weight", gaussian(size), kind="weight_grad")) for size in (-6, -9)
    )
    shifted = trace_of(plain, shift=Shift(lowest=3.0, highest=3.0))
    expected = trace_of(eighth)
    np.testing.assert_allclose(shifted.log2_amax, expected.log2_amax)
    inner = slice(3, None)  # the first scales lie below what was recorded
    np.testing.assert_allclose(shifted.activation_flushed[:, inner], expected.activation_flushed[:, inner])
    np.testing.assert_allclose(shifted.weight_flushed[:, inner], expected.weight_flushed[:, inner])
    finite = np.isfinite(expected.error[:, inner])
    np.testing.assert_allclose(shifted.error[:, inner][finite], expected.error[:, inner][finite], rtol=1e-3)
    np.testing.assert_array_equal(np.isinf(shifted.error), np.isinf(expected.error))


# -- settings in closed form --

QUIET = Spikes(steps=1000)
ISOLATED = Spikes(steps=1000, lengths=(1,), heights=(8.0,))
FREQUENT = Spikes(steps=1000, lengths=(1,) * 5, heights=(8.0,) * 5)
BURSTS = Spikes(steps=1000, lengths=(30, 30), heights=(3.0, 4.0))


def interval(**options):
    bound = growth_interval(2.0, options.pop("backoff", 0.5), **{"skip_rate": 1e-3, **options})
    return bound.value, bound.by


def test_the_usual_interval_is_kept_where_nothing_binds():
    assert interval() == (2000, NOTHING)
    assert interval(drift=-1e-4, steps_left=50_000, spikes=QUIET) == (2000, NOTHING)
    assert interval(drift=+1e-2) == (2000, NOTHING)


def test_each_bound_is_named():
    assert interval(drift=-1e-3) == (694, "gradients that shrink")  # ln 2 / 1e-3, which is below 1 / 1e-3
    assert interval(drift=-2e-3) == (500, "gradients that shrink")
    assert interval(steps_left=15_000) == (694, "the steps that are left")
    assert interval(spikes=ISOLATED) == (346, "spikes that would ratchet the scale down")
    assert interval(skip_rate=1e-4) == (6932, "the skip rate aimed at")
    assert interval(skip_rate=0.1, drift=-1e-3) == (200, "gradients that shrink")


def test_the_upper_bound_wins_where_the_clamp_is_empty():
    assert interval(steps_left=1500) == (150, "the steps that are left")
    assert interval(steps_left=3) == (1, "the steps that are left")
    assert interval(skip_rate=1e-4, steps_left=30_000) == (3000, "the steps that are left")


def test_the_smallest_upper_bound_is_the_one_that_binds():
    assert interval(drift=-2e-3, steps_left=4000) == (400, "the steps that are left")
    assert interval(drift=-1e-2, steps_left=4000) == (100, "gradients that shrink")


@pytest.mark.parametrize(
    ("spikes", "expected"),
    [
        (QUIET, 0.5),
        (ISOLATED, 0.5),
        (FREQUENT, 0.75),
        (BURSTS, 0.25),
        (Spikes(steps=100, lengths=(9,), heights=(1.0,)), 0.5),
        (Spikes(steps=100, lengths=(9,), heights=(40.0,)), 0.125),
        (Spikes(steps=100, lengths=(9,), heights=(float("inf"),)), 0.125),
    ],
)
def test_the_backoff_factor_follows_the_overflows(spikes, expected):
    assert backoff_factor(spikes).value == expected


def test_growth_is_by_four_only_where_doubling_cannot_follow():
    assert growth_factor(-1e-3, 2000) == SettingBound(value=4.0, by="gradients that shrink")
    assert growth_factor(-1e-3, 1000).value == 2.0
    assert growth_factor(+1e-1, 2000).value == 2.0


def test_a_first_overflow_is_ignored_only_where_overflows_are_isolated():
    assert [hysteresis(s).value for s in (QUIET, ISOLATED, FREQUENT, BURSTS)] == [1, 2, 2, 1]


def test_the_alarm_lies_four_binades_below_what_serves():
    assert alarm_scale(10).value == 2.0**6
    assert alarm_scale(-3).value == 2.0**-7
    assert alarm_scale(-20).value == 2.0**-10
