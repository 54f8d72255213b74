"""Births: the op, its phase, module, call and line, wherever the value is born and whatever lies on its way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ampdoctor import TrainingRun
from ampdoctor.diagnosis.replay.nonfinite import culprits
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.session import Session
from tests.probes.traced import Inline, births_of, here, only_birth, session_of, stepped, trace_of

INF = math.inf


def line(mark):
    return here(mark, __file__)


def lin():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- where -------------------------------------------------------------------------------------------------------------


def test_in_a_childs_forward():
    model = nn.Sequential(lin(), Inline(lambda _, x: (x - x).log()))  # IN CHILD
    origin = only_birth(model, lambda m, x: m(x).sum())
    assert (origin.where.phase, origin.where.module, origin.where.op) == ("forward", "1", "aten.log")
    assert origin.where.source.line == line("IN CHILD")
    assert origin.where.source.file.endswith("test_op_trace.py")
    assert (origin.kernel, origin.came_from, origin.where.nonfinite) == ("aten.log", "op", "inf")
    assert not origin.recomputed.finite


def test_in_a_backward_with_the_line_of_the_forward():
    body = Inline(lambda self, x: (self.l(x) * 0).abs().sqrt(), l=lin())  # BACKWARD
    origin = only_birth(nn.ModuleDict({"b": body}), lambda m, x: m["b"](x).sum())
    assert (origin.where.phase, origin.where.module, origin.where.op) == ("backward", "b", "aten.sqrt")
    assert origin.where.source is None
    assert origin.where.forward_source.line == line("BACKWARD")


def test_a_pole_of_the_forward_is_one_birth_with_its_derivative():
    origins = births_of(lin(), lambda m, x: (m(x) * 0).log().clamp(min=-1.0).sum())
    assert [b.where.phase for b in origins] == ["loss"]


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}])
def test_foreach_optimizers_name_the_parameter(how):
    model = nn.ModuleDict({"fine": lin(), "stuck": lin()})

    def loss(m, x):
        return m["fine"](x).sum() + (m["stuck"](x) * 0).sum()

    def adam(m):
        return torch.optim.Adam(m.parameters(), lr=0.1, eps=0.0, **how)

    origins = births_of(model, loss, optimizer=adam)
    assert {b.where.module for b in origins} == {"stuck"}
    assert {b.where.tensor for b in origins} == {"stuck.weight", "stuck.bias"}
    assert {b.where.op for b in origins} == {"aten.addcdiv_"}


def test_fused_optimizers():
    origins = births_of(
        lin(),
        lambda m, x: m.weight[0].sum() * x.sum() + m.bias.sum(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.1, eps=0.0, fused=True),
    )
    assert origins
    assert {b.where.phase for b in origins} == {"optimizer"}
    assert {b.where.tensor for b in origins} == {"weight"}


def test_in_an_optimizer_written_by_hand():
    def step(model, batch):
        model(batch).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad / (parameter.grad * 0))  # BY HAND

    origins = births_of(lin(), None, step=step)
    assert {b.where.phase for b in origins} == {"optimizer"}
    assert {b.where.source.line for b in origins} == {line("BY HAND")}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_birth_in_the_recomputation_alone(reentrant):
    calls = []

    def sometimes(self, x):
        calls.append(1)
        h = self.l(x)
        return h * (h / (0.0 if len(calls) > 1 else 1.0))

    body = Inline(sometimes, l=lin())
    model = Inline(
        lambda self, x: checkpoint(self.body, self.first(x), use_reentrant=reentrant), first=lin(), body=body
    )
    origins = births_of(model, lambda m, x: m(x).sum())
    where = origins[0].where
    assert (where.phase, where.recompute, where.module, where.op) == ("forward", True, "body", "aten.div")


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.reciprocal().log_().mul_(0).reciprocal_()  # CUSTOM


def test_in_a_custom_backward():
    applied = Custom.apply  # as users write it: the name is bound once

    def forward(self, x):
        return applied(self.l(x))  # APPLIED

    body = Inline(forward, l=lin())
    origin = only_birth(nn.ModuleDict({"b": body}), lambda m, x: m["b"](x).sum())
    assert (origin.where.phase, origin.where.module, origin.where.op) == ("backward", "b", "aten.reciprocal_")
    assert origin.where.source.line == line("CUSTOM")
    assert origin.where.forward_source.line == line("APPLIED")
    assert origin.operand.source.line == line("CUSTOM")


def test_in_a_second_backward_it_is_the_op_of_the_forward():
    def penalty(m, x):
        value = (m(x).square().sum() * 0).abs().pow(1.5)  # POWER
        later = value * 4
        (g,) = torch.autograd.grad(later, m.weight, create_graph=True)
        return (g * 1).sum() + m(x).sum()

    origin = births_of(lin(), penalty)[0]
    assert (origin.where.phase, origin.where.op) == ("backward", "aten.pow")
    assert origin.where.forward_source.line == line("POWER")


def test_micro_batches_are_told_apart():
    model = nn.Linear(2, 1)
    data = [torch.ones(2), torch.ones(2), torch.zeros(2), torch.ones(2)]
    session = session_of(model, lambda m, x: (m(x) / x.sum()).sum(), data, accumulation_steps=4)
    tracer = OpTraceProbe()
    stepped(session, tracer)
    origin = tracer.trace.origins[0]
    assert (origin.where.micro_batch, origin.where.phase, origin.where.op) == (2, "loss", "aten.div")


# -- ancestry ----------------------------------------------------------------------------------------------------------


def test_in_place_ops_views_and_chunks_carry_ancestry():
    def forward(self, x):
        h = self.l(x)
        a, b = h.chunk(2)
        rows = torch.cat([a, b]).view(1, 2).t()
        rows = rows * 1
        rows[0].div_(0.0)  # VIEW
        rows.add_(1.0).mul_(2.0)
        return rows.squeeze().flip(0)

    origin = births_of(Inline(forward, l=lin()), lambda m, x: m(x).sum())[0]
    assert origin.where.op == "aten.div_"
    assert origin.where.source.line == line("VIEW")
    assert "loss" in origin.affected


@pytest.mark.parametrize(
    "put",
    [
        lambda buffer, h: torch.mul(h, 1.0, out=buffer[0, :2]),
        lambda buffer, h: buffer[0, :2].copy_(h),
        lambda buffer, h: buffer.__setitem__((torch.tensor([0, 0]), torch.tensor([0, 1])), h),
        lambda buffer, h: buffer.index_copy_(0, torch.tensor([0]), functional.pad(h, (0, 62)).reshape(1, 64)),
        lambda buffer, h: buffer.scatter_(1, torch.tensor([[0, 1]]), h.reshape(1, 2)),
    ],
    ids=["out", "view", "index_put", "index_copy", "scatter"],
)
def test_a_buffer_is_read_where_it_is_written_and_not_where_a_part_is_taken(put):
    def chunked(m, x):
        h = (m(x) * 0).log()
        buffer = torch.empty(8, 64)
        buffer.untyped_storage().copy_(torch.full((8, 64), math.nan).untyped_storage())  # as memory may be
        put(buffer, h.detach())
        return (h * buffer[0, :2]).sum()

    assert {b.where.op for b in births_of(lin(), chunked)} == {"aten.log"}


def test_what_is_added_to_unwritten_memory_is_born_there():
    def added(m, x):
        buffer = torch.empty(8, 2)
        buffer.untyped_storage().copy_(torch.full((8, 2), math.nan).untyped_storage())
        buffer.index_put_((torch.tensor([0]),), m(x).detach(), accumulate=True)
        return (m(x) * buffer[0]).sum()

    assert births_of(lin(), added)[0].where.op == "aten.empty"


def test_a_birth_that_goes_nowhere_harms_nothing():
    trace, nonfinite = trace_of(lin(), lambda m, x: m(x).sum() + (m(x).detach() / 0).tanh().sum())
    assert [b.where.op for b in trace.origins] == ["aten.div"]
    assert trace.origins[0].affected == ()
    assert trace.origins[0].departs < 1e-6
    assert nonfinite.affected == ()


def test_an_infinity_that_becomes_a_wrong_number_departs():
    def loss(m, x):
        big = m(x).abs().add(1.0).half().mul(60000.0).square()
        return (m(x) * big.float().rsqrt()).sum()

    trace, _ = trace_of(lin(), loss)
    origin = next(b for b in trace.origins if b.where.op in ("aten.square", "aten.mul"))
    assert origin.departs == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", ["inf", "min"])
def test_masks_absorbed_by_softmax_harm_nothing(dtype, value):
    def loss(m, x):
        scores = m(x).to(dtype) @ m(x).to(dtype).t()
        low = -INF if value == "inf" else torch.finfo(dtype).min
        masked = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), low)
        added = masked + torch.zeros(3, 3, dtype=dtype).masked_fill(torch.ones(3, 3).triu(1).bool(), low)
        return (added.softmax(-1) @ m(x).to(dtype)).float().square().sum()

    trace, nonfinite = trace_of(lin(), loss, torch.ones(3, 2))
    assert all(not b.affected and b.departs < 0.5 for b in trace.origins)
    assert nonfinite.affected == ()


def test_a_nan_beside_a_mask_is_the_one_to_follow():
    def loss(m, x):
        scores = m(x)
        scores = scores.masked_fill(torch.tensor([True, False]), -INF)
        poison = (scores[1:] * 0) / (scores[1:] * 0)
        return torch.cat([scores[:1], poison]).softmax(-1).sum()

    origin = births_of(lin(), loss)[0]
    assert (origin.where.op, origin.where.nonfinite, origin.came_from) == ("aten.div", "nan", "op")
    assert all(b.came_from == "op" for b in births_of(lin(), loss))


# -- what was brought --------------------------------------------------------------------------------------------------


def test_the_batch_brings_it():
    origin = only_birth(lin(), lambda m, batch: m(batch["x"]).sum(), {"x": torch.tensor([1.0, math.nan])})
    assert (origin.came_from, origin.where.phase, origin.where.op, origin.where.tensor) == ("data", "data", "data", "x")
    assert origin.order == -1


@pytest.mark.parametrize("kind", ["param", "buffer"])
def test_the_state_brings_it(kind):
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.eval()
    with torch.no_grad():
        (model[0].weight if kind == "param" else model[0].running_mean)[0] = math.nan
    origin = births_of(model, lambda m, x: m(x).sum(), torch.ones(3, 2))[0]
    leaf = "weight" if kind == "param" else "running_mean"
    assert (origin.came_from, origin.where.phase, origin.where.module) == (kind, "checkpoint", "0")
    assert origin.where.op == f"state:{leaf}"
    assert origin.where.tensor == f"0.{leaf}"


def test_a_constant_of_the_user():
    constant = torch.tensor([1.0, INF])
    origin = births_of(lin(), lambda m, x: (m(x) * constant).sum())[0]
    assert (origin.came_from, origin.where.phase) == ("constant", "loss")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_an_overflow():
    def loss(m, x):
        return (m(x).abs().add(1.0).half() * 60000.0).float().sum() + 0

    origin = births_of(lin(), loss)[0]
    assert origin.where.op == "aten.mul"
    verdict = origin.recomputed
    assert verdict.finite
    assert verdict.limit == 65504.0
    assert 65504.0 < verdict.amax < 600000.0
    assert origin.inputs[0].dtype == "float16"
    assert (origin.outputs[0].infs, origin.outputs[0].nans) == (2, 0)


def test_an_in_place_overflow_is_recomputed_from_what_was_there():
    def loss(m, x):
        h = m(x).abs().add(1.0).half()
        h.mul_(60000.0)
        return h.float().sum()

    origin = births_of(lin(), loss)[0]
    assert origin.where.op == "aten.mul_"
    assert origin.recomputed.finite
    assert origin.inputs[0].infs == 0


def test_ctc_leaves_uninitialised_memory_and_no_birth():
    def loss(m, x):
        logits = m(x).log_softmax(-1).unsqueeze(1).repeat(1, 2, 1)
        return functional.ctc_loss(logits, torch.tensor([[1], [1]]), torch.tensor([4, 3]), torch.tensor([1, 1]))

    trace, nonfinite = trace_of(lin(), loss, torch.ones(4, 2))
    assert not [b for b in trace.origins if b.affected]
    assert trace.unattributed == ()
    assert nonfinite.affected == ()


def test_sparse_gradients_are_followed():
    model = nn.EmbeddingBag(5, 2, sparse=True)
    origins = births_of(
        model,
        lambda m, x: (m(x) * 0).abs().sqrt().sum(),
        torch.tensor([[1, 2]]),
        optimizer=lambda m: torch.optim.SparseAdam(list(m.parameters())),
    )
    assert origins[0].where.op == "aten.sqrt"
    assert "grad:weight" in origins[0].affected


def test_gradients_that_the_step_replaces_keep_their_names():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))

    def step(model, batch, optimizer):
        optimizer.zero_grad()
        loss = 0 * model(batch).sum()
        loss.backward()
        for parameter in model.parameters():
            unit = parameter.grad / parameter.grad.norm()
            parameter.grad = unit.clone()  # what the old one lay in is free for the next one
        optimizer.step()
        return loss

    run = TrainingRun(model=model, batches=[torch.ones(1, 4)], step=step, optimizer=sgd, precision="fp32")
    session, tracer = Session(run, device=torch.device("cpu")), OpTraceProbe()
    stepped(session, tracer)
    session.close()
    origins = [origin.where.tensor for origin in tracer.trace.origins if origin.where.op == "aten.div"]
    assert origins == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("where", ["parameter", "activation", "module", "node", "accumulated"])
def test_an_op_of_a_users_hook_has_its_own_name_and_line(where):
    def unit(gradient):
        return gradient / gradient.norm()  # IN A HOOK

    def accumulated(parameter):
        parameter.grad = unit(parameter.grad)

    model = nn.Sequential(lin(), lin())
    if where == "parameter":
        model[1].weight.register_hook(unit)
    if where == "accumulated":
        model[1].weight.register_post_accumulate_grad_hook(accumulated)
    if where == "module":
        model[1].register_full_backward_hook(lambda _module, inputs, _outputs: (unit(inputs[0]),))

    def loss(m, x):
        hidden = m[0](x)
        if where == "activation":
            hidden.register_hook(unit)
        if where == "node":
            hidden.grad_fn.register_prehook(lambda gradients: (unit(gradients[0]),))
        return 0 * m[1](hidden).sum()

    origin = births_of(model, loss, torch.ones(3, 2))[0]
    assert (origin.where.phase, origin.where.op, origin.kernel) == ("backward", "aten.div", "aten.div")
    assert origin.where.source.line == line("IN A HOOK")
    assert origin.where.module == ("0" if where in ("activation", "node") else origin.where.module)


# -- whose memory it is, where several tensors lie in one --


class Flat(nn.Module):
    """Two weights in one buffer, as flat optimizers and gradient buckets lay them."""

    def __init__(self, sick):
        super().__init__()
        memory = torch.ones(8)
        memory[4 * sick] = float("nan")
        self.first, self.second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])

    def forward(self, x):
        return (x * self.first).sum() + (x * self.second).sum()


def test_a_sick_weight_is_not_taken_for_its_neighbour():
    for sick, name in enumerate(("first", "second")):
        origins = births_of(Flat(sick), lambda model, x: model(x), torch.ones(4))
        assert {origin.where.tensor for origin in origins if origin.came_from == "param"} == {name}


# -- an op that leaves its domain in the forward, and again in its derivative at the same operand, is one origin --


class Masked(nn.Module):
    """`where` takes the bad values out again; the derivative multiplies them by zero."""

    def __init__(self, func):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.func = func

    def forward(self, x):
        x = self.layer(x)
        return torch.where(x > 0, self.func(x), torch.zeros_like(x))


def main_birth(module):
    torch.manual_seed(0)
    batch = torch.randn(8, 4)
    batch[0] = 0.0
    return culprits(trace_of(module, lambda model, x: model(x).mean(), batch)[0])[0]


@pytest.mark.parametrize("func", [torch.sqrt, torch.log])
def test_the_forward_is_named_also_where_its_own_value_is_masked_out(func):
    origin = main_birth(Masked(func))
    assert (origin.where.phase, origin.where.op) == ("forward", f"aten.{func.__name__}")
    assert all(target.startswith("grad:") for target in origin.affected), "the loss is finite"
