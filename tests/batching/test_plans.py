"""The arithmetic of plans, held against trying everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ampdoctor.batching.plans import (
    BatchPlan,
    BatchSettings,
    Cluster,
    Memory,
    PlanRequest,
    exact_plans,
    most_ranks_that_divide,
    nearest_plans,
)
from ampdoctor.workflows.plan import plan_section

SIZES = st.tuples(*[st.integers(1, 4)] * 3)


def triples(plans):
    return [(plan.data_parallel, plan.micro_batch, plan.accumulation) for plan in plans]


def everything(ranks, most, batches):
    """Every plan by trial, without a division."""
    top = max(batches)
    return {
        (ranks, micro, steps)
        for micro in range(1, most + 1)
        for steps in range(1, top // ranks + 1)
        if ranks * micro * steps in batches
    }


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), SIZES, st.integers(1, 24))
def test_plans_are_those_that_trying_everything_finds(batch, groups, sizes, most):
    tensor, pipeline, context = sizes
    cluster = Cluster(devices=groups * tensor * pipeline * context, tensor=tensor, pipeline=pipeline, context=context)
    assert cluster.data_parallel == groups
    exact = exact_plans(batch, groups, most)
    assert set(triples(exact)) == everything(groups, most, {batch})
    assert [plan.micro_batch for plan in exact] == sorted({plan.micro_batch for plan in exact}, reverse=True)

    reachable = {groups * each for each in range(1, batch + 2)}
    off = min(abs(batch - one) for one in reachable)
    near = nearest_plans(batch, groups, most)
    assert abs(near[0].global_batch - batch) == off
    nearest = {one for one in reachable if abs(batch - one) == off}
    assert {one for one in triples(near) if one[0] * one[1] * one[2] in nearest} == everything(groups, most, nearest)
    assert most_ranks_that_divide(batch, groups) == max(n for n in range(1, groups + 1) if batch % n == 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_a_section_is_exact_or_says_how_far_off(batch, ranks, then, most):
    said = BatchSettings(global_batch=batch)
    request = PlanRequest(said=said, before=None, after=Cluster(devices=then), memory=Memory(known_to_fit=most))
    section = plan_section(request)
    assert bool(section.exact) is (batch % then == 0)
    assert all(one.global_batch == batch and one.off == 0 for one in section.exact)
    assert bool(section.nearest) is not bool(section.exact)
    for one in section.nearest:
        assert one.global_batch == one.data_parallel * one.micro_batch * one.accumulation == batch + one.off
        assert one.off
        assert one.micro_batch <= most
    if section.fewer is not None:
        assert (section.fewer.global_batch, section.fewer.devices < then) == (batch, True)


def test_a_cluster_without_expert_ranks():
    cluster = Cluster(devices=512, tensor=8, pipeline=4, context=2)
    assert (cluster.data_parallel, cluster.shards) == (8, 16)
    assert BatchPlan(micro_batch=2, accumulation=16, data_parallel=8).global_batch == 256
