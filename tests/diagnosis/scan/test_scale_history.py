"""Rules on the history of a loss scale."""

from __future__ import annotations

import math
import random

import pytest

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.scan.log_scale import equilibrium
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerSummary, ScalerState
from tests.diagnosis.scan.logs import diagnosed, entry, found, history, scaled, simulated, weights
from tests.pairwise import THOROUGH

INF = math.inf


def seeds(quick, count):
    """So many seeds, the later ones by `make thorough`."""
    return [pytest.param(seed, marks=() if seed < quick else THOROUGH) for seed in range(count)]


DESCENT = [2.0**k for k in range(16, 8, -1)]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        (DESCENT, []),
        (DESCENT + history(8), []),
        (DESCENT + history(8, 7, 8, 9, 8, 7, 8, hold=300), []),
        (DESCENT + history(12, 11, 10, 9, hold=300), []),
        (DESCENT + history(12, 11, 10, 9, 8, hold=300), [("AMP706", "note")]),
        (DESCENT + history(12, *range(11, 3, -1), hold=300), [("AMP706", "warning")]),
        (DESCENT + history(3, 2, 1, 0, -1, hold=300), [("AMP706", "warning")]),
        (DESCENT + history(8, *range(7, -130, -1), hold=300), [("AMP706", "error")]),
    ],
)
def test_the_history_of_a_scale(scales, expected):
    assert found(scaled(scales), scale=1024.0) == expected


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize(
    "changes",
    [
        {"hysteresis": 2, "scale": 2.0**32, "interval": 1000},
        {"fresh_at": 1500},
        {"fresh_at": 1500, "interval": 50},
        {"interval": 20},
        {"interval": 100, "hysteresis": 2},
    ],
)
def test_a_working_scaler_is_left_alone_at_its_start_and_after_a_fresh_resume(seed, every, changes):
    rng = random.Random(seed)
    log = simulated(rng.randint(300, 3000), lambda _: 2 ** rng.gauss(9, 0.7), every=every, **changes)
    scaler = ScalerState(scale=512.0, growth_interval=changes.get("interval", 2000), growth_tracker=5)
    assert found(log, scalers=(scaler,)) == []
    assert found(log) == []  # nor where no scaler was stored


def sinking(every_binade, steps=1500, rng=None):
    """From 2^16 to 1, a binade each so many steps, at once or by chance."""
    scale, scales = 2.0**16, []
    for step in range(steps):
        scales.append(scale)
        if rng.random() < 1 / every_binade if rng else step % every_binade == every_binade - 1:
            scale = max(scale / 2, 1.0)
    return scaled(scales)


@pytest.mark.parametrize(("every_binade", "every"), [(90, 1), (90, 10), (90, 50), (20, 1), (20, 10), (12, 1)])
def test_a_fall_with_long_rests_is_no_first_descent(every_binade, every):
    (fall,) = [f for f in diagnosed(sinking(every_binade)[::every], scale=1.0) if f.code == "AMP706"]
    assert (fall.severity, fall.evidence["binades"]) == ("warning", 16)


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_a_fall_by_chance_with_long_rests_is_no_first_descent_either(seed):
    log = sinking(40, 2500, rng=random.Random(seed))
    assert ("AMP706", "warning") in found(log, scale=1.0)


@pytest.mark.parametrize("seed", seeds(3, 10))
@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("scatter", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("every", [1, 10, 50])
def test_a_first_descent_under_noisy_gradients_is_health(seed, hysteresis, scatter, every):
    rng = random.Random(seed)
    log = simulated(1500, lambda _: 2 ** rng.gauss(9, scatter), hysteresis=hysteresis, scale=2.0**24, every=every)
    assert log[-1].scale < 2.0**12
    assert "AMP706" not in [code for code, _ in found(log, scale=512.0)]


def test_a_scale_that_sinks_with_growths_in_between():
    rng = random.Random(0)
    log = simulated(1500, lambda _: math.inf if rng.random() > 0.15 else 0.0, interval=5)
    assert 2.0**-128 < log[-1].scale < 1
    assert [kind for kind in found(log) if kind[0] == "AMP706"] == [("AMP706", "warning")]


def test_no_equilibrium_is_stated_that_is_not_known():
    log = scaled(history(8, hold=150) + history(*range(7, 1, -1)))
    assert [code for code, _ in found(log)] == ["AMP706"]
    assert "AMP707" in [code for code, _ in found(log, scale=8.0)]


def test_a_collapse_in_the_log_prescribes_bf16():
    (finding,) = [f for f in diagnosed(scaled(history(3, 2, 1, 0, -1, hold=300))) if f.code == "AMP706"]
    assert (finding.cause, finding.prescription.kind) == ("scaler_collapse", "dtype")


def test_the_skip_rate_is_held_against_the_equilibrium():
    scaler = ScalerState(scale=1024.0, growth_interval=100)
    low, high = equilibrium(scaler)
    assert (low, high) == (pytest.approx(math.log(2) / 100), 0.01)
    sawtooth = history(8, *[9, 8] * 20, hold=4)
    assert found(scaled(sawtooth), scale=256.0) == [("AMP707", "warning")]
    assert found(scaled(history(8, *[9, 8] * 20, hold=25)), scale=256.0) == [("AMP707", "note")]
    frequent = CheckpointSummary(
        format="folder", tensors=(weights(),), scalers=(scaler,), log=tuple(scaled(history(8, *[9, 8] * 20, hold=25)))
    )
    assert [f.code for f in judge(frequent)] == []
    assert equilibrium(ScalerState(scale=1.0, growth_factor=1.0)) is None


def test_steps_that_were_not_taken_are_a_note():
    state = OptimizerSummary(path="optimizer", steps=((500.0, 4),))
    assert found([], scale=1024.0, optimizers=(state,), global_step=1000) == [("AMP707", "note")]
    assert found([], scale=1024.0, optimizers=(state,), global_step=510) == []
    assert found([], optimizers=(state,), global_step=1000) == []


def falling(exponents, norms, hold=12):
    """A settled scale that then falls, with a gradient norm at each of its levels."""
    rng = random.Random(3)
    levels = [(12, 1.0)] * 240 + [level for level in zip(exponents, norms, strict=True) for _ in range(hold)]
    pairs = [(2.0**k, norm * math.exp(rng.gauss(0, 0.3))) for k, norm in levels]
    return [entry(i, 2.0 + i % 7 / 10, norm, scale) for i, (scale, norm) in enumerate(pairs)]


def alarms(log):
    return [(f.severity, (f.evidence["norm_rise"] or 0) > 2.5) for f in diagnosed(log) if f.code == "AMP706"]


FALL = [11, 10, 9, 8]


def test_a_fall_with_a_rising_gradient_norm_is_an_alarm_and_alone_a_note():
    assert alarms(falling(FALL, [2.0, 4.0, 8.0, 16.0])) == [("warning", True)]
    assert alarms(falling(FALL, [1.0] * 4)) == [("note", False)]
    assert alarms(falling(FALL, [INF] * 4)) == [("note", False)]
    assert alarms(falling(FALL[:3], [2.0, 4.0, 8.0])) == []


def test_a_fall_below_the_usual_scale_counts_whatever_grew_in_between():
    path = [11, 10, 11, 10, 9, 8]
    assert alarms(falling(path, [2.0, 4.0, 4.0, 6.0, 9.0, 16.0], hold=3)) == [("warning", True)]
    assert alarms(falling(path, [1.0] * 6, hold=3)) == []


def test_a_fall_that_the_run_has_made_up_for_is_none():
    assert alarms(falling([*FALL, 9, 10, 11, 12], [2.0, 4.0, 8.0, 16.0, 4.0, 2.0, 1.0, 1.0])) == []


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_a_halving_each_interval_and_rises_of_the_scale_are_health(seed):
    rng = random.Random(seed)
    scales = history(*[12, 13] * 8, hold=200)
    log = [entry(i, 2.0 + i % 7 / 10, math.exp(rng.gauss(0, 0.5)), s) for i, s in enumerate(scales)]
    assert found(log, scalers=(ScalerState(scale=4096.0, growth_interval=200, growth_tracker=5),)) == []
    rising = [entry(i, 2.0 + i % 7 / 10, 1.0 + i % 5, s) for i, s in enumerate(history(*range(8, 20), hold=200))]
    assert found(rising) == []
    fresh = rising[:1200] + [entry(1200 + i, 2.0 + i % 7 / 10, 1.0 + i % 5, 2.0**24) for i in range(100)]
    assert found(fresh) == []  # a jump is a new scaler


def test_a_scale_that_stopped_growing_is_a_note_where_the_log_can_tell():
    def stands(steps=700, norm=1.0, top=10, every=1):
        scales = history(8, 9, top, hold=200) + [2.0**top] * steps
        log = [entry(i, 2.0 + i % 7 / 10, norm + i % 5 / 10, s) for i, s in enumerate(scales)]
        return [(f.code, f.severity) for f in diagnosed(log[::every]) if f.code == "AMP403"]

    assert stands() == [("AMP403", "note")]
    assert stands(steps=300) == []
    assert stands(every=2) == []  # it may have grown and come back in between
    assert stands(norm=INF) == []  # overflows that a hysteresis lets pass
    assert stands(top=24) == []
    stored = ScalerState(scale=1024.0, growth_interval=200, growth_tracker=150)
    log = [entry(i, 2.0, 1.0, s) for i, s in enumerate(history(8, 9, 10, hold=200) + [1024.0] * 900)]
    assert [f.code for f in diagnosed(log, scalers=(stored,)) if f.code.startswith("AMP4")] == []
