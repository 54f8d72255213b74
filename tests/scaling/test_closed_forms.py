from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.scaling.closed_forms import (
    LIM,
    MAX_SPREADS,
    TAIL,
    Spikes,
    _spreads,
    equilibrium_skip_rate,
    find_spikes,
    highest_exponent,
    loss_scale_limit,
    tail_index,
    upper_log2,
)
from ampdoctor.scaling.scalers import ScalerSettings
from tests.scaling.simulated import simulate

# exceeded with the probability `TAIL`, by the finite sum of Abramowitz and Stegun (26.7.3 and 26.7.4)
QUANTILES = [(2, 37.963077), (20, 4.006355), (21, 3.972912), (40, 3.677256), (120, 3.482791)]

# whole ones are exact powers of two, where ties sit; torch casts fp64 to fp16 by way of fp32, so no finer than that
magnitudes = st.one_of(st.integers(-60, 30).map(float), st.integers(-60_000, 30_000).map(lambda n: n / 1024))


def to_fp16(log2_magnitude, exponent):
    return torch.tensor(2.0**log2_magnitude * 2.0**exponent, dtype=torch.float64).to(torch.float16).item()


@given(magnitudes)
def test_the_highest_exponent_is_the_last_that_fits(magnitude):
    s = highest_exponent(magnitude)
    assert math.isfinite(to_fp16(magnitude, s))
    assert to_fp16(magnitude, s + 1) == math.inf


def test_what_lies_at_the_limit_itself_overflows():
    assert highest_exponent(LIM) == -1
    trace = np.full(100, -4.0)
    trace[10] = LIM - highest_exponent(-4.0)
    assert find_spikes(trace).lengths == (1,)


@given(st.floats(1e-3, 1e6))
def test_a_loss_that_stays_fp16_limits_the_scale(loss):
    s = loss_scale_limit(loss)
    assert math.isfinite(to_fp16(math.log2(loss), s))
    assert to_fp16(math.log2(loss), s + 1) == math.inf
    assert loss_scale_limit(0.0) is None


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES)
def test_the_spread_is_multiplied_by_students_quantile_up_to_a_cap(freedom, quantile):
    assert _spreads(TAIL, freedom) == pytest.approx(min(quantile, MAX_SPREADS), abs=6e-4)


def test_the_upper_quantile_covers_further_steps():
    generator = torch.Generator().manual_seed(3)
    exceeded = 0
    for _ in range(400):
        draws = torch.randn(51, generator=generator).tolist()
        exceeded += draws[50] > upper_log2(draws[:50], 1e-2)
    assert exceeded / 400 < 0.03


def test_few_steps_are_not_extrapolated_far():
    assert upper_log2([0.0, 0.1], 3.5e-4) < 1.0
    assert upper_log2([-3.0], 3.5e-4) == -3.0
    assert upper_log2([*[0.0] * 20, 9.0], TAIL) == 9.0  # at least the largest seen
    assert upper_log2(np.linspace(0.0, -20.0, 50).tolist(), TAIL) < 0.5  # a trend is no spread


def test_the_defaults_equilibrium():
    assert equilibrium_skip_rate(2.0, 0.5, 2000) == pytest.approx(math.log(2) / 2000)
    assert equilibrium_skip_rate(2.0, 0.75, 1000) == pytest.approx(1.2277e-3, rel=1e-3)


# -- spikes --


def bulk(steps, seed=0):
    return np.random.default_rng(seed).normal(-4.0, 0.5, steps)


def test_runs_are_found_with_length_and_height():
    quiet = find_spikes(bulk(2000))
    assert (quiet.lengths, quiet.longest_interval(2.0, 0.5), quiet.isolated) == ((), math.inf, False)
    trace = np.full(100, -4.0)
    trace[20:25] = 5.0
    assert not find_spikes(trace).isolated  # a burst
    trace[10], trace[99] = 2.0, np.inf
    found = find_spikes(trace)
    assert found.lengths == (1, 5, 1)
    assert found.heights == (6.0, 9.0, np.inf)  # the bulk's largest scale leaves less than a binade
    assert found.isolated
    assert found.height == 9.0


@pytest.mark.parametrize("trace", [[], [np.inf], [-np.inf] * 5, [1.0]])
def test_traces_without_a_bulk_have_none(trace):
    assert find_spikes(np.array(trace, np.float64)).lengths == ()


def test_heavy_tails_are_told_from_light_ones():
    light = [find_spikes(bulk(1000, seed)).spiky for seed in range(50)]
    heavy = [find_spikes(bulk(1000, seed) + 10.0 * (bulk(1000, seed + 99) > -2.8)).spiky for seed in range(50)]
    assert np.mean(light) < 0.1
    assert np.mean(heavy) > 0.9
    assert not find_spikes(bulk(299) + 10.0 * (bulk(299, 99) > -2.8)).spiky


@pytest.mark.parametrize("xi", [-0.4, 0.0, 0.3])
def test_the_tail_index_is_that_of_the_distribution(xi):
    u = np.random.default_rng(5).random(200_000)
    series = -np.log(u) if xi == 0.0 else (u**-xi - 1.0) / xi
    assert tail_index(series) == pytest.approx(xi, abs=0.05)


@pytest.mark.parametrize(("backoff", "rate"), [(0.5, 2e-3), (0.75, 1e-2)])
def test_the_scale_holds_at_the_longest_interval_and_falls_at_four_times_it(backoff, rate):
    spikes = np.random.default_rng(2).random(60_000) < rate
    runs = Spikes(steps=60_000, lengths=(1,) * int(spikes.sum()), heights=(math.inf,) * int(spikes.sum()))
    longest = runs.longest_interval(2.0, backoff)
    maxima = np.where(spikes, np.inf, 2.0**-10)

    def final(interval):
        start = ScalerSettings(scale=2.0**20, backoff_factor=backoff, growth_interval=int(interval))
        return simulate(start, maxima)[-1].scale

    assert final(longest) > 2.0**20
    assert final(4 * longest) < 2.0**10
