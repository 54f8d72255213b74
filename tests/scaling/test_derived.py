from __future__ import annotations

import pytest

from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.scaling.choose import (
    NOTHING,
    alarm_scale,
    backoff_factor,
    growth_factor,
    growth_interval,
    hysteresis,
)
from ampdoctor.scaling.closed_forms import Spikes

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
