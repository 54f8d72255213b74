"""The cheap check sees every target, in every shape of output, and tells equal steps from different ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from tests.probes.traced import Inline, session_of

NAN, INF = math.nan, math.inf


class Pair(NamedTuple):
    a: Any
    b: Any


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
    "named_tuple": (lambda x: Pair(x, None), lambda o: o.a),
    "dict": (lambda x: {"deep": [{"x": x}]}, lambda o: o["deep"][0]["x"]),
    "dataclass": (Out, lambda o: o.value),
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant):
    def forward(self, x):
        return checkpoint(self.body, self.lin(x), use_reentrant=reentrant)

    body = nn.Sequential(nn.Linear(3, 3), Inline(lambda _, x: x / 0.0))
    seen = sightings_of(Inline(forward, lin=nn.Linear(3, 3), body=body), lambda m, x: m(x).sum())
    assert "body.1" in seen.outputs
    assert {"loss", "grad:lin.weight", "grad:body.0.weight"} <= set(seen.affected)


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


def test_tied_weights_are_seen_under_their_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    seen = sightings_of(model, lambda m, x: m["head"](m["embed"](x) * INF).sum(), torch.tensor([1, 2]))
    assert set(seen.affected) == {"loss", "grad:embed.weight"}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradients(mode):
    model = nn.EmbeddingBag(5, 2, sparse=True, mode=mode)
    seen = sightings_of(
        model,
        lambda m, x: (m(x) * INF).sum(),
        torch.tensor([[1, 2]]),
        optimizer=lambda m: torch.optim.SparseAdam(list(m.parameters())),
    )
    assert {"loss", "grad:weight", "param:weight"} <= set(seen.affected)


@pytest.mark.parametrize("where", ["param", "buffer", "optimizer_state"])
def test_state_that_turns_non_finite(where):
    model = nn.BatchNorm1d(3)

    def poison(session):
        with torch.no_grad():
            if where == "param":
                model.weight[0] = NAN
            elif where == "buffer":
                model.running_mean[0] = INF
            else:
                state = session.optimizers["optimizer"].state
                if state:
                    state[model.bias]["exp_avg_sq"][0] = INF

    seen = sightings_of(
        model, lambda m, x: m(x).sum(), steps=2, before=poison, optimizer=lambda m: torch.optim.Adam(m.parameters())
    )
    expected = {
        "param": "param:weight",
        "buffer": "buffer:running_mean",
        "optimizer_state": "optimizer_state:bias:exp_avg_sq",
    }
    assert expected[where] in seen.affected


def test_what_was_infinite_before_is_no_sink_and_nan_is():
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    model.register_buffer("best", torch.tensor(INF))
    assert sightings_of(model, lambda m, x: m(x).sum()).affected == ()
    model.register_buffer("average", torch.tensor(NAN))
    assert sightings_of(model, lambda m, x: m(x).sum()).affected == ("buffer:average",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_no_false_negative_in_any_dtype_of_state(dtype):
    model = nn.Linear(3, 3)
    model.register_buffer("state", torch.zeros(5, dtype=torch.float32).to(dtype))

    def poison(_):
        model.state.copy_(torch.tensor([0.0, 0.0, INF, 0.0, 0.0]).to(dtype))

    assert "buffer:state" in sightings_of(model, lambda m, x: m(x).sum(), before=poison).affected


def test_finite_values_whose_sum_is_not():
    model = Inline(lambda self, x: self.lin(x) + torch.full((3,), torch.finfo(torch.float32).min), lin=nn.Linear(3, 3))
    seen = sightings_of(model, lambda m, x: m(x).softmax(-1).square().sum())
    assert seen.affected == ()
    assert seen.outputs == ()


def fingerprint(seed=0, factor=1.0, calls=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    session = session_of(model, lambda m, x: sum(m(x) for _ in range(calls)).sum(), [torch.ones(2, 3) * factor])
    probe = NonFiniteProbe()
    with session.watched(probe):
        assert session.has_step(0)
        session.step(0)
    return probe.report.fingerprint, probe.observed


def test_equal_steps_have_equal_fingerprints_and_others_not():
    first, observed = fingerprint()
    assert fingerprint()[0] == first
    assert first_difference(observed, fingerprint()[1]) is None
    changes = [{"seed": 1}, {"factor": 1.0000001}, {"calls": 2}]
    assert len({first, *(fingerprint(**change)[0] for change in changes)}) == 4
    what, here, there = first_difference(observed, fingerprint(factor=2.0)[1])
    assert what == "output of 0"
    assert here != there


def test_a_module_called_twice_is_checked_twice():
    lin = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        lin.weight.fill_(1e30)
    seen = sightings_of(
        Inline(lambda self, x: self.lin(self.lin(x)), lin=lin), lambda m, x: m(x).sum(), torch.ones(1, 2)
    )
    assert seen.outputs == ("lin", "")


def test_sightings_are_of_the_last_step_only():
    model = nn.Linear(3, 1)
    calls = []

    def loss(m, x):
        calls.append(1)
        return m(x).sum() * (INF if len(calls) == 1 else 1.0)

    assert sightings_of(model, loss, steps=2).affected == ()
