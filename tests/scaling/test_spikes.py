from __future__ import annotations

import math

import numpy as np
import pytest

from ampdoctor.scaling import ScalerSettings, simulate
from ampdoctor.scaling.closed_forms import Spikes, find_spikes, tail_index


def bulk(steps, seed=0):
    return np.random.default_rng(seed).normal(-4.0, 0.5, steps)


def test_a_quiet_trace_has_none():
    found = find_spikes(bulk(2000))
    assert found.lengths == ()
    assert found.longest_interval(2.0, 0.5) == math.inf
    assert not found.isolated
    assert not found.spiky


def test_runs_are_found_with_length_and_height():
    trace = np.full(100, -4.0)
    trace[10], trace[20:25], trace[99] = 2.0, 5.0, np.inf
    found = find_spikes(trace)
    assert found.lengths == (1, 5, 1)
    assert found.heights == (6.0, 9.0, np.inf)  # the bulk's largest scale leaves less than a binade
    assert found.isolated
    assert found.height == 9.0


def test_a_burst_is_not_isolated():
    trace = np.full(100, -4.0)
    trace[20:25] = 5.0
    assert not find_spikes(trace).isolated


@pytest.mark.parametrize("trace", [[], [np.inf], [-np.inf] * 5, [1.0]])
def test_traces_without_a_bulk_have_none(trace):
    assert find_spikes(np.array(trace, np.float64)).lengths == ()


def test_heavy_tails_are_told_from_light_ones():
    light = [find_spikes(bulk(1000, seed)).spiky for seed in range(50)]
    heavy = [find_spikes(bulk(1000, seed) + 10.0 * (bulk(1000, seed + 99) > -2.8)).spiky for seed in range(50)]
    assert np.mean(light) < 0.1
    assert np.mean(heavy) > 0.9
    assert find_spikes(bulk(299)).tail_index is None


@pytest.mark.parametrize("xi", [-0.4, 0.0, 0.3])
def test_the_tail_index_is_that_of_the_distribution(xi):
    u = np.random.default_rng(5).random(200_000)
    series = -np.log(u) if xi == 0.0 else (u**-xi - 1.0) / xi
    assert tail_index(series) == pytest.approx(xi, abs=0.05)


@pytest.mark.parametrize(("backoff", "rate"), [(0.5, 2e-3), (0.75, 1e-2), (0.25, 2e-3)])
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
