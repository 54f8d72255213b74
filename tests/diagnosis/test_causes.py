"""The ordered table of causes, row by row, and which origin is the one to name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.nonfinite import cause_of, culprits, departing, log2_over_limit, scale_may_cure
from ampdoctor.evidence.trace import NonFiniteReport, Operand, Recomputation, Trace
from tests.diagnosis.births import origin, stats

MAX = 65504.0
OVER, UNDER, NOWHERE = (True, 1e6, MAX), (True, 3.0, MAX), (False, 0.0, MAX)
HALF, SINGLE = (stats(),), (stats("float32"),)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"came_from": "param", "phase": "checkpoint"}, "bad_checkpoint"),
        ({"came_from": "data", "phase": "data"}, "bad_data"),
        ({"kernel": "aten._to_copy", "inputs": (stats("float32", name="batch.x"),), "verdict": OVER}, "bad_data"),
        ({"kernel": "aten._to_copy", "inputs": SINGLE, "verdict": OVER}, "forward_overflow"),
        (
            {"phase": "backward", "kernel": "aten._to_copy", "inputs": (stats(name="batch.x"),), "verdict": OVER},
            "backward_overflow",
        ),
        ({"kernel": "aten.mul", "inputs": (stats(name="batch.x"),), "verdict": OVER}, "forward_overflow"),
        ({"phase": "optimizer", "inputs": HALF, "nonfinite": "nan", "verdict": NOWHERE}, "optimizer_precision"),
        ({"phase": "optimizer", "inputs": SINGLE, "nonfinite": "nan", "verdict": NOWHERE}, "invalid_op"),
        ({"phase": "optimizer", "inputs": SINGLE, "verdict": OVER}, "optimizer_precision"),
        ({"verdict": NOWHERE, "nonfinite": "nan"}, "invalid_op"),
        ({"verdict": OVER}, "forward_overflow"),
        ({"verdict": (True, MAX * 1.01, MAX), "nonfinite": "nan"}, "forward_overflow"),
        ({"verdict": (True, MAX, MAX), "nonfinite": "nan"}, "kernel_defect"),
        ({"verdict": OVER, "phase": "backward"}, "backward_overflow"),
        ({"verdict": UNDER, "nonfinite": "nan"}, "kernel_defect"),
        ({"verdict": UNDER, "nonfinite": "nan", "operand": Operand(made_by="flushed_epsilon")}, "invalid_op"),
        ({"verdict": NOWHERE, "nonfinite": "nan", "operand": Operand(made_by="any")}, "kernel_defect"),
        ({"verdict": None, "nonfinite": "nan", "operand": Operand(made_by="unwritten")}, "kernel_defect"),
        ({"verdict": UNDER, "nonfinite": "inf"}, "forward_overflow"),
        ({"verdict": None, "nonfinite": "nan"}, "invalid_op"),
        ({"verdict": None, "nonfinite": "inf", "phase": "backward"}, "backward_overflow"),
    ],
)
def test_the_first_row_that_holds(given, cause):
    assert cause_of(origin(**given)) == cause


@pytest.mark.parametrize(
    ("finite", "amax", "overflow", "returns", "cause"),
    [
        (True, 3.0, True, None, "forward_overflow"),  # inside the op
        (False, 0.0, True, None, "forward_overflow"),
        (True, 3.0, False, None, "kernel_defect"),
        (False, 0.0, False, None, "invalid_op"),  # beyond float64
        (True, 3.0, True, False, "kernel_defect"),  # it does not come again on the same inputs
        (False, MAX * 4, True, False, "kernel_defect"),
    ],
)
def test_an_overflow_inside_the_op_and_what_does_not_come_again(finite, amax, overflow, returns, cause):
    verdict = Recomputation(finite=finite, amax=amax, limit=MAX, overflow=overflow, returns=returns)
    assert cause_of(replace(origin(nonfinite="nan"), recomputed=verdict)) == cause


PARTIAL = Recomputation(finite=True, amax=3.0, limit=MAX, overflow=True)


@pytest.mark.parametrize(
    ("affected", "verdict", "may"),
    [
        (("grad:w",), None, True),
        (("grad:w", "loss"), None, True),
        (("grad:w", "param:w"), None, False),
        (("output:fc",), None, False),
        (("grad:w",), PARTIAL, True),
        (("grad:w",), replace(PARTIAL, overflow=False), False),
    ],
)
def test_a_lower_scale_may_cure_gradients_and_a_loss_that_takes_them(affected, verdict, may):
    seen = NonFiniteReport(affected=affected, outputs=(), output_grads=())
    made = origin("backward", verdict=OVER)
    made = made if verdict is None else replace(origin("backward", nonfinite="nan"), recomputed=verdict)
    assert scale_may_cure((made,), seen) is may


def trace(*origins):
    return Trace(step=0, ops=9, origins=origins)


def test_what_was_there_before_the_step_is_blamed_first_and_a_constant_last():
    op, given = origin(order=1), origin(order=-1, came_from="data", phase="data")
    assert culprits(trace(op, given))[0] is given
    constant, later = origin(order=1, came_from="constant"), origin(order=5)
    assert culprits(trace(constant, later)) == (later,)
    assert culprits(trace(constant)) == (constant,)
    assert culprits(trace()) == ()


@pytest.mark.parametrize(("departs", "is_sick"), [(0.0, False), (1 / 16, False), (0.07, True), (1.0, True)])
def test_a_finite_value_far_from_what_it_should_be(departs, is_sick):
    silent = origin(affected=(), departs=departs)
    assert departing(trace(silent)) == ((silent,) if is_sick else ())
    assert departing(trace(origin(departs=1.0))) == (), "what harms is no silent origin"


@pytest.mark.parametrize(
    ("verdict", "binades"),
    [((True, 4 * MAX, MAX), 2.0), ((True, MAX, MAX), None), (NOWHERE, None), (None, None), ((True, 1.0, 0.0), None)],
)
def test_binades_beyond_the_format(verdict, binades):
    assert log2_over_limit(origin(verdict=verdict)) == binades
