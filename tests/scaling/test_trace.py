"""A trace is held against the tensors themselves: those of a step put together, cast and counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.trace import trace_of
from tests.ranges.known import collected, place, values

A, B, NORM = place("a"), place("b"), place("norm")
WA, WB = place("a.weight", "weight_grad"), place("b.weight", "weight_grad")
SEEN = place("a", "activation")


def step(seed, *, size=-20.0, factor=1.0):
    """Gradients of sizes that differ by half a binade, as those of a network do, 20 binades apart from one another."""

    def made(log2_size, index):
        return values(size + log2_size, seed=10 * seed + index, count=20_000, zeros=50, spread=0.5) * factor

    return {A: made(0, 0), B: made(-8, 1), NORM: made(20, 2), WA: made(-4, 3), WB: made(8, 4), SEEN: made(30, 5)}


def profile_of(steps, **options):
    return collected(steps, wide=("norm",), **options)


def by_hand(steps, places, base=1.0):
    """For each step and scale (flushed share, relative error) of all these tensors together, by casting them."""
    flushed, errors = [], []
    for tensors in steps:
        together = torch.cat([tensors[where] for where in places]).double() / base
        together = together[together != 0]
        scaled = together[None, :] * torch.from_numpy(np.exp2(EXPONENTS))[:, None]
        cast = scaled.half().double()
        flushed.append((cast == 0).double().mean(dim=1).tolist())
        errors.append(((cast - scaled).norm(dim=1) / scaled.norm(dim=1)).tolist())
    return np.array(flushed), np.array(errors)


def agrees(trace, steps, activations, weights, *, base=1.0, flushed=1e-6, error=0.06):
    expected, _ = by_hand(steps, activations, base)
    np.testing.assert_allclose(trace.activation_flushed, expected, atol=flushed)
    expected, errors = by_hand(steps, weights, base)
    np.testing.assert_allclose(trace.weight_flushed, expected, atol=flushed)
    # the error of the weight gradients, but inf where any half gradient overflows
    amax = [max(t[where].abs().max().item() for where in (*activations, *weights)) / base for t in steps]
    assert trace.log2_amax.tolist() == pytest.approx([math.log2(a) for a in amax], abs=1e-12)
    over = np.array(amax)[:, None] * np.exp2(EXPONENTS) >= 65520
    assert (trace.error == math.inf).tolist() == over.tolist()
    np.testing.assert_allclose(trace.error[~over], errors[~over], rtol=error)


def test_each_step_is_what_casts_of_all_its_gradients_give():
    steps = [step(seed, size=size) for seed, size in enumerate((-20, -26, -12))]
    agrees(trace_of(profile_of(steps)), steps, (A, B), (WA, WB))


@pytest.mark.parametrize("without", [("a",), ("b",), ("norm",)])
def test_modules_in_fp32_do_not_count(without):
    steps = [step(1), step(2, size=-24)]
    activations = [where for where in (A, B) if where.module not in without]
    weights = [where for where in (WA, WB) if where.module not in without]
    agrees(trace_of(profile_of(steps), without), steps, activations, weights)


def test_nothing_is_left_where_all_modules_are_in_fp32():
    trace = trace_of(profile_of([step(1)]), ("a", "b"))
    assert trace.log2_amax.tolist() == [-math.inf]
    assert not trace.error.any()
    assert not trace.activation_flushed.any()
    assert not trace.weight_flushed.any()


@pytest.mark.parametrize("base", [2.0**-4, 2.0**10, 2.0**16])
def test_a_power_of_two_by_hand_is_taken_out_exactly(base):
    # two like steps, as below 2^-10 times the scale made by hand a step has the figures of all steps together
    steps = [step(seed, factor=base) for seed in (1, 2)]
    trace = trace_of(profile_of(steps, base_scale=base))
    recorded = EXPONENTS - math.log2(base) >= EXPONENTS[0]
    assert recorded.all() == (base < 1)
    expected, _ = by_hand(steps, (A, B), base)
    np.testing.assert_allclose(trace.activation_flushed[:, recorded], expected[:, recorded], atol=1e-6)
    agrees(trace, steps, (A, B), (WA, WB), base=base, flushed=0.02, error=0.25)


def test_another_scale_by_hand_is_interpolated():
    steps = [step(seed, factor=1000.0) for seed in (1, 2)]
    agrees(
        trace_of(profile_of(steps, base_scale=1000.0)), steps, (A, B), (WA, WB), base=1000.0, flushed=0.02, error=0.25
    )


def test_a_weight_gradient_that_is_not_finite_overflows_at_every_scale():
    steps = [step(1), step(2), step(3)]
    steps[0][WA][7] = math.inf
    steps[1][WB][7] = math.nan
    steps[2][A][7] = math.inf  # which may be dropped on its way
    trace = trace_of(profile_of(steps))
    assert (trace.log2_amax == math.inf).tolist() == [True, True, False]
    assert (trace.error == math.inf).all(axis=1).tolist() == [True, True, False]
    assert trace_of(profile_of(steps), ("b",)).log2_amax[1] < 0.0


@pytest.mark.parametrize("base", [1.0, 2.0**16, 1000.0])
def test_a_step_without_a_nonzero_gradient_overflows_and_loses_nothing(base):
    nothing = {where: torch.zeros_like(t) for where, t in step(1).items()}
    trace = trace_of(profile_of([step(1, factor=base), nothing], base_scale=base))
    assert trace.log2_amax[1] == -math.inf
    assert math.isfinite(trace.log2_amax[0])
    for curve in (trace.error, trace.activation_flushed, trace.weight_flushed):
        assert not curve[1].any()
        assert curve[0].any()
