from __future__ import annotations

import itertools

import numpy as np
import pytest

from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.trace import StepTrace, autocorrelation_length, find_drift, resample


def trace_of(log2_amax):
    log2_amax = np.asarray(log2_amax, np.float64)
    curves = np.zeros((len(log2_amax), len(EXPONENTS)))
    return StepTrace(log2_amax=log2_amax, error=curves, activation_flushed=curves, weight_flushed=curves)


def replicas_of(log2_amax, steps=1000, replicas=20, **options):
    trace = trace_of(log2_amax)
    return resample(trace, find_drift(trace.log2_amax), replicas=replicas, steps=steps, **options)


def noise(steps, seed=0):
    return np.random.default_rng(seed).normal(size=steps)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 49, 1000])
def test_replicas_are_made_of_recorded_steps(n):
    made = replicas_of(noise(n))
    assert made.source.shape == made.shift.shape == made.maxima.shape == (20, 1000)
    assert set(np.unique(made.source)) <= set(range(n))
    assert np.array_equal(made.maxima, np.exp2(noise(n)[made.source] + made.shift))


def test_steps_are_drawn_equally_often():
    source = replicas_of(noise(40), steps=4000, replicas=50).source
    counts = np.bincount(source.ravel(), minlength=40) / source.size
    assert np.abs(counts * 40 - 1.0).max() < 0.1


@pytest.mark.parametrize(("n", "expected"), [(2000, 50.0), (100, 25.0), (8, 2.0), (1, 1.0)])
def test_blocks_are_fifty_steps_or_a_quarter_of_the_trace(n, expected):
    source = replicas_of(noise(n), steps=20_000, replicas=20).source
    if n == 1:
        assert not source.any()
        return
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


def test_steps_without_a_finite_gradient_stay_what_they_are():
    made = replicas_of([*(-0.1 * np.arange(40)), np.inf, -np.inf])
    assert np.array_equal(np.isinf(made.maxima), made.source == 40)
    assert np.array_equal(made.maxima == 0.0, made.source == 41)


@pytest.mark.parametrize("n", [20, 100, 1000])
def test_a_trend_is_seen_with_its_size_and_noise_is_not(n):
    trend = find_drift(0.3 * noise(n) - 6.0 * np.arange(n) / n)
    assert trend.slope == pytest.approx(-6.0 / n, rel=0.2)
    assert trend.low <= trend.slope <= trend.high < 0.0
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


def test_one_spike_does_not_bend_the_line():
    series = 0.1 * noise(60) - 0.05 * np.arange(60)
    bent = series.copy()
    bent[50] += 40.0
    assert find_drift(bent).slope == pytest.approx(find_drift(series).slope, abs=0.002)


def test_autocorrelation_of_a_first_order_process_is_the_known_one():
    series = np.array(list(itertools.accumulate(noise(100_000), lambda a, b: 0.8 * a + b)))
    assert autocorrelation_length(series) == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.15)
    assert autocorrelation_length(noise(10_000)) < 1.2
