"""What a new plan flushes, of tensors that the test holds in its hands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ampdoctor.batching.effects import flushed_plan
from ampdoctor.batching.plans import BatchPlan
from ampdoctor.errors import UsageError
from tests.ranges.known import collected, place, values

ACTIVATION, WEIGHT = place("fc"), place("fc.weight", "weight_grad")
OLD = BatchPlan(micro_batch=4, accumulation=1, data_parallel=512)
NEW = BatchPlan(micro_batch=4, accumulation=4, data_parallel=128)
GROWN = BatchPlan(micro_batch=16, accumulation=1, data_parallel=128)


def spread(log2_size, **more):
    return values(log2_size, count=20_000, spread=3.0, **more)


def total(found, kind):
    """The shares of all gradients of a kind; None if none is half."""
    return next((one for one in found.totals if one.kind == kind), None)


def lost(tensor, scale):
    """The share that a cast to fp16 really makes zero."""
    nonzero = tensor[tensor != 0]
    return int(((nonzero * scale).half() == 0).sum()) / len(nonzero)


def profile(activation, weight, **facts):
    return collected([{ACTIVATION: activation, WEIGHT: weight}], **{"loss_scale": 2.0**10, **facts})


def test_the_shares_are_those_of_casts_at_both_plans_and_the_scale_keeps_them():
    activation, weight = spread(-31), spread(-30, seed=1)
    found = flushed_plan(profile(activation, weight), OLD, NEW)
    assert found.scale == 2.0**10
    assert found.init_scale == 2.0**12
    assert found.bound_by is None
    for shares, tensor in ((total(found, "activation_grad"), activation), (total(found, "weight_grad"), weight)):
        assert shares.before == lost(tensor, 2.0**10)
        assert shares.after == shares.after_most == lost(tensor, 2.0**8)
        assert shares.kept == shares.before < shares.after
    assert {layer.layer for layer in found.layers} == {"fc.output", "fc.weight"}
    assert {replace(layer, layer="") for layer in found.layers} == set(found.totals)


def test_another_micro_batch_leaves_weight_gradients_between_two_shares():
    activation, weight = spread(-31), spread(-30, seed=1)
    found = flushed_plan(profile(activation, weight), OLD, GROWN)
    assert (
        total(found, "activation_grad").after == total(found, "activation_grad").after_most == lost(activation, 2.0**8)
    )
    assert total(found, "weight_grad").after == lost(weight, 2.0**10)
    assert total(found, "weight_grad").after_most == lost(weight, 2.0**9)


def test_weight_gradients_alone_can_ask_for_a_larger_scale():
    activation, weight = values(-12), spread(-30, seed=1)
    smaller = BatchPlan(micro_batch=1, accumulation=4, data_parallel=512)
    found = flushed_plan(profile(activation, weight), OLD, smaller)
    assert found.init_scale == 2.0**12
    assert total(found, "weight_grad").kept == total(found, "weight_grad").before


def test_a_scale_that_would_overflow_is_bounded_by_what_would():
    activation, weight = spread(-30), values(4)
    found = flushed_plan(profile(activation, weight), OLD, GROWN)
    assert found.bound_by == "fc.weight (weight_grad)"
    assert math.isfinite(float((weight * found.init_scale).half().abs().max()))
    assert not math.isfinite(float((weight * 2.0 * found.init_scale).half().abs().max()))
    assert total(found, "activation_grad").kept > total(found, "activation_grad").before


def test_the_profile_of_one_device_serves_a_job_that_accumulates():
    activation, weight = spread(-31), spread(-30, seed=1)
    job = BatchPlan(micro_batch=4, accumulation=8, data_parallel=64)
    then = BatchPlan(micro_batch=4, accumulation=16, data_parallel=32)
    found = flushed_plan(profile(activation, weight), job, then)
    assert total(found, "activation_grad").before == lost(activation, 2.0**7)
    assert total(found, "activation_grad").after == lost(activation, 2.0**6)
    assert found.init_scale == 2.0**11


def test_a_factor_that_the_gradients_carry_is_divided_out():
    activation, weight = spread(-31), spread(-30, seed=1)
    carried = profile(activation * 2.0**5, weight * 2.0**5, base_scale=2.0**5, loss_scale=2.0**6)
    found = flushed_plan(carried, OLD, NEW)
    assert total(found, "activation_grad").before == lost(activation, 2.0**6)
    assert found.init_scale == 2.0**8


def test_weight_gradients_that_are_made_of_flushed_ones_are_a_lower_bound():
    healthy = flushed_plan(profile(values(-12), values(-12)), OLD, NEW)
    assert not total(healthy, "weight_grad").lower_bound
    sick = flushed_plan(profile(spread(-34), values(-12)), OLD, NEW)
    assert total(sick, "weight_grad").lower_bound
    assert not total(sick, "activation_grad").lower_bound


def test_a_run_without_a_loss_scale_is_refused():
    run = profile(torch.ones(3), torch.ones(3), precision="bf16", loss_scale=1.0)
    with pytest.raises(UsageError, match="a run in bf16 has no loss scale"):
        flushed_plan(run, OLD, NEW)


def test_a_weight_gradient_that_cancels_is_left_out():
    key = place("key.bias", "weight_grad")
    run = collected([{place("key"): values(-8), ACTIVATION: values(-8), key: values(-40)}], loss_scale=2.0**10)
    found = flushed_plan(run, OLD, BatchPlan(micro_batch=1, accumulation=4, data_parallel=512))
    assert {layer.layer for layer in found.layers} == {"fc.output", "key.output"}
    assert found.init_scale == 2.0**10
