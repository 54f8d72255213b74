"""Rules on steps: each catches a sick run at its step, and says nothing of the healthy ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import LookLine, RunLine
from ampdoctor.evidence.report import Finding
from tests.diagnosis.health.lines import judged, steps

BAD = 400
"""The step at which a sick run falls sick."""


def codes(findings, least=("error", "warning", "note")):
    return [(f.code, f.where.step) for f in findings if f.severity in least]


def jump(at, value):
    return value * 20 if at == BAD else value


def test_a_jump_of_the_gradient_is_told_at_its_step_and_once():
    (found,) = judged(steps(gradient_norm=jump))
    assert (found.code, found.severity, found.where.step) == ("AMP720", "warning", BAD)
    assert found.evidence["first"] == "gradient"
    assert found.evidence["value"] / found.evidence["usual"] == pytest.approx(20, rel=0.5)


def test_where_loss_and_gradient_jump_together_both_moved_first():
    (found,) = judged(steps(gradient_norm=jump, loss=jump))
    assert (found.code, found.evidence["first"]) == ("AMP720", "both")
    assert "look at the batch" in found.message


def grows(at, value):
    return value * 1.02 ** max(0, at - BAD)


@pytest.mark.parametrize("norm", [grows, lambda _, value: value], ids=["the norm grows too", "the norm stays"])
def test_a_loss_that_grows_is_no_proof_of_the_data(norm):
    findings = judged(steps(600, loss=grows, gradient_norm=norm))
    assert {f.code for f in findings} >= {"AMP721", "AMP724", "AMP739"}
    assert {f.evidence["first"] for f in findings} <= {"loss", "both"}


def test_a_loss_that_stays_up_is_an_error_and_one_that_returns_is_none():
    stays = judged(steps(gradient_norm=jump, loss=lambda at, value: value * (3 if at >= BAD else 1)))
    assert ("AMP721", "error") in [(f.code, f.severity) for f in stays]
    (error,) = [f for f in stays if f.code == "AMP721"]
    assert BAD + 15 <= error.where.step <= BAD + 25
    assert error.evidence["since"] == BAD
    ends = judged(steps(loss=lambda at, value: stays_up(at, value) if at <= error.where.step else None))
    assert "AMP721" in [f.code for f in ends]  # and a step without a loss says nothing of it
    returns = judged(steps(gradient_norm=jump, loss=lambda at, value: value * (3 if BAD <= at < BAD + 8 else 1)))
    assert "AMP721" not in [f.code for f in returns]


def test_a_gradient_that_rises_a_little_does_not_hide_a_loss_that_jumps():
    """The norm is far above the usual in deviations, but not beyond what its window has seen: the loss is."""
    seen = dict.fromkeys(range(0, BAD, 10), 1.6)
    findings = judged(steps(gradient_norm=lambda at, n: n * (5.0 if at == BAD else seen.get(at, 1)), loss=jump))
    assert [(f.code, f.where.step, f.evidence["what"]) for f in findings] == [("AMP720", BAD, "loss")]


def stays_up(at, value):
    return value * 3 if at >= BAD else value


@pytest.mark.parametrize(
    "setting",
    [
        {"learning_rates": lambda at, _: (1e-1 if at >= BAD else 1e-3,)},  # ten times above all before: no restart
        {"weight_decays": lambda at, _: (10.0 if at >= BAD else 0.01,)},
    ],
    ids=["rate", "decay"],
)
def test_a_loss_that_leaps_with_a_setting_is_the_optimizers(setting):
    findings = judged(steps(loss=stays_up, **setting))
    assert {(f.code, f.evidence["first"]) for f in findings} >= {("AMP729", "optimizer"), ("AMP721", "optimizer")}


@pytest.mark.parametrize("fall", [100, BAD - 10])
def test_one_fall_of_the_scale_moves_nothing_first(fall):
    findings = judged(steps(loss=stays_up, gradient_norm=jump, **scale([fall])))
    assert {f.evidence["first"] for f in findings if f.code in {"AMP720", "AMP721"}} == {"both"}


def rots(at, value):
    """A loss that goes back up by a thousandth of itself a step: no step is out of the usual."""
    return value * 1.004 ** max(0, at - BAD)


def test_a_loss_that_creeps_back_to_where_it_began_is_told_once():
    findings = [f for f in judged(steps(900, loss=rots)) if f.code == "AMP739"]
    assert [(f.severity, f.evidence["first"]) for f in findings] == [("warning", "loss")]
    assert findings[0].evidence["share"] >= 0.5


def of_returns(at, _):
    """The loss of a value function that learns of returns which grow, as cart-pole's do: up, and never down."""
    rng = np.random.default_rng(at)
    return float((30 + 25 * min(at, 150) / 150) * math.exp(rng.normal(0, 0.04)) * (1.25 if 40 <= at < 80 else 1))


def test_a_training_that_goes_on_has_fallen_before_its_log_begins():
    lines = [replace(line, step=line.step + 31_000) for line in steps(loss=lambda at, v: stays_up(at, v / v))]
    assert "AMP721" in [f.code for f in judged(lines)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_taken_with_a_gradient_that_is_not_finite(value):
    findings = judged(steps(gradient_norm=lambda at, norm: value if at == BAD else norm))
    assert [(f.code, f.severity, f.where.step) for f in findings] == [("AMP722", "error", BAD)]


def test_a_loss_that_is_not_finite_is_the_forwards_and_of_a_finite_one_the_gradients():
    def ill(at, value):
        return math.nan if at == BAD else value

    (both,) = judged(steps(loss=ill, gradient_norm=ill))
    assert both.evidence["first"] == "forward"
    assert "of its batch or its weights" in both.message
    (alone,) = judged(steps(gradient_norm=ill))
    assert alone.evidence["first"] == "gradient"


def scale(falls):
    """A scale that is halved at these steps, each of which is skipped."""
    return {
        "loss_scale": lambda at, _: 65536.0 * 0.5 ** sum(at > fall for fall in falls),
        "skipped": lambda at, _: at in falls,
    }


def test_a_scale_that_ratchets():
    findings = judged(steps(**scale([100, 200, 300, BAD])))
    assert [(f.code, f.severity, f.where.step) for f in findings] == [("AMP723", "warning", BAD + 1)]
    assert findings[0].evidence["falls"] == 4


@pytest.mark.parametrize(
    ("phase", "ago", "first"),
    [("forward", 0, "forward"), ("data", 0, "data"), ("backward", 0, "scale"), ("forward", 100, "scale")],
)
def test_what_a_look_has_found_at_the_first_overflow_moved_before_the_scale(phase, ago, first):
    lines, at = steps(**scale(range(BAD, BAD + 20))), BAD - ago
    where = Where(step=0, phase=phase, nonfinite="inf")
    born = Finding(code="AMP201", name="x", severity="error", message="Is.", where=where)
    look = LookLine(step=at, verdict="sick", findings=(born,))
    findings = judged([*lines[: at + 1], look, *lines[at + 1 :]])
    assert {(f.code, f.evidence["first"]) for f in findings} == {("AMP723", first)}


def test_a_scale_that_settles_at_the_start_and_one_that_probes_its_limit():
    assert judged(steps(**scale([0, 1, 2, 3, 4, 5]))) == []
    period = 200  # grows, overflows at once, falls

    def now(at, _):
        return 2048.0 if at % period == 0 and at else 1024.0

    assert judged(steps(2000, loss_scale=now, skipped=lambda at, _: at % period == 0 and at > 0)) == []


@pytest.mark.parametrize(("falls", "worst"), [(19, {"warning"}), (20, {"warning", "error"})])
def test_a_scale_four_falls_below_one_is_an_error_although_every_other_step_is_taken(falls, worst):
    findings = judged(steps(**scale(range(BAD, BAD + 2 * falls, 2))))
    assert {(f.code, f.severity) for f in findings} == {("AMP723", severity) for severity in worst}


def at_floor(skipped_for, floor=64.0):
    """A scale that falls from 65536 to its floor over as many skipped steps, and lies there for those that are left."""
    skipped = range(BAD, BAD + skipped_for)
    return {
        "loss_scale": lambda at, _: max(65536.0 * 0.5 ** sum(at > fall for fall in skipped), floor),
        "skipped": lambda at, _: at in skipped,
    }


@pytest.mark.parametrize(("skipped_for", "severity"), [(40, "error"), (14, "warning")])
def test_a_scale_at_its_floor_where_no_step_is_taken_is_an_error(skipped_for, severity):
    last = judged(steps(**at_floor(skipped_for)))[-1]
    assert (last.code, last.severity) == ("AMP723", severity)
    assert ("no step is taken any more" in last.message) == (severity == "error")


def climbing(at, value):
    return value * math.exp(0.06 * max(0, at - BAD))


def test_a_norm_that_climbs():
    findings = judged(steps(gradient_norm=climbing))
    assert findings[0].code == "AMP724"
    assert "In robust deviations over up to 16 steps: loss " in findings[0].message
    assert BAD < findings[0].where.step < BAD + 100


def test_a_learning_rate_of_a_group_that_jumps():
    (finding,) = judged(steps(learning_rates=lambda at, _: (1e-3, 1e-2 if at >= BAD else 1e-3)))
    assert (finding.code, finding.where.step, finding.evidence["group"]) == ("AMP729", BAD, 1)
    assert finding.evidence["first"] == "optimizer"


@pytest.mark.parametrize(("before", "now"), [(0.01, 0.1), (0.01, -0.01), (0.0, 0.01)])
def test_a_weight_decay_that_jumps(before, now):
    lines = steps(weight_decays=lambda at, _: (0.0, now if at >= BAD else before))
    judge = Judge()
    judge.add(RunLine(name="made-up", tensors=("w", "b", "g"), optimizers=("AdamW",), groups=(((0, 1), (2,)),)))
    (finding,) = [found for line in lines for found in judge.add(line)]
    assert (finding.code, finding.where.step, finding.where.tensor) == ("AMP729", BAD, "g")
    assert (finding.evidence["what"], finding.evidence["group"]) == ("weight_decay", 1)
    assert "parameter group 1 (g)" in finding.message


TAILS = np.random.default_rng(3).standard_t(6, size=4000)
SLOWER = {"seconds": lambda at, value: value * (4 if at >= BAD else 1)}
LEFT_ALONE = {
    **{f"a quiet run {seed}": (2000, {"seed": seed}) for seed in range(3)},
    "a loss that gives back a fifth": (900, {"loss": lambda at, v: v + 0.4 * min(max(at - BAD, 0) / 400, 1)}),
    "a loss that stands": (2000, {"loss": lambda at, _: 2.0 + 0.01 * math.sin(at)}),
    "a loss that falls": (2000, {"loss": lambda at, _: 5.0 * math.exp(-at / 3000)}),
    "a loss that falls at once": (600, {"loss": lambda at, value: value * (0.3 if at >= BAD else 1)}),
    "a negative loss": (2000, {"loss": lambda at, value: value - 2.0}),
    "a norm that climbs in a warm-up": (
        600,
        {"gradient_norm": climbing, "learning_rates": lambda at, _: (1e-3 * min(1, (at + 1) / 600),)},
    ),
    "a decay that follows a schedule": (600, {"weight_decays": lambda at, _: (0.04 + 0.36 * at / 600,)}),
    "a decay that becomes smaller": (600, {"weight_decays": lambda at, _: (0.0 if at >= BAD else 0.1,)}),
    "a group that is unfrozen": (600, {"learning_rates": lambda at, _: (1e-3, 1e-3 if at >= BAD else 0.0)}),
    "a group that is added": (600, {"learning_rates": lambda at, _: (1e-4, 1e-2) if at >= BAD else (1e-4,)}),
    "a cosine with restarts": (
        1000,
        {"learning_rates": lambda at, _: (1e-3 * (1 + math.cos(math.pi * (at % 200) / 200)) / 2 + 1e-6,)},
    ),
    "larger batches": (1200, SLOWER | {"batch_elements": lambda at, value: value * 4 if at >= BAD else value}),
    "more micro-steps": (1200, SLOWER | {"micro_steps": lambda at, value: value * 4 if at >= BAD else value}),
}
NOTES_AT_MOST = {
    "heavy tails": (4000, {"gradient_norm": lambda at, value: float(value * math.exp(0.3 * TAILS[at]))}),
    # a policy that is solved has no gradient, but for an episode that fails
    "a norm that has all but gone": (
        600,
        {"gradient_norm": lambda at, n: n if at < 200 else 1e-7 * n * (2000 if 450 <= at < 470 else 1)},
    ),
    "a loss that has never fallen": (320, {"loss": of_returns}),
    "a loss that has never fallen, for longer": (1200, {"loss": of_returns}),
    "a norm that rises while the loss falls": (
        500,
        {"loss": lambda at, value: value * math.exp(-0.05 * max(0, at - BAD)), "gradient_norm": climbing},
    ),
}


@pytest.mark.parametrize("run", LEFT_ALONE)
def test_healthy_runs_are_left_alone(run):
    count, changes = LEFT_ALONE[run]
    assert judged(steps(count, **changes)) == []


@pytest.mark.parametrize("run", NOTES_AT_MOST)
def test_what_looks_odd_in_health_is_no_alarm(run):
    count, changes = NOTES_AT_MOST[run]
    assert codes(judged(steps(count, **changes)), ("error", "warning")) == []


@pytest.mark.parametrize(
    ("code", "count", "changes"),
    [
        ("AMP721", 1200, {"loss": lambda at, v: of_returns(at, v) * (3 if at >= 900 else 1)}),  # as never before
        ("AMP721", 600, {"loss": lambda at, value: value - 2.0 + (5 if at >= BAD else 0)}),
        ("AMP730", 600, {"memory_bytes": lambda at, _: int(1e9 * (1 + max(0, at - 300) / 300))}),
    ],
)
def test_what_rises_as_never_before_is_told(code, count, changes):
    assert code in [f.code for f in judged(steps(count, **changes))]


def test_what_two_optimizers_win_and_lose_is_told_later():
    """A critic's loss climbs while its generator learns; the same climb of a training of one is told."""

    def won(at, value):
        return value * math.exp(0.02 * min(max(0, at - BAD), 10))

    alone = judged(steps(loss=won))
    assert "AMP724" in [f.code for f in alone]
    other = steps(optimizer=lambda at, _: 1)
    assert judged([line for pair in zip(steps(loss=won), other, strict=True) for line in pair]) == []


def test_steps_that_slow_down_are_a_note():
    findings = judged(steps(**SLOWER))
    assert [(f.code, f.severity, f.evidence["first"]) for f in findings] == [("AMP730", "note", "hardware")]
    waits = judged(steps(**SLOWER, data_seconds=lambda at, _: 0.25 if at >= BAD else 0.01))
    assert [(f.code, f.evidence["first"]) for f in waits] == [("AMP730", "data")]


def test_after_a_rollback_the_past_is_not_this_runs():
    judge = Judge()
    first, again = steps(300), steps(300, seed=1, gradient_norm=lambda at, value: value * 50)
    assert [f for line in first + again for f in judge.add(line)] == []


def test_two_optimizers_are_judged_apart_and_named():
    other = steps(gradient_norm=jump, optimizer=lambda at, _: 1)
    both = [line for pair in zip(steps(), other, strict=True) for line in pair]
    (found,) = judged(both)
    assert found.evidence["optimizer"] == "1"
