"""What a trace looks for beside the origins may fail; and ops that change a tensor's shape in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.probes import op_trace
from ampdoctor.probes.lost_values import Provenance
from ampdoctor.probes.nan_path import Readings, Ways
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.tensor_memory import Taint
from tests.probes.traced import Inline, only_birth, session_of, stepped, trace_of

RESHAPES = {
    "transpose_": lambda h: h.transpose_(0, 1),
    "squeeze_": lambda h: h.unsqueeze_(1).squeeze_(1),
    "resize_": lambda h: h.resize_(2, 9),
    "as_strided_": lambda h: h.as_strided_((6, 3), (1, 6)),
    "set_": lambda h: torch.empty(0, dtype=h.dtype).set_(h),
    "detach_": lambda h: h.detach_(),
}


def saturated(module, x, reshape):
    """A tanh that is 1 in half, reshaped in place; then an overflow of it."""
    h = torch.tanh(50 * module.a(x)).half().detach()
    h = h.clone()
    return 1e5 * reshape(h).float().half() * module.w.half()


@pytest.mark.parametrize("name", RESHAPES)
def test_an_op_that_changes_a_shape_in_place_is_a_view(name):
    def loss(model, x):
        return model(x).float().sum()

    torch.manual_seed(0)
    model = Inline(lambda module, x: saturated(module, x, RESHAPES[name]), a=nn.Linear(4, 6))
    model.w = nn.Parameter(torch.ones(()))
    trace, _ = trace_of(model, loss, torch.randn(3, 4))
    born = [origin for origin in trace.origins if origin.affected]
    assert born[0].kernel == "aten.mul"
    assert born[0].where.nonfinite == "inf"
    assert trace.left_out == ()


@pytest.mark.parametrize("reshape", [lambda t: t.t_(), lambda t: t.transpose_(0, 1), lambda t: t.unsqueeze_(0)])
def test_a_value_that_was_lost_is_known_behind_a_reshape(reshape):
    """exp(-20) is 0 in half, and its log has no derivative: the reshape between them hides neither."""

    def forward(module, x):
        gone = torch.exp(-20 * x.half() * module.w.half()).detach().clone()
        return torch.log(reshape(gone)) * module.w

    model = Inline(forward)
    model.w = nn.Parameter(torch.ones(()))
    origin = only_birth(model, lambda m, x: m(x).float().sum(), torch.ones(2, 3))
    assert (origin.where.op, origin.operand.made_by, origin.operand.op) == ("aten.log", "flushed", "aten.exp")


def test_a_view_that_shows_more_than_its_input_makes_nothing():
    def forward(module, x):
        whole = torch.log(x * module.w - 1).detach()  # NaN in the second half
        return whole[:2].as_strided((4,), (1,)) * module.w

    model = Inline(forward)
    model.w = nn.Parameter(torch.ones(()))
    origin = only_birth(model, lambda m, x: m(x).sum(), torch.tensor([2.0, 2.0, -1.0, -1.0]))
    assert origin.where.op == "aten.log"


PLANTED = [
    (Provenance, "note", "what made the operands"),
    (op_trace, "operand_of", "what made the operand"),
    (op_trace, "recompute", "the op in float64"),
    (Ways, "carry", "the way of an origin"),
    (Ways, "before", "the way to an origin"),
    (Readings, "note", "what the step's code has read"),
    (Taint, "cast_shadow", "how far finite values depart"),
    (OpTraceProbe, "_described", "the numbers of the inputs"),
    (OpTraceProbe, "_look_for_flush", "gradients that are flushed"),
]


def lost_probability(module, x):
    p = torch.softmax(x.half() * module.w.half(), -1)
    return torch.log(p.half()) * module.w


def planted(*_args, **_kwargs):
    raise RuntimeError("The size of tensor a (3) must match the size of tensor b (5)")


def found(*, flushes=False):
    model = Inline(lambda module, x: lost_probability(module, x) if x.sum() < 1e6 else x)
    model.w = nn.Parameter(torch.ones(()))
    tracer = OpTraceProbe(flushes=flushes)
    session = session_of(model, lambda m, x: -m(x).float().sum(), [torch.tensor([[0.0, 40.0]])])
    stepped(session, tracer)
    session.close()
    return tracer.trace


@pytest.mark.parametrize(("owner", "name", "note"), PLANTED, ids=[name for _, name, _ in PLANTED])
def test_a_side_search_that_fails_costs_its_note_and_not_the_birth(monkeypatch, owner, name, note):
    flushes = name == "_look_for_flush"
    whole = found(flushes=flushes)
    assert whole.left_out == ()
    monkeypatch.setattr(owner, name, planted)
    trace = found(flushes=flushes)
    if name == "_look_for_flush" and not trace.left_out:
        pytest.skip("nothing of this backward is looked at for flushes")
    assert [(b.where.op, b.where.phase, b.affected) for b in trace.origins] == [
        (b.where.op, b.where.phase, b.affected) for b in whole.origins
    ]
    assert note in {one.what for one in trace.left_out}
    assert all("The size of tensor a (3)" in one.reason for one in trace.left_out)


def test_memory_that_does_not_suffice_is_no_note(monkeypatch):
    def out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(op_trace, "recompute", out_of_memory)
    with pytest.raises(Exception, match="out of memory"):
        found()
