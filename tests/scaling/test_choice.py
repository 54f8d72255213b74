from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.evidence.ranges import RangeProfile, SiteRange, site_entry
from ampdoctor.numerics import Histogram
from ampdoctor.scaling.choice import MAX_EXPONENT, Interval, choose_scale, predict, stab
from ampdoctor.scaling.measured import Measured
from ampdoctor.scaling.settings import ScalerSettings


def site(name, steps, *, kind="activation_grad", half=True, weight=100):
    """A site from the values of each step."""
    total = Histogram.empty()
    for values in steps:
        total = total + Histogram.of(values)
    part = "parameter" if kind.startswith("weight") else "output"
    maxima = tuple(float(v.abs().max()) if v.abs().max() > 0 else None for v in steps)
    return SiteRange(
        name=name, kind=kind, part=part, half=half, weight=weight, histogram=total.to_dict(), amax_by_step=maxima
    )


def profile(*sites, steps=3, **fields):
    return Measured(RangeProfile(sites=sites, steps=steps, precision="fp16", **fields))


def gaussian(log2_size, steps=3, seed=0, count=4000):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) * 2.0**log2_size for _ in range(steps)]


@given(st.integers(-40, 20), st.integers(0, 5))
def test_the_chosen_scale_is_the_largest_that_overflows_nothing(size, seed):
    steps = gaussian(size, seed=seed, count=64)
    choice = choose_scale(profile(site("fc", steps)))
    scaled = torch.cat(steps).double() * 2.0**choice.exponent
    assert torch.isfinite(scaled.half()).all()
    if choice.exponent < MAX_EXPONENT:
        assert choice.bound_by == "fc.output (activation_grad)"
        assert choice.exponent >= 14 - size - 4  # and no more than a few binades below what was seen to fit
    assert choice.fp32_modules == ()


def test_the_largest_gradient_binds_and_fp32_tensors_do_not_count():
    choice = choose_scale(
        profile(
            site("a", gaussian(-10)),
            site("b.weight", gaussian(-4), kind="weight_grad"),
            site("norm", gaussian(10), half=False),
            site("a", gaussian(12), kind="activation"),
        )
    )
    assert choice.bound_by == "b.weight (weight_grad)"


def test_a_scale_made_by_hand_is_divided_out():
    plain = choose_scale(profile(site("a", gaussian(-8))))
    by_hand = choose_scale(profile(site("a", gaussian(-8 + 16)), base_scale=65536.0))
    assert by_hand.exponent == plain.exponent


def test_without_a_gradient_there_is_nothing_to_choose():
    assert choose_scale(profile(site("a", [torch.zeros(4)] * 3))) is None
    assert choose_scale(profile(site("a", gaussian(0), kind="activation"))) is None


def test_a_loss_that_stays_fp16_binds():
    choice = choose_scale(profile(site("a", gaussian(-12)), loss_in_half=True, loss_amax=100.0))
    assert choice.exponent == 9
    assert math.isinf((torch.tensor(100.0, dtype=torch.float64) * 2.0**10).half())
    assert "the loss" in choice.bound_by


def test_modules_too_far_apart_are_named():
    quiet, loud = gaussian(-50), gaussian(5)
    choice = choose_scale(
        profile(
            site("loud", loud, weight=1000),
            site("quiet", quiet, weight=10),
            site("quiet.weight", quiet, kind="weight_grad", weight=10),
        )
    )
    assert choice.fp32_modules == ("quiet",)
    assert choice.share == pytest.approx(10 / 1010)
    cheap = choose_scale(profile(site("loud", loud, weight=10), site("quiet", quiet, weight=1000)))
    assert cheap.fp32_modules == ("loud",)
    assert cheap.exponent == MAX_EXPONENT
    many = choose_scale(profile(site("loud", loud, weight=10), site("quiet", quiet, weight=10)))
    assert many.fp32_modules == ()
    assert many.unserved == ("quiet",)  # nothing overflows; what is lost is named
    assert many.exponent == choice.exponent


def test_rounding_noise_is_no_reason_for_fp32():
    noise = site("key.bias", gaussian(-50), kind="weight_grad")
    assert choose_scale(profile(site("key", gaussian(-10)), noise)).fp32_modules == ()


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
    calm = predict(profile(site("a", gaussian(10)), steps=3), ScalerSettings(scale=2.0**4))
    assert (calm.skipped, calm.settled, calm.poisoned) == (1, True, False)
    assert calm.scale == 2.0**3
    assert predict(profile(site("a", gaussian(0))), ScalerSettings(scale=0.0)).poisoned


def test_a_profile_survives_its_json_form():
    measured = profile(
        site("a", gaussian(-3)),
        site("a.weight", gaussian(2), kind="weight_grad"),
        scaler={"scale": 8.0},
        loss_scale=8.0,
        loss_amax=3.0,
    )
    section = {"measured": measured.profile.to_dict(), "sites": [site_entry(s) for s in measured.profile.sites]}
    assert RangeProfile.from_dict(section) == measured.profile


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("measured"), "lacks its 'measured'"),
        (lambda s: s["measured"].update(version=2), "version 2"),
        (lambda s: s["measured"].update(steps=-1), "not a count"),
        (lambda s: s["measured"].update(loss_scale=0), "not a positive number"),
        (lambda s: s["measured"].update(scaler=3), "no mapping"),
        (lambda s: s["measured"].update(steps=10**12), "more than is ever read"),
        (lambda s: s["measured"].update(steps=10**400), "not a count"),
        (lambda s: s["measured"].update(base_scale=1e308), "not a positive number"),
        (lambda s: s["measured"].update(loss_scale=10**400), "not a number that a float can hold"),
        (lambda s: s["measured"].update(loss_scale=10**3000), "0000..., not a number"),
        (lambda s: s["measured"].update(scaler={"scale": "x"}), "scale is 'x', not a number"),
        (lambda s: s["measured"].update(scaler={"scale": None}), "scale is None, not a number"),
        (lambda s: s["measured"].update(scaler={"growth_interval": "Infinity"}), "is 'Infinity', not a number"),
        (lambda s: s["measured"].update(scaler={"_growth_tracker": True}), "is True, not a number"),
        (lambda s: s["measured"].update(precision="x"), "precision is 'x', none of fp32"),
        (lambda s: s["measured"].update(precision=None), "precision is None, none of fp32"),
        (lambda s: s["measured"].update(nonfinite_steps=None), "no list of steps"),
        (lambda s: s["measured"].update(nonfinite_steps=["1"]), "no list of steps"),
        (lambda s: s["measured"].update(nonfinite_steps=[10**12]), "no list of steps"),
        (lambda s: s["sites"].append(3), "no object"),
        (lambda s: s["sites"][0].update(kind="other"), "no name, kind or part"),
        (lambda s: s["sites"][0].update(amax_by_step=[1.0] * 9), "more of them than steps"),
        (lambda s: s["sites"][0].update(amax_by_step=[-1.0]), "negative magnitude"),
        (lambda s: s["sites"][0].update(amax_by_step=["NaN"]), "one that is NaN"),
        (lambda s: s["sites"][0].update(amax_by_step=["-Infinity"]), "negative magnitude"),
        (lambda s: s["sites"][0].update(weight=10**400), "not a count"),
        (lambda s: s["sites"][0].update(amax_by_step=["x"]), "not a number"),
        (lambda s: s["sites"][0].update(weight="3"), "not a count"),
        (lambda s: s["sites"][0]["histogram"].update(counts=[1]), "a.output (activation_grad): histogram data"),
    ],
)
def test_a_profile_that_was_tampered_with_is_refused(change, sentence):
    measured = profile(site("a", gaussian(-3)))
    section = {"measured": measured.profile.to_dict(), "sites": [site_entry(s) for s in measured.profile.sites]}
    change(section)
    with pytest.raises(UsageError) as caught:
        Measured(RangeProfile.from_dict(section))
    assert sentence in str(caught.value)
