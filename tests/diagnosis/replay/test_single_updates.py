"""Rules on how single tensors are written, at their bounds, on either side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.updates import (
    far_from,
    frozen,
    goes_one_way,
    severity_of_frozen,
    stagnation_expected,
    stuck,
    stuck_finding,
)
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.run_facts import UpdateFacts
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.evidence.trace import StateVsFp32
from tests.diagnosis.test_silent_rules import FED, held

STEPS = 4
STILL = replace(
    FED, name="norm.weight", moved=0, update=0.0, expected=0.5, below_half_ulp=FED.meant_to_move, course=(0.4, -0.3)
)
"""A fifth of the squared gradient of a step that has `FED` beside it."""
SCALE = replace(STILL, name="scale", expected=1e-2, looked_at=1, meant_to_move=1, below_half_ulp=1, course=(0.3,))
LONG = replace(FED, name="fc.bias", update=3.0, expected_update=1.0, rounding=0.1)
COUNT = StateVsFp32(
    name="optimizer:fc.weight.count",
    kind="counter",
    dtype="float16",
    looked_at=1,
    moved=0,
    meant_to_move=1,
    value=2048.0,
    course=(1.0,),
)
MEAN = replace(COUNT, name="norm.running_mean", kind="buffer", looked_at=3, meant_to_move=3, course=(0.2, 0.1, -0.3))


def parameters(*beside, steps=STEPS):
    return [held(step, FED, *beside) for step in range(steps)]


def states(*each):
    return [replace(held(step), states=(state,)) for step, state in enumerate(each)]


def far(*each):
    since, runs = far_from([held(step, parameter) for step, parameter in enumerate(each)], DEFAULT_THRESHOLDS)
    return since, [run[0].name for run in runs]


def test_a_state_of_one_element_needs_six_signs_that_are_alike_or_moves_that_are_the_same():
    pushed = [replace(MEAN, looked_at=1, meant_to_move=1, course=(0.1 + 0.01 * step,)) for step in range(6)]
    assert [state.name for state in stuck(states(*pushed))[1]] == ["norm.running_mean"]
    assert stuck(states(*pushed[:5]))[1] == ()
    assert [p.name for p in frozen(parameters(SCALE, steps=3))] == ["scale"]


@pytest.mark.parametrize(
    "healthy",
    [
        replace(STILL, moved=1),
        replace(STILL, gradient=0.0),  # starved
        replace(STILL, meant_to_move=0, below_half_ulp=0),  # frozen by choice, or at rest in fp32 too
        replace(STILL, below_half_ulp=0),  # an update that would not round away: something has made it zero
        replace(STILL, expected=1e-3),  # a millionth of the squared gradient
    ],
)
def test_what_moves_or_has_another_cause_or_does_not_count_is_not_frozen(healthy):
    assert frozen(parameters(healthy)) == ()


def test_to_and_fro_is_rest():
    there, back = STILL, replace(STILL, course=(-0.4, 0.3))
    assert frozen([held(step, FED, there if step % 2 else back) for step in range(STEPS)]) == ()
    assert not goes_one_way([MEAN, replace(MEAN, course=(-0.2, -0.1, 0.3)), MEAN])
    assert goes_one_way([MEAN, MEAN, replace(MEAN, course=(0.1, 0.2, -0.1))])


def test_a_number_of_its_own_is_an_error_and_gains_only_with_a_large_share():
    six = parameters(STILL, SCALE, steps=6)
    assert severity_of_frozen(six, [SCALE], DEFAULT_THRESHOLDS) == "error"
    assert severity_of_frozen(six, [STILL], DEFAULT_THRESHOLDS) == "error"
    small = replace(STILL, expected=0.2)
    assert severity_of_frozen(parameters(small), [small], DEFAULT_THRESHOLDS) == "note"


def test_a_step_is_wrong_where_it_is_long_or_short_to_the_end():
    assert far(LONG, LONG, LONG) == (0, ["fc.bias"])
    assert far(*[replace(LONG, update=0.4)] * 3) == (0, ["fc.bias"])
    assert far(FED, LONG, LONG, LONG) == (1, ["fc.bias"])  # without a gradient before
    assert far(replace(LONG, update=1.0), LONG, LONG, LONG) == (1, ["fc.bias"])
    assert far(LONG, LONG, LONG, replace(LONG, update=1.0))[1] == []
    assert far(LONG) == (0, ["fc.bias"])
    assert far(replace(LONG, update=1.0), replace(LONG, update=1.0), LONG)[1] == []


@pytest.mark.parametrize(
    "healthy",
    [
        replace(LONG, update=1.9),
        replace(LONG, rounding=0.5),  # the weight's own
        replace(LONG, error=0.6 * LONG.expected),  # the gradient is wrong
        replace(LONG, moved=0, update=0.0),  # frozen
        replace(LONG, expected_update=0.0),
    ],
)
def test_rounding_and_a_wrong_gradient_are_no_wrong_step(healthy):
    assert far(*[healthy] * 3)[1] == []


def test_a_count_that_has_come_to_its_end_is_stuck_since_then():
    since, found = stuck(states(replace(COUNT, moved=1, value=2047.0), *[COUNT] * 4))
    assert (since, [state.name for state in found]) == (1, ["optimizer:fc.weight.count"])
    finding = stuck_finding(states(*[COUNT] * 4), 1, found, Where(step=1, phase="optimizer", op="aten.add_"))
    assert (finding.code, finding.severity, finding.where.module) == ("AMP508", "error", "fc")
    assert finding.evidence["steps"] == [1, 2, 3]


def test_a_moment_may_be_at_rest_and_a_mean_that_is_pushed_one_way_is_not():
    assert stuck(states(*[replace(COUNT, course=(0.1 * at,)) for at in range(1, 7)]))[1] == ()
    assert [state.name for state in stuck(states(MEAN, MEAN, MEAN, MEAN))[1]] == ["norm.running_mean"]
    turned = replace(MEAN, course=tuple(-move for move in MEAN.course))
    assert stuck(states(MEAN, turned, MEAN, turned))[1] == ()


def update(name="fc.weight", *, lost=0.95, stagnant=0.95, size=1.0, optimizer="torch.optim.adamw.AdamW", **fields):
    given = {"steps": 1, "elements": 100, "updated": 1.0, "log2_ratio": -11.0, **fields}
    return UpdateFacts(name=name, optimizer=optimizer, lost=lost, stagnant=stagnant, size=size, **given)


def test_updates_that_are_lost_are_amp501_at_the_module_that_holds_them():
    finding = stagnation_expected([update("block.fc.weight"), update("block.fc.bias"), update("block.out.weight")])
    assert (finding.code, finding.severity, finding.cause) == ("AMP501", "error", "optimizer_precision")
    assert finding.where.module == "block"
    assert finding.where.step is None
    assert "95% of the weights that move in fp32 stay" in finding.message
    assert finding.evidence["moved"] == 300
    assert finding.prescription.status == "not_run"


@pytest.mark.parametrize(
    "sound",
    [
        [update(lost=0.7)],
        [update(stagnant=0.7)],
        [update(), update("out.weight", lost=0.1, stagnant=0.1, size=10.0)],
        [update(optimizer="torchao.optim.adam._AdamW")],
        [update(updated=0.0, lost=0.0, stagnant=0.0, size=0.0)],
        [],
    ],
)
def test_nothing_is_said_of_updates_that_mostly_arrive_or_of_optimizers_that_may_keep_what_is_lost(sound):
    assert stagnation_expected(sound) is None
