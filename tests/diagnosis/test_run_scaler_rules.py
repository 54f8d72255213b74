"""Rules on a run's own scaler, and on what it loses to a checkpoint's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.scaler_state import overwritten_finding, run_scaler_findings
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.run_facts import ResumedScaler
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS

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
