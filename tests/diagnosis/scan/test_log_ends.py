"""How a log ends: gradients that are zero, with what a checkpoint shows of the cause; and a scale that settles."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.diagnosis.scan.scaler import explained_zeros
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogTail, ScalerState
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from tests.diagnosis.summaries import tensor
from tests.pairwise import THOROUGH

NAN, INF = math.nan, math.inf


def run(steps=200, every=1, seed=0):
    """A healthy run: a falling loss and a noisy norm."""
    rng = random.Random(seed)
    return [
        StepLine(
            step=s,
            loss=2.5 * math.exp(-s / 500) + rng.gauss(0, 0.1),
            gradient_norm=math.exp(rng.gauss(0, 0.4)),
            learning_rates=(1e-3,),
        )
        for s in range(every, steps + 1, every)
    ]


def replaced(log, at, **changes):
    """The log with other values in the lines of these steps."""
    return [
        replace(one, **{k: v(one) if callable(v) else v for k, v in changes.items()}) if one.step in at else one
        for one in log
    ]


def line(step, loss=None, norm=None, scale=None):
    return StepLine(step=step, loss=loss, gradient_norm=norm, loss_scale=scale)


def judged(log, thresholds=DEFAULT_THRESHOLDS):
    judge = Judge(thresholds)
    return [*(one for said in log for one in judge.add(said)), *judge.ends()]


def found(log):
    return [(f.code, f.severity) for f in judged(log)]


def explained(log, *, scale=None, dtype="float32", thresholds=DEFAULT_THRESHOLDS):
    """The log's one finding of AMP702, beside a checkpoint of a large matrix."""
    (finding,) = [one for one in judged(log, thresholds) if one.code == "AMP702"]
    norms = [one.gradient_norm for one in log if 0 < (one.gradient_norm or 0) < INF]
    summary = CheckpointSummary(
        format="folder",
        tensors=(tensor("fc.weight", dtype=dtype, shape=(1 << 10, 1 << 10), examined=1 << 20),),
        scalers=() if scale is None else (ScalerState(scale=scale, growth_tracker=5),),
        log=LogTail(norms=tuple(norms[-10:])),
    )
    return explained_zeros(finding, summary, thresholds)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else THOROUGH) for seed in range(20)])
def test_a_healthy_run_is_left_alone(seed):
    assert found(run(seed=seed)) == found(run(2000, 10, seed=seed)) == []


VANISHED = replaced(run(2000, 20), range(1000, 2001), gradient_norm=0.0, loss=lambda one: 0.3 + one.step % 7 / 50)
STUCK = replaced(run(), range(150, 201), loss=math.log(10))


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
    finding = explained(VANISHED, **changes)
    assert (finding.severity, finding.cause, finding.where.step) == ("error", cause, 1000)
    assert (finding.prescription and finding.prescription.kind) == kind
    assert words in finding.message
    assert "from step 1,000 to 2,000" in finding.message


def test_a_scale_that_is_too_small_for_tiny_gradients_is_named_with_a_larger_one():
    log = [replace(one, gradient_norm=(one.gradient_norm or 0) * 1e-5) for one in VANISHED]  # elements of 1e-8
    finding = explained(log, scale=1.0)
    assert (finding.cause, finding.prescription.kind) == ("grad_underflow", "init_scale")
    assert finding.prescription.value * finding.evidence["typical_gradient_before"] >= 2.0**-15
    finding = explained(log, dtype="float16")
    assert (finding.severity, finding.cause, finding.prescription.kind) == ("error", "grad_underflow", "scaler")
    assert "no loss scaler" in finding.message


def test_a_scale_below_1_in_the_log_alone_is_the_cause():
    (finding,) = [f for f in judged([replace(one, loss_scale=2.0**-20) for one in VANISHED]) if f.code == "AMP702"]
    assert (finding.severity, finding.cause) == ("error", "scaler_collapse")


def test_where_zero_norms_are_no_alarm():
    assert found(replaced(run(), range(199, 201), gradient_norm=0.0)) == []
    assert found(replaced(run(), range(50, 60), gradient_norm=0.0)) == []
    assert ("AMP702", "note") in found(replaced(run(), range(150, 201), gradient_norm=0.0, loss=0.0))


def test_coarse_norms_alone_are_no_error():
    coarse = [replace(one, gradient_norm=round(one.gradient_norm, 4)) for one in VANISHED]
    assert found(coarse) == [("AMP702", "warning")]
    assert explained(coarse, scale=2.0**-20).severity == "error"


@pytest.mark.parametrize("norm", [NAN, INF, 0.0])
def test_norms_that_were_never_measured_are_no_alarm_while_the_loss_falls(norm):
    assert found([line(s, 3 - s / 100, norm) for s in range(100)]) == []
    apart = [line(s, None if s % 2 else 9 - s / 50, norm if s % 2 else None) for s in range(200)]
    assert "error" not in [severity for _, severity in found(apart)]


def test_norms_that_go_while_the_loss_falls_are_a_note():
    assert found([line(s, 3 - s / 100, 0.0 if s > 100 else 0.5) for s in range(200)]) == [("AMP702", "note")]


def test_a_fall_by_momentum_alone_is_no_recovery():
    coasting = [line(s, 1 + 0.9 ** min(s - 100, 60) if s > 100 else 2.0, 0.0 if s > 100 else 0.51) for s in range(200)]
    assert [kind for kind in found(coasting) if kind[0] == "AMP702"] == [("AMP702", "warning")]


def test_a_constant_loss():
    assert found(STUCK) == [("AMP705", "warning")]
    assert found(replaced(STUCK, range(150, 201), learning_rates=(0.0,))) == []
    assert found([replace(one, loss=round(one.loss, 4)) for one in STUCK]) == [("AMP705", "note")]
    assert found(replaced(run(), range(195, 201), loss=2.0)) == []
    assert found(replaced(run(), range(150, 201), loss=0.0)) == []


def test_losses_whose_squares_are_no_numbers():
    assert found([line(s, 1e300 * (60 - s), 0.0) for s in range(60)]) == []  # norms that were never measured


def simulated(steps, limit, *, interval=2000, hysteresis=1, scale=2.0**16, fresh_at=None):
    """A scaler's own arithmetic against the largest scale that each step bears; DeepSpeed's hysteresis is 2."""
    start, tracker, lives, log = scale, 0, hysteresis, []
    for step in range(steps):
        if step == fresh_at:
            scale, tracker, lives = start, 0, hysteresis
        log.append(line(step, 2.0 + step % 7 / 10, 1.0 + step % 5 / 10, scale))
        if scale > limit(step):
            tracker, lives = 0, lives - 1
            scale = scale / 2 if lives <= 0 else scale
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker, lives = scale * 2, 0, hysteresis
    return log


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 1 else THOROUGH) for seed in range(6)])
@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize(
    "changes",
    [
        {"hysteresis": 2, "scale": 2.0**32, "interval": 1000},
        {"scale": 2.0**24},
        {"fresh_at": 1500, "interval": 50},
        {"interval": 20},
        {"interval": 100, "hysteresis": 2},
    ],
)
def test_a_working_scaler_is_left_alone_at_its_start_and_after_a_fresh_resume(seed, every, changes):
    rng = random.Random(seed)
    log = simulated(rng.randint(300, 3000), lambda _: 2 ** rng.gauss(9, 0.7), **changes)[::every]
    judge = Judge()
    told = [*(one for said in log for one in judge.add(said)), *judge.ends()]
    assert [one.code for one in told if one.severity == "error" or not judge.is_over(one)] == []


@pytest.mark.parametrize("every_binade", [90, 20, 12])
def test_a_fall_with_rests_is_no_first_descent(every_binade):
    log = [line(s, 2.0 + s % 7 / 10, 1.0, 2.0 ** max(16 - s // every_binade, 1)) for s in range(1500)]
    assert ("AMP723", "warning") in found(log)


def test_a_collapsed_scaler_whose_growth_factor_is_no_number():
    scaler = ScalerState(scale=0.25, growth_factor=NAN)
    summary = CheckpointSummary(format="folder", tensors=(tensor(),), scalers=(scaler,))
    assert {"AMP402", "AMP404"} <= {f.code for f in judge(summary)}
