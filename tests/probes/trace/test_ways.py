"""The way of an origin: what fed it, which modules carried it on, and the first target of each kind."""

from __future__ import annotations

import math

import torch
from torch import nn

from ampdoctor.probes.nan_path import FEEDERS
from tests.probes.traced import Inline, births_of, only_birth

INF = math.inf


def lin(scale=1.0):
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(scale * torch.eye(2))
    return layer


def overflow():
    return Inline(lambda _, x: (x + 3e38) + 3e38)  # its derivative is 1


def ops(passages):
    return [(passage.where.phase, passage.where.module, passage.where.op) for passage in passages]


def test_what_fed_the_birth_is_the_chain_of_the_largest_inputs():
    model = nn.Sequential(lin(3.0), nn.ReLU(), lin(2.0), Inline(lambda _, x: (x * 0).log()))
    way = only_birth(model, lambda m, x: m(x).sum(), torch.ones(1, 2)).way
    assert ops(way.before) == [
        ("forward", "0", "aten.linear"),
        ("forward", "1", "aten.relu"),
        ("forward", "2", "aten.linear"),
        ("forward", "3", "aten.mul"),
    ]
    assert [passage.amax for passage in way.before] == [3.0, 3.0, 6.0, 0.0]
    assert [passage.input_amax for passage in way.before] == [None, 3.0, 3.0, 6.0], "the batch was not made by the step"
    orders = [passage.order for passage in way.before]
    assert orders == sorted(set(orders))


def test_of_a_deep_model_only_the_nearest_ops_are_kept():
    model = nn.Sequential(*[lin() for _ in range(12)], Inline(lambda _, x: (x - 2.0).log()))
    way = only_birth(model, lambda m, x: m(x).sum()).way
    assert len(way.before) == FEEDERS
    assert [passage.where.module for passage in way.before] == ["8", "9", "10", "11", "12"]


def test_a_module_that_carries_it_is_one_node_with_its_first_op_and_the_others_are_counted():
    body = Inline(lambda _, x: ((x + 1.0) * 2.0).exp())
    model = nn.Sequential(lin(), overflow(), body, nn.ReLU())
    way = only_birth(model, lambda m, x: m(x).sum(), torch.ones(1, 2)).way
    assert ops(way.carriers) == [("forward", "2", "aten.add"), ("forward", "3", "aten.relu"), ("loss", "", "aten.sum")]
    assert [(passage.infs, passage.nans) for passage in way.carriers] == [(2, 0), (2, 0), (1, 0)]
    assert way.omitted == 2, "the multiplication and the exponential"


def test_the_way_ends_at_the_first_harm_and_has_the_first_sink_of_each_kind():
    model = nn.Sequential(lin(), overflow(), lin())
    origin = only_birth(
        model, lambda m, x: m(x).sum(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)
    )
    way = origin.way
    assert [passage.where.op for passage in way.affected] == ["loss", "grad:2.weight", "param:2.weight"]
    assert {passage.where.op for passage in way.affected} <= set(origin.affected)
    assert all(passage.order <= way.affected[0].order for passage in way.carriers)
    assert {passage.where.phase for passage in way.carriers} == {"forward", "loss"}
    assert [passage.order for passage in way.affected] == sorted(passage.order for passage in way.affected)
    loss, gradient, parameter = way.affected
    assert (loss.where.phase, gradient.where.phase, parameter.where.phase) == ("loss", "backward", "optimizer")
    assert (gradient.where.module, gradient.where.tensor) == ("2", "2.weight")
    assert (gradient.dtype, gradient.shape) == ("float32", (2, 2))
    assert gradient.nans + gradient.infs > 0


def test_a_backward_birth_is_fed_by_the_backward_and_carried_to_a_gradient():
    model = nn.Sequential(lin(), Inline(lambda _, x: (x * 0).abs().sqrt()), lin(3.0))
    origin = only_birth(model, lambda m, x: m(x).sum())
    assert (origin.where.phase, origin.where.op) == ("backward", "aten.sqrt")
    assert ops(origin.way.before)[-1] == ("backward", "2", "aten.linear")
    assert origin.way.before[-1].amax == 3.0
    assert [passage.where.op for passage in origin.way.affected] == ["grad:0.weight"]
    assert ops(origin.way.carriers)[0] == ("backward", "1", "aten.abs")
    assert {passage.where.phase for passage in origin.way.carriers} == {"backward"}


def test_a_number_that_the_step_returns_is_a_sink_without_a_tensor():
    def step(model, batch, optimizer):
        loss = (model(batch) * 0).log().sum()
        loss.backward()
        return loss.item()

    origin = births_of(
        lin(), None, step=step, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), scaler=None
    )[0]
    loss = origin.way.affected[0]
    assert (loss.where.op, loss.dtype, loss.infs, loss.where.nonfinite) == ("loss", "", 1, "inf")
