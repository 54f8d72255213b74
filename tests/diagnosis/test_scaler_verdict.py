"""What a scaler that keeps skipping steps means: one table for a replay and for a loop that is watched."""

from __future__ import annotations

import math

import pytest

from ampdoctor.diagnosis.replay.scaler_misuse import MADE_ANEW, NEVER_UPDATED, PERSISTS, scale_kills, verdict_on_skips
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE
from tests.diagnosis.births import origin, stats

OVERFLOW = origin("backward", verdict=(True, 1e6, 65504.0), inputs=(stats(amax=1e3),))
BEYOND = origin("backward", verdict=(True, 1e12, 65504.0), inputs=(stats(amax=1e-3),))
"""A derivative that does not fit by itself, whatever it is multiplied with."""
FALLING = [2.0**k for k in (20, 19, 18, 17)]


def verdict(origin=OVERFLOW, *, scales=FALLING, cures=True, updated=True, hopeless=False):
    found = verdict_on_skips(origin, scales=scales, steps=len(scales), cures=cures, updated=updated, hopeless=hopeless)
    return found.cause, found.severity, found.advice


def test_a_scale_that_comes_down_to_one_that_cures_is_a_scaler_at_work():
    assert verdict() == ("grad_overflow", "warning", "")


@pytest.mark.parametrize("steps", [1, PERSISTS - 1, PERSISTS])
def test_one_that_stays_is_at_fault_once_it_persists(steps):
    severity = "error" if steps == PERSISTS else "warning"
    advice = NEVER_UPDATED if steps > 1 else ""
    assert verdict(scales=[2.0**20] * steps, updated=False) == ("grad_overflow", severity, advice)
    anew = MADE_ANEW if steps == PERSISTS else ""
    assert verdict(scales=[2.0**20] * steps, updated=True) == ("grad_overflow", severity, anew)
    assert verdict(scales=[1.0] * steps, updated=True)[2] == "", "a scale that has come down to its floor"


def test_where_no_scale_cures_it_is_the_scales_unless_it_is_the_derivatives_or_the_runs():
    assert verdict(cures=False) == ("scaler_collapse", "error", "")
    assert verdict(BEYOND, cures=False) == ("backward_overflow", "error", "")
    assert verdict(cures=False, hopeless=True) == ("backward_overflow", "error", "")
    assert verdict(None, cures=False, hopeless=True) == ("scaler_collapse", "error", "")


@pytest.mark.parametrize(
    ("phase", "scale", "killed"),
    [
        ("scaler", DEAD_SCALE, True),
        ("optimizer", math.inf, True),
        ("backward", math.nan, True),
        ("forward", 0.0, False),
        ("scaler", 2 * DEAD_SCALE, False),
        ("scaler", None, False),
    ],
)
def test_a_dead_scale_kills_what_comes_after_the_loss(phase, scale, killed):
    assert scale_kills(origin(phase), scale) is killed
