"""Rules on a run's own scaler: its settings, what it loses to a checkpoint's, and what it means that it skips."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.scaler import (
    MADE_ANEW,
    NEVER_UPDATED,
    PERSISTS,
    overwritten_finding,
    run_scaler_findings,
    scale_kills,
    verdict_on_skips,
)
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, ScalerState
from ampdoctor.evidence.run_facts import ResumedScaler
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from tests.diagnosis.births import origin, stats

DEFAULT = ScalerState(scale=65536.0)


def found(**changes):
    return [(f.code, f.severity) for f in run_scaler_findings(replace(DEFAULT, **changes), DEFAULT_THRESHOLDS)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"scale": 2.0**-100, "growth_interval": 1, "growth_factor": 4.0, "backoff_factor": 0.125}, []),
        ({"growth_factor": 1.0, "backoff_factor": 1.0}, []),  # a fixed scale
        ({"growth_tracker": 2000}, [("AMP403", "warning")]),
        ({"scale": 2.0**-128}, [("AMP401", "error")]),
        ({"scale": math.inf}, [("AMP401", "error")]),
        ({"backoff_factor": 1.0}, [("AMP404", "warning")]),
    ],
)
def test_the_settings_of_a_run(changes, expected):
    assert found(**changes) == expected


def lost(own, file, now, asked):
    states = {name: replace(DEFAULT, **changes) for name, changes in (("own", own), ("file", file), ("now", now))}
    finding = overwritten_finding(ResumedScaler(**states, asked=asked))
    return None if finding is None else (finding.severity, sorted(finding.evidence["settings"]))


ASKED = frozenset({"init_scale", "growth_interval"})


@pytest.mark.parametrize(
    ("own", "file", "now", "asked", "expected"),
    [
        ({"growth_interval": 500}, {}, {}, ASKED, ("warning", ["growth_interval"])),
        ({"growth_interval": 500}, {}, {"growth_interval": 500}, ASKED, None),  # set again afterwards
        ({"growth_interval": 500}, {}, {}, frozenset({"init_scale"}), None),  # nobody asked for it
        ({"growth_interval": 500}, {}, {"growth_interval": 500}, None, ("note", ["growth_interval"])),
        ({"growth_interval": 500}, {}, {}, None, ("warning", ["growth_interval"])),  # a load hook replaced it
        ({}, {"growth_interval": 500}, {}, None, None),  # GradScaler's own default
        ({"scale": 8.0}, {"scale": 1024.0}, {"scale": 1024.0}, ASKED, None),  # the scale is state
        ({"backoff_factor": math.nan}, {"backoff_factor": math.nan}, {}, None, None),
    ],
)
def test_what_loading_a_state_overwrites(own, file, now, asked, expected):
    assert lost(own, file, now, asked) == expected


# -- what a scaler that keeps skipping means: one table for a replay and for a loop that is watched

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
