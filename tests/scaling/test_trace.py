"""Traces against the tensors themselves, cast and counted; replicas and drift."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.trace import autocorrelation_length, find_drift, resample, trace_of
from tests.ranges.known import collected, place, values
from tests.scaling.simulated import bare_trace

A, B, NORM = place("a"), place("b"), place("norm")
WA, WB = place("a.weight", "weight_grad"), place("b.weight", "weight_grad")
SEEN = place("a", "activation")


def step(seed, *, size=-20.0, factor=1.0):
    """Gradients of sizes that differ by half a binade, as those of a network do, 20 binades apart from one another."""

    def made(log2_size, index):
        return values(size + log2_size, seed=10 * seed + index, count=20_000, zeros=50, spread=0.5) * factor

    return {A: made(0, 0), B: made(-8, 1), NORM: made(20, 2), WA: made(-4, 3), WB: made(8, 4), SEEN: made(30, 5)}


def profile_of(steps, **options):
    return collected(steps, wide=("norm",), **options)


def by_hand(steps, places, base=1.0):
    """For each step and scale (flushed share, relative error) of all these tensors together, by casting them."""
    flushed, errors = [], []
    for tensors in steps:
        together = torch.cat([tensors[where] for where in places]).double() / base
        together = together[together != 0]
        scaled = together[None, :] * torch.from_numpy(np.exp2(EXPONENTS))[:, None]
        cast = scaled.half().double()
        flushed.append((cast == 0).double().mean(dim=1).tolist())
        errors.append(((cast - scaled).norm(dim=1) / scaled.norm(dim=1)).tolist())
    return np.array(flushed), np.array(errors)


def agrees(trace, steps, activations, weights):
    expected, _ = by_hand(steps, activations)
    np.testing.assert_allclose(trace.activation_flushed, expected, atol=1e-6)
    expected, errors = by_hand(steps, weights)
    np.testing.assert_allclose(trace.weight_flushed, expected, atol=1e-6)
    # the error of the weight gradients, but inf where any half gradient overflows
    amax = [max(t[where].abs().max().item() for where in (*activations, *weights)) for t in steps]
    assert trace.log2_amax.tolist() == pytest.approx([math.log2(a) for a in amax], abs=1e-12)
    over = np.array(amax)[:, None] * np.exp2(EXPONENTS) >= 65520
    assert (trace.error == math.inf).tolist() == over.tolist()
    np.testing.assert_allclose(trace.error[~over], errors[~over], rtol=0.06)


def test_each_step_is_what_casts_of_all_its_gradients_give():
    steps = [step(seed, size=size) for seed, size in enumerate((-20, -26, -12))]
    agrees(trace_of(profile_of(steps)), steps, (A, B), (WA, WB))


@pytest.mark.parametrize("without", [("a",), ("norm",)])
def test_modules_in_fp32_do_not_count(without):
    steps = [step(1), step(2, size=-24)]
    activations = [where for where in (A, B) if where.module not in without]
    weights = [where for where in (WA, WB) if where.module not in without]
    agrees(trace_of(profile_of(steps), without), steps, activations, weights)


def test_a_weight_gradient_that_is_not_finite_overflows_at_every_scale():
    steps = [step(1), step(2), step(3)]
    steps[0][WA][7] = math.inf
    steps[1][WB][7] = math.nan
    steps[2][A][7] = math.inf  # which may be dropped on its way
    trace = trace_of(profile_of(steps))
    assert (trace.log2_amax == math.inf).tolist() == [True, True, False]
    assert (trace.error == math.inf).all(axis=1).tolist() == [True, True, False]
    assert trace_of(profile_of(steps), ("b",)).log2_amax[1] < 0.0


@pytest.mark.parametrize("base", [1.0, 1000.0])
def test_a_step_without_a_nonzero_gradient_overflows_and_loses_nothing(base):
    nothing = {where: torch.zeros_like(t) for where, t in step(1).items()}
    trace = trace_of(profile_of([step(1, factor=base), nothing], base_scale=base))
    assert trace.log2_amax[1] == -math.inf
    assert math.isfinite(trace.log2_amax[0])
    for curve in (trace.error, trace.activation_flushed, trace.weight_flushed):
        assert not curve[1].any()
        assert curve[0].any()


# -- replicas and drift --


def replicas_of(log2_amax, steps=1000, replicas=20, **options):
    trace = bare_trace(log2_amax)
    return resample(trace, find_drift(trace.log2_amax), replicas=replicas, steps=steps, **options)


def noise(steps, seed=0):
    return np.random.default_rng(seed).normal(size=steps)


@pytest.mark.parametrize("n", [1, 8, 1000])
def test_replicas_are_made_of_recorded_steps(n):
    made = replicas_of(noise(n))
    assert made.source.shape == made.shift.shape == made.maxima.shape == (20, 1000)
    assert set(np.unique(made.source)) <= set(range(n))
    assert np.array_equal(made.maxima, np.exp2(noise(n)[made.source] + made.shift))


@pytest.mark.parametrize(("n", "expected"), [(2000, 50.0), (100, 25.0)])
def test_blocks_are_fifty_steps_or_a_quarter_of_the_trace(n, expected):
    source = replicas_of(noise(n), steps=20_000, replicas=20).source
    jumps = (np.diff(source, axis=1) % n != 1).mean()
    assert 1.0 / jumps == pytest.approx(expected * n / (n - 1), rel=0.1)  # one new block in n goes on by chance


def test_a_slow_wave_makes_longer_blocks():
    wave = np.repeat(noise(40), 150) + 0.01 * noise(6000, 1)
    source = replicas_of(wave, steps=20_000).source
    assert 1.0 / (np.diff(source, axis=1) != 1).mean() > 80.0


def test_the_same_seed_gives_the_same_replicas_and_another_gives_others():
    few, many = replicas_of(noise(30), replicas=3), replicas_of(noise(30), replicas=9)
    assert np.array_equal(few.source, many.source[:3])
    assert not np.array_equal(few.source, replicas_of(noise(30), replicas=3, seed=1).source)
    assert not np.array_equal(many.source[0], many.source[1])


def test_a_drift_goes_on_as_long_again_as_it_was_seen():
    n = 400
    made = replicas_of(0.2 * noise(n) - 0.01 * np.arange(n), steps=3 * n, replicas=50)
    level = np.log2(made.maxima).mean(axis=0)
    assert level[: n // 10].mean() == pytest.approx(-0.2, abs=0.15)
    assert level[n : n + 40].mean() == pytest.approx(-0.01 * (n + 20), abs=0.15)
    assert level[2 * n :].mean() == pytest.approx(-0.01 * 2 * n, abs=0.15)
    assert level[-40:].mean() == pytest.approx(level[2 * n : 2 * n + 40].mean(), abs=0.1)


@pytest.mark.parametrize("n", [20, 400])
def test_a_trend_is_seen_with_its_size_and_noise_is_not(n):
    trend = find_drift(0.3 * noise(n) - 6.0 * np.arange(n) / n)
    assert trend.slope == pytest.approx(-6.0 / n, rel=0.2)
    false = [find_drift(noise(n, seed)).slope != 0.0 for seed in range(40)]
    assert np.mean(false) < 0.15


def test_a_wave_is_rarely_taken_for_a_trend():
    waves = [np.array(list(itertools.accumulate(noise(300, seed), lambda a, b: 0.9 * a + b))) for seed in range(40)]
    assert np.mean([find_drift(wave).slope != 0.0 for wave in waves]) < 0.25


@pytest.mark.parametrize("series", [[1.0], [1.0, 2.0, 3.0, 4.0], np.full(30, 5.0), np.full(30, -np.inf), []])
def test_too_few_or_equal_steps_have_no_drift(series):
    drift = find_drift(np.array(series, np.float64))
    assert drift.slope == 0.0
    assert drift.autocorrelation == 1.0


def test_autocorrelation_of_a_first_order_process_is_the_known_one():
    series = np.array(list(itertools.accumulate(noise(100_000), lambda a, b: 0.8 * a + b)))
    assert autocorrelation_length(series) == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.15)
    assert autocorrelation_length(noise(10_000)) < 1.2
