"""A typical simulated path: it does what the figures say, it is the same each time, and it stays short."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.scaling.scalers import OVERFLOW_AT, ScalerSettings
from ampdoctor.scaling.search import MOST_POINTS, expect, largest_scales, trajectory
from tests.scaling.simulated import bare_trace

HORIZON = 3000


def spiky(steps=120, seed=0):
    generator = np.random.default_rng(seed)
    return bare_trace(generator.normal(-2.0, 1.0, steps) + 6.0 * (generator.random(steps) < 0.05))


def path_of(settings, trace, horizon=HORIZON, framework="torch"):
    thresholds = thresholds_from({"AMP723": {"horizon": horizon}})
    expected = expect(settings, trace, framework=framework, thresholds=thresholds)
    return expected, trajectory(expected, trace, framework, horizon)


@pytest.mark.parametrize("framework", ["torch", "deepspeed"])
def test_it_skips_as_many_steps_as_the_median_replica(framework):
    expected, path = path_of(ScalerSettings(scale=65536.0, growth_interval=50), spiky(), framework=framework)
    low, median, high = expected.skips
    assert low <= path.skipped <= high
    assert abs(path.skipped - median) <= 1.0
    assert len(path.skips) == path.skipped > 0
    assert path.replica == expected.typical


def test_the_scale_halves_after_each_skipped_step_and_doubles_after_each_interval():
    _, path = path_of(ScalerSettings(scale=65536.0, growth_interval=50), spiky())
    assert path.points[0] == (0, 65536.0)
    assert path.changes == len(path.points)
    after = {step + 1 for step in path.skips}
    for (_, before), (step, scale) in zip(path.points, path.points[1:], strict=False):
        assert scale == (before / 2.0 if step in after else before * 2.0)
    fallen = {step for (_, a), (step, b) in zip(path.points, path.points[1:], strict=False) if b < a}
    assert fallen == {step for step in after if step < HORIZON}


def test_a_scale_that_never_changes_is_one_point():
    _, path = path_of(ScalerSettings(scale=1.0, growth_interval=10**6), bare_trace([-5.0] * 60))
    assert (path.points, path.changes, path.skips, path.skipped) == (((0, 1.0),), 1, (), 0)


def test_a_long_path_is_thinned_to_its_lowest_and_highest_scales():
    horizon = 8_000
    expected, path = path_of(ScalerSettings(scale=65536.0, growth_interval=2), spiky(), horizon)
    assert path.changes > MOST_POINTS >= len(path.points) - 1
    assert path.skipped > MOST_POINTS == len(path.skips)
    assert expected.skips[0] <= path.skipped <= expected.skips[2]
    steps = [step for step, _ in path.points]
    assert steps == sorted(set(steps))
    assert path.skips == tuple(sorted(set(path.skips)))
    first = [step for step in steps if step < horizon // (MOST_POINTS // 2)]
    assert 1 <= len(first) <= 3


def test_the_largest_scale_of_a_step_fits_and_its_double_does_not():
    trace = spiky()
    limits = largest_scales(trace)
    assert [step for step, _ in limits] == list(range(trace.steps))
    for (_, scale), amax in zip(limits, np.exp2(trace.log2_amax), strict=True):
        assert scale * amax < OVERFLOW_AT <= 2.0 * scale * amax
    # steps of which nobody knows the largest gradient have none
    assert [step for step, _ in largest_scales(bare_trace([1.0, math.inf, -math.inf, 2.0]))] == [0, 3]
    assert largest_scales(bare_trace([math.inf])) == ()


def test_of_many_recorded_steps_the_tightest_are_shown():
    log2_amax = np.zeros(3 * MOST_POINTS)
    log2_amax[4567] = 9.0
    limits = largest_scales(bare_trace(log2_amax))
    assert len(limits) == MOST_POINTS
    assert (4567, 2.0**6) in limits
    assert min(scale for _, scale in limits) == 2.0**6
