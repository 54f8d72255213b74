"""Interventions: found by line and op, differentiable, and chosen by what makes the op and its derivative finite."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ampdoctor.hooks.program import called_as_recorded, recorded_at
from ampdoctor.probes.op_overrides import Intervention, UserLine, _candidates, choose_guard
from ampdoctor.probes.user_code import as_source

NEGINF = float("-inf")


def here(offset):
    """The source of a line of the caller, so many lines below this call."""
    import sys

    frame = sys._getframe(1)
    return as_source((frame.f_code.co_filename, frame.f_lineno + offset))


def run(how, op, source, code, **options):
    mode = Intervention([UserLine(source, op)], how, **options)
    with mode.watching():
        result = code()
    return result, mode


def test_the_op_on_that_line_runs_in_fp32_and_stays_there():
    x = torch.tensor([12.0], dtype=torch.float16, requires_grad=True)

    def code():
        return x.exp(), x * 2, (x + 1).exp()

    source = here(-2)
    (loud, other, again), mode = run("fp32", "exp", source, code)
    assert [t.dtype for t in (loud, other, again)] == [torch.float32, torch.float16, torch.float32]
    assert float(loud.detach()) == pytest.approx(162754.79)
    loud.backward()
    assert x.grad.dtype is torch.float16
    assert mode.met == {UserLine(source, "exp")}


def test_narrow_results_return_to_the_inputs_format_and_do_not_leave_it():
    x = torch.tensor([12.0], dtype=torch.float16)
    result, _ = run("fp32", "exp", here(0), lambda: x.exp(), narrow=True)  # noqa: PLW0108
    assert (result.dtype, float(result)) == (torch.float16, 65504.0)


def test_in_place_ops_write_where_they_would():
    x = torch.tensor([12.0], dtype=torch.float16)
    result, _ = run("fp32", "exp", here(0), lambda: x.exp_())  # noqa: PLW0108
    assert result is x
    assert float(x) == 65504.0


def test_a_cast_to_less_does_not_happen():
    x = torch.tensor([1e5])
    result, _ = run("fp32", "_to_copy", here(0), lambda: x.half())  # noqa: PLW0108
    assert (result.dtype, float(result)) == (torch.float32, 1e5)


def test_a_cast_is_held_in_its_formats_range():
    x = torch.tensor([98304.0, -1.0])
    result, mode = run("guard", "_to_copy", here(0), lambda: x.to(torch.float8_e5m2))
    assert result.dtype is torch.float8_e5m2
    assert result.float().tolist() == [57344.0, -1.0]
    assert [guard.bound for guard in mode.guards.values()] == [57344.0]


def test_a_functions_own_python_is_reached_as_a_whole():
    x = torch.tensor([[300.0, 400.0]], dtype=torch.float16)
    result, mode = run("fp32", "div", here(0), lambda: functional.normalize(x))
    assert mode.met
    assert result.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


def test_the_derivative_of_a_custom_function_is_reached():
    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            return (grad * 1e5).half().float()  # here

    source = here(-2)
    x = torch.ones(1, requires_grad=True)
    run("fp32", "_to_copy", source, lambda: Cast.apply(x).backward())
    assert float(x.grad) == 1e5


@pytest.mark.parametrize(
    ("func", "arguments", "deed", "operand"),
    [
        (torch.log, [[0.0, 1.0]], "away from zero", 0),
        (torch.sqrt, [[0.0, 4.0]], "away from zero", 0),
        (torch.rsqrt, [[0.0]], "away from zero", 0),
        (torch.div, [[0.0, 2.0], [0.0, 1.0]], "away from zero", 1),
        (torch.Tensor.div_, [[0.0, 2.0], [0.0, 1.0]], "away from zero", 1),
        (torch.log, [[-0.5, 1.0]], "above zero", 0),
        (torch.acos, [[1.0, 0.2]], "inside (-1, 1)", 0),
        (torch.atanh, [[-1.0]], "inside (-1, 1)", 0),
        (torch.exp, [[100.0, 1.0]], "below", 0),
        (torch.square, [[1e30]], "below", 0),
        (lambda x: x.softmax(-1), [[NEGINF, NEGINF]], "finite", 0),
        (torch.sub, [[NEGINF], [NEGINF]], "finite", -1),
        (torch.mean, [[]], "result", -1),
    ],
)
def test_the_gentlest_guard_with_which_op_and_derivative_are_finite(func, arguments, deed, operand):
    tensors = [torch.tensor(values) for values in arguments]
    guard = choose_guard(func, tuple(tensors), {})
    assert (guard.deed, guard.operand) == (deed, operand)
    words = guard.words("torch.name")
    if "e.g. " in words and not (guard.operand and "x.clamp_min" not in words):
        kept = eval(words.partition("e.g. ")[2], {"torch": torch, "x": tensors[guard.operand]})
        assert torch.equal(kept, guard._held(tensors[guard.operand])), "the expression is what was tried"
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = guard.run(func, tuple(leaf.clone() for leaf in leaves), {})
    assert bool(result.isfinite().all())
    result.sum().backward()
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None)


def test_a_sound_op_needs_no_guard_and_random_numbers_are_as_they_were():
    state = torch.get_rng_state()
    assert choose_guard(functional.dropout, (torch.ones(8),), {}) is True
    assert torch.equal(torch.get_rng_state(), state)


def test_only_what_is_meant_to_lie_between_minus_one_and_one_is_clamped_to_it():
    def deeds(*values):
        return {guard.deed for guard in _candidates([torch.tensor(values)])}

    assert "inside (-1, 1)" in deeds(1.0, 0.2)
    assert "inside (-1, 1)" in deeds(1.0078125, -0.5), "a cosine in bf16, a rounding beyond 1"
    assert "inside (-1, 1)" not in deeds(3.0, 0.2), "logits"
    assert "inside (-1, 1)" not in deeds(NEGINF, 0.2), "masked logits"
    assert not deeds(-NEGINF, 1.0), "no mask's: a large number in its place would mean nothing"


def test_what_no_guard_helps_is_said():
    assert choose_guard(lambda x: x * float("inf"), (torch.ones(2),), {}) is False, "an infinity is not papered over"
    assert choose_guard(lambda _: (_ for _ in ()).throw(RuntimeError), (torch.ones(2),), {}) is False


def test_an_op_of_a_recorded_step_is_met_at_its_recorded_line():
    half = torch.tensor([60000.0], dtype=torch.float16)
    address = UserLine(as_source(("train.py", 61)), "mul")
    mode = Intervention([address], "fp32")
    with mode.watching(), recorded_at(("train.py", 61)):
        result = called_as_recorded(torch.Tensor.mul, (half, 2), {})
    assert result.item() == 120000.0
    assert mode.met == {address}
