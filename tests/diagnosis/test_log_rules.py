"""Rules on the training log beside a checkpoint."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ampdoctor.diagnosis.checkpoint_rules import diagnose
from ampdoctor.diagnosis.scale_history import equilibrium
from ampdoctor.evidence.checkpoint import CheckpointSummary, LogEntry, ScalerState, TensorSummary
from ampdoctor.evidence.optimizer import OptimizerSummary

NAN, INF = math.nan, math.inf


def entry(step, loss=None, norm=None, scale=None, rate=None) -> LogEntry:
    return LogEntry(step=step, loss=loss, grad_norm=norm, scale=scale, learning_rate=rate)


def run(steps=200, every=1, seed=0) -> list[LogEntry]:
    """A healthy run: a falling loss and a noisy norm."""
    rng = random.Random(seed)
    return [
        entry(s, 2.5 * math.exp(-s / 500) + rng.gauss(0, 0.1), math.exp(rng.gauss(0, 0.4)), rate=1e-3)
        for s in range(every, steps + 1, every)
    ]


def weights(dtype="float32", elements=1 << 20) -> TensorSummary:
    return TensorSummary(
        name="fc.weight",
        role="weight",
        entry="weight",
        module="fc",
        group="",
        file="c.pt",
        dtype=dtype,
        shape=(1 << 10, 1 << 10),
        examined=elements,
        counted=elements,
        zeros=0,
        nans=0,
        pos_infs=0,
        neg_infs=0,
        amax=0.1,
        amin=1e-4,
    )


def diagnosed(log, *, scale=None, dtype="float32", **changes):
    scalers = () if scale is None else (ScalerState(scale=scale, growth_tracker=5),)
    values = {"format": "folder", "tensors": (weights(dtype),), "scalers": scalers, "log": tuple(log)}
    return diagnose(CheckpointSummary(**(values | changes)))


def found(log, **changes) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in diagnosed(log, **changes) if f.code.startswith("AMP7")]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_left_alone(seed):
    assert found(run(seed=seed)) == found(run(2000, 10, seed=seed), scale=1024.0) == []


def replaced(log, at, **changes):
    """The log with other values in the entries of these steps."""
    made = []
    for one in log:
        values = {k: v(one) if callable(v) else v for k, v in changes.items()} if one.step in at else {}
        made.append(
            entry(
                one.step,
                values.get("loss", one.loss),
                values.get("norm", one.grad_norm),
                values.get("scale", one.scale),
                values.get("rate", one.learning_rate),
            )
        )
    return made


@pytest.mark.parametrize(
    ("changes", "scale", "severity"),
    [
        ({"at": range(150, 201), "loss": NAN}, None, "error"),
        ({"at": range(150, 201), "loss": INF}, 1024.0, "error"),
        ({"at": range(150, 201), "loss": 0.0, "norm": NAN}, 1024.0, "error"),  # what the Trainer writes
        ({"at": [200], "loss": NAN, "norm": NAN}, None, "error"),
        ({"at": [200], "loss": NAN, "norm": NAN}, 1024.0, "warning"),
        ({"at": [100], "loss": NAN, "norm": NAN}, 1024.0, "note"),
    ],
)
def test_a_lost_loss(changes, scale, severity):
    log = replaced(run(), **changes)
    assert found(log, scale=scale) == [("AMP701", severity)]
    (finding,) = [f for f in diagnosed(log, scale=scale) if f.code == "AMP701"]
    assert finding.evidence["first_step"] == finding.where.global_step == changes["at"][0]


def test_a_loss_of_zero_with_a_finite_norm_is_a_loss_of_zero():
    assert found(replaced(run(), range(100, 201), loss=0.0)) == []


def test_the_loss_saved_with_the_weights_counts_where_there_is_no_log():
    assert found([entry(70, NAN)]) == [("AMP701", "error")]
    assert found([entry(70, 0.3)]) == []


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (range(150, 201), [("AMP703", "error")]),
        (range(196, 201), [("AMP703", "warning")]),
        ([199, 200], []),
        ([50, 90, 91, 130], []),  # skipped steps
    ],
)
def test_norms_that_are_not_finite(at, expected):
    assert found(replaced(run(), at, norm=INF), scale=1024.0) == expected


def test_a_scale_on_its_first_way_down_is_health():
    log = [entry(s, 2.5 + s / 100, INF) for s in range(1, 21)]
    assert found(log, scale=1024.0) == []
    assert found([entry(s, 2.5 + s / 100, INF) for s in range(1, 101)], scale=1024.0) == [("AMP703", "error")]


VANISHED = replaced(run(2000, 20), range(1000, 2001), norm=0.0, loss=lambda e: 0.3 + e.step % 7 / 50)


@pytest.mark.parametrize(
    ("changes", "cause", "kind", "words"),
    [
        ({"scale": 2.0**-20}, "scaler_collapse", "scaler", "collapsed to 2^-20"),
        ({"scale": 2.0**-30}, "scaler_collapse", "scaler", "gradients up to 32 become zero"),
        ({"dtype": "float16"}, None, None, "leaves no trace"),
        ({"scale": 1024.0}, None, None, "does not explain it"),
        ({"scale": 2.0**-3}, None, None, "does not explain it"),  # gradients of 1e-3, and 2.4e-7 flushes
        ({}, None, None, "leaves no trace"),
    ],
)
def test_gradients_that_vanish_are_one_finding_with_step_and_cause(changes, cause, kind, words):
    (finding,) = [f for f in diagnosed(VANISHED, **changes) if f.code == "AMP702"]
    assert (finding.severity, finding.cause, finding.where.global_step) == ("error", cause, 1000)
    assert (finding.prescription and finding.prescription.kind) == kind
    assert words in finding.message
    assert "from step 1000 to 2000" in finding.message


def test_a_scale_that_is_too_small_for_tiny_gradients_is_named_with_a_larger_one():
    log = [entry(e.step, e.loss, (e.grad_norm or 0) * 1e-5) for e in VANISHED]  # elements of 1e-8
    (finding,) = [f for f in diagnosed(log, scale=1.0) if f.code == "AMP702"]
    assert (finding.cause, finding.prescription.kind) == ("grad_underflow", "init_scale")
    assert finding.prescription.value * finding.evidence["typical_gradient_before"] >= 2.0**-15
    (finding,) = [f for f in diagnosed(log, dtype="float16") if f.code == "AMP702"]
    assert (finding.severity, finding.cause, finding.prescription.kind) == ("error", "grad_underflow", "scaler")
    assert "no loss scaler" in finding.message


def test_where_zero_norms_are_no_alarm():
    assert found(replaced(run(), range(199, 201), norm=0.0)) == []
    assert found(replaced(run(), range(50, 60), norm=0.0)) == []
    done = replaced(run(), range(150, 201), norm=0.0, loss=0.0)
    assert found(done) == [("AMP702", "note")]


def test_coarse_norms_alone_are_no_error():
    coarse = [entry(e.step, e.loss, round(e.grad_norm or 0, 4)) for e in VANISHED]
    assert found(coarse) == [("AMP702", "warning")]
    assert found(coarse, scale=2.0**-20) == [("AMP702", "error")]


@pytest.mark.parametrize("norm", [NAN, INF, 0.0])
def test_norms_that_were_never_measured_are_no_alarm_while_the_loss_falls(norm):
    falling = [entry(s, 3 - s / 100, norm) for s in range(100)]
    assert found(falling) == found(falling, scale=1024.0) == []
    if norm != INF:
        assert all(severity != "error" for _, severity in found([entry(s, 2 + s % 7 / 50, norm) for s in range(100)]))


def test_norms_that_go_while_the_loss_falls_are_a_note():
    for norm, code in ((0.0, "AMP702"), (NAN, "AMP703")):
        fallen = [entry(s, 3 - s / 100, norm if s > 100 else 0.5) for s in range(200)]
        assert found(fallen, scale=1024.0) == [(code, "note")]


def test_a_fall_by_momentum_alone_is_no_recovery():
    coasting = [entry(s, 1 + 0.9 ** min(s - 100, 60) if s > 100 else 2.0, 0.0 if s > 100 else 0.51) for s in range(200)]
    assert [kind for kind in found(coasting) if kind[0] == "AMP702"] == [("AMP702", "warning")]


def test_a_spike_is_a_note_and_a_warning_where_the_run_does_not_come_back():
    spiked = replaced(run(), [120], norm=300.0)
    assert found(spiked) == [("AMP704", "note")]
    lasting = replaced(spiked, range(121, 201), loss=lambda e: e.loss + 9.0)
    assert found(lasting) == [("AMP704", "warning")]
    assert found(replaced(run(), [120], norm=8.0)) == []


def test_a_constant_loss():
    stuck = replaced(run(), range(150, 201), loss=math.log(10))
    assert found(stuck) == [("AMP705", "warning")]
    assert found(replaced(stuck, range(150, 201), rate=0.0)) == []
    rounded = [entry(e.step, round(e.loss, 4), e.grad_norm) for e in stuck]
    assert found(rounded) == [("AMP705", "note")]
    assert found(replaced(run(), range(195, 201), loss=2.0)) == []
    assert found(replaced(run(), range(150, 201), loss=0.0)) == []


def scaled(scales, every=1):
    return [entry(every * (i + 1), 2.0 + i % 7 / 10, 1.0 + i % 5 / 10, s) for i, s in enumerate(scales)]


DESCENT = [2.0**k for k in range(16, 8, -1)]


def history(*exponents, hold=30):
    """A scale that stays a while at each of these powers of two."""
    return list(itertools.chain.from_iterable([2.0**k] * hold for k in exponents))


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
        (DESCENT + history(8, *range(7, -130, -1), hold=1000), [("AMP706", "error")]),
    ],
)
def test_the_history_of_a_scale(scales, expected):
    assert found(scaled(scales), scale=1024.0) == expected


def simulated(steps, limit, *, interval=2000, hysteresis=1, scale=2.0**16, fresh_at=None, every=1):
    """A scaler's own arithmetic against the largest scale that each step bears; DeepSpeed's hysteresis is 2."""
    start, tracker, lives, scales = scale, 0, hysteresis, []
    for step in range(steps):
        if step == fresh_at:
            scale, tracker, lives = start, 0, hysteresis
        scales.append(scale)
        if scale > limit(step):
            tracker, lives = 0, lives - 1
            scale = scale / 2 if lives <= 0 else scale
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker, lives = scale * 2, 0, hysteresis
    return scaled(scales)[::every]


@pytest.mark.parametrize("seed", range(6))
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


def test_a_scale_that_sinks_with_growths_in_between():
    rng = random.Random(0)
    log = simulated(1500, lambda _: math.inf if rng.random() > 0.15 else 0.0, interval=5)
    assert 2.0**-128 < log[-1].scale < 1
    assert [kind for kind in found(log) if kind[0] == "AMP706"] == [("AMP706", "warning")]


def test_no_equilibrium_is_stated_that_is_not_known():
    log = scaled(history(8, hold=150) + history(*range(7, 1, -1)))
    assert [code for code, _ in found(log)] == ["AMP706"]
    assert "AMP707" in [code for code, _ in found(log, scale=8.0)]


def test_a_collapse_in_the_log_prescribes_a_fresh_scaler():
    (finding,) = [f for f in diagnosed(scaled(history(3, 2, 1, 0, -1, hold=300))) if f.code == "AMP706"]
    assert (finding.cause, finding.prescription.kind) == ("scaler_collapse", "scaler")


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
    assert [f.code for f in diagnose(frequent)] == []
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


@pytest.mark.parametrize("seed", range(10))
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
