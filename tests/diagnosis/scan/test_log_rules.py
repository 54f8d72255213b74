"""Rules on the training log beside a checkpoint."""

from __future__ import annotations

import math

import pytest

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.diagnosis.scan.optimizer import length_at
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.log_records import StepLine
from tests.diagnosis.scan.logs import diagnosed, entry, found, run

NAN, INF = math.nan, math.inf


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
        (range(198, 201), [("AMP703", "warning")]),
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
        ({"scale": 2.0**-20}, "scaler_collapse", "dtype", "collapsed to 2^-20"),
        ({"scale": 2.0**-30}, "scaler_collapse", "dtype", "gradients up to 32 become zero"),
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


def heard(log):
    """The severities with which `health` speaks of jumps in the same log."""
    lines = [
        StepLine(step=e.step, loss=e.loss, gradient_norm=e.grad_norm, learning_rates=(e.learning_rate,)) for e in log
    ]
    judge = Judge()
    return [finding.severity for line in lines for finding in judge.hear(line) if finding.code == "AMP720"]


def test_a_spike_is_as_bad_as_health_calls_it():
    spiked = replaced(run(), [120], norm=300.0)
    assert found(spiked) == [("AMP704", "warning")]
    assert heard(spiked) == ["warning"]
    heavy = replaced(run(), [20, 45, 75, 95], norm=300.0)  # a norm that has been as far before
    heavy = replaced(heavy, [130], norm=350.0)
    assert (found(heavy), heard(heavy)) == ([("AMP704", "note")], [])
    assert found(replaced(run(), [120], norm=8.0)) == []


def test_a_spike_is_a_warning_where_the_run_does_not_come_back():
    early = replaced(run(), [25], norm=300.0)  # too early for anything to be usual
    assert (found(early), heard(early)) == ([("AMP704", "note")], [])
    lasting = replaced(early, range(26, 201), loss=lambda e: e.loss + 9.0)
    assert found(lasting) == [("AMP704", "warning")]


def test_a_constant_loss():
    stuck = replaced(run(), range(150, 201), loss=math.log(10))
    assert found(stuck) == [("AMP705", "warning")]
    assert found(replaced(stuck, range(150, 201), rate=0.0)) == []
    rounded = [entry(e.step, round(e.loss, 4), e.grad_norm) for e in stuck]
    assert found(rounded) == [("AMP705", "note")]
    assert found(replaced(run(), range(195, 201), loss=2.0)) == []
    assert found(replaced(run(), range(150, 201), loss=0.0)) == []


def test_losses_whose_squares_are_no_numbers():
    falls = [entry(s, 1e300 * (60 - s), 0.0) for s in range(60)]
    assert found(falls) == []  # norms that were never measured: it learns


def test_zero_norms_and_losses_in_rows_of_their_own():
    apart = [entry(s, None if s % 2 else 9 - s / 50, (0.0 if s > 100 else 1.0) if s % 2 else None) for s in range(200)]
    assert found(apart) == [("AMP702", "note")]


def test_a_collapsed_scaler_whose_growth_factor_is_no_number():
    scaler = ScalerState(scale=0.25, growth_factor=NAN)
    assert {"AMP402", "AMP404"} <= {f.code for f in diagnosed([], scalers=(scaler,))}


@pytest.mark.parametrize("count", [1e-30, 1e-300])
def test_a_step_counter_that_holds_whatever_was_in_memory(count):
    assert length_at(count, (0.9, 0.999)) > 1
    assert length_at(count, (0.0, 0.999)) > 0
