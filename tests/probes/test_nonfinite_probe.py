"""The cheap check sees every target, in every shape of output, and tells equal steps from different ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from tests.probes.traced import Inline, session_of, stepped

NAN, INF = math.nan, math.inf


@dataclass
class Out:
    value: torch.Tensor
    other: object = None


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sightings_of(model, loss, batch=None, *, steps=1, before=None, **changes):
    session = session_of(model, loss, [torch.ones(2, 3) if batch is None else batch] * steps, **changes)
    probe = NonFiniteProbe()
    with session.watched(probe):
        for step in range(steps):
            assert session.has_step(step)
            if before is not None:
                before(session)
            session.step(step)
    return probe.report


def model_output(x):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x)


WRAPS = {
    "tensor": (lambda x: x, lambda o: o),
    "tuple": (lambda x: (x, 3), lambda o: o[0]),
    "dict": (lambda x: {"deep": [{"x": x}]}, lambda o: o["deep"][0]["x"]),
    "nested_dataclass": (lambda x: Out(x.detach(), Out(x)), lambda o: o.other.value),
    "model_output": (model_output, lambda o: o.last_hidden_state),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_an_output_in_any_container(wrap, value):
    into, out_of = WRAPS[wrap]
    lin = nn.Linear(3, 3)
    poison = Inline(lambda _, x: into(x * value))
    model = Inline(lambda self, x: out_of(self.poison(self.lin(x))), lin=lin, poison=poison)
    seen = sightings_of(model, lambda m, x: m(x).sum())
    assert seen.outputs == ("poison", "")
    assert set(seen.affected) == {"loss", "grad:lin.weight", "grad:lin.bias"}


def test_a_value_that_is_gone_again_is_no_sink():
    model = Inline(lambda self, x: self.lin(x).mul(INF).tanh(), lin=nn.Linear(3, 3))
    seen = sightings_of(model, lambda m, x: m(x).detach().sum() + m.lin(x).sum())
    assert seen.affected == ()


def test_a_gradient_alone():
    model = Inline(lambda self, x: (self.lin(x) * 0).abs().sqrt(), lin=nn.Linear(3, 3))
    seen = sightings_of(model, lambda m, x: m(x).sum())
    assert seen.outputs == ()
    assert "lin" in seen.output_grads
    assert set(seen.affected) == {"grad:lin.weight", "grad:lin.bias"}


def test_a_gradient_that_no_optimizer_uses_harms_nothing():
    model = nn.ModuleDict({"trained": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})

    def loss(m, x):
        return m["trained"](x).sum() + (m["idle"](x) * 0).abs().sqrt().sum()

    seen = sightings_of(model, loss, optimizer=lambda m: sgd(m["trained"]))
    assert seen.affected == ()


@pytest.mark.parametrize("harmed", ["param:weight", "buffer:running_mean", "optimizer_state:bias:exp_avg_sq"])
def test_state_that_turns_non_finite(harmed):
    model = nn.BatchNorm1d(3)

    def poison(session):
        state = session.optimizers["optimizer"].state
        with torch.no_grad():
            if harmed.startswith("optimizer"):
                for entry in [state[model.bias]["exp_avg_sq"]] if state else ():
                    entry[0] = INF
            else:
                model.state_dict()[harmed.partition(":")[2]][0] = INF

    seen = sightings_of(
        model, lambda m, x: m(x).sum(), steps=2, before=poison, optimizer=lambda m: torch.optim.Adam(m.parameters())
    )
    assert harmed in seen.affected


def test_what_was_infinite_before_is_no_sink_and_nan_is():
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    model.register_buffer("best", torch.tensor(INF))
    assert sightings_of(model, lambda m, x: m(x).sum()).affected == ()
    model.register_buffer("average", torch.tensor(NAN))
    assert sightings_of(model, lambda m, x: m(x).sum()).affected == ("buffer:average",)


def observed_in(seed=0, factor=1.0, calls=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    session = session_of(model, lambda m, x: sum(m(x) for _ in range(calls)).sum(), [torch.ones(2, 3) * factor])
    probe = NonFiniteProbe()
    stepped(session, probe)
    return probe.observed


def test_equal_steps_are_observed_alike_and_others_not():
    first = observed_in()
    assert first_difference(first, observed_in()) is None
    changes = [{"seed": 1}, {"factor": 1.0000001}, {"calls": 2}]
    assert len({first, *(observed_in(**change) for change in changes)}) == 4
    what, here, there = first_difference(first, observed_in(factor=2.0))
    assert what == "output of 0"
    assert here != there
