"""What took an op out of its domain: decided from numbers, for origins of the forward, the backward and the update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor.evidence.trace import Operand
from tests.probes.traced import Inline, births_of, here, only_birth, trace_of


def line(mark):
    return here(mark, __file__)


def lin():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def operand(loss, model=None, batch=None, **changes) -> Operand:
    origins = births_of(model or lin(), loss, batch, **changes)
    assert origins
    return origins[0].operand


# -- lost by the format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guard", "made_by", "op"),
    [
        (lambda h: h + 1e-8, "flushed_epsilon", "aten.add"),
        (lambda h: h.clamp(min=1e-8), "flushed_epsilon", "aten.clamp"),
        (lambda h: (h.float() + 1e-8).half(), "flushed", "aten._to_copy"),
    ],
)
def test_a_flushed_epsilon(guard, made_by, op):
    found = operand(lambda m, x: (m(x).half() / guard((m(x) * 0).half())).float().sum())
    assert (found.made_by, found.op, found.here, found.dtype) == (made_by, op, 0.0, "float16")
    assert found.float64 == pytest.approx(1e-8, rel=1e-6)
    assert found.fraction == 1.0


def test_the_epsilon_is_named_through_views_copies_casts_and_modules():
    class Guard(nn.Module):
        def forward(self, x):
            return x.square() + 1e-9  # GUARD

    def forward(self, x):
        h = self.guard((self.l(x) * 0).half())
        h = torch.cat([h.view(1, 2).t(), torch.ones(2, 1).half()], 1)
        h = h.contiguous()[:, :1].float().repeat(1, 3) * 0.5
        return h.sum(1).log()

    body = Inline(forward, l=lin(), guard=Guard())
    found = operand(lambda m, x: m["b"](x).sum(), nn.ModuleDict({"b": body}))
    assert (found.made_by, found.module, found.op) == ("flushed_epsilon", "b.guard", "aten.add")
    assert found.source.line == line("GUARD")
    assert found.float64 == pytest.approx(1.5e-9, rel=1e-6)


def test_a_flush_in_float32():
    found = operand(lambda m, x: (m(x) * 0 - 200).exp().log().sum())
    assert (found.made_by, found.dtype) == ("flushed", "float32")
    assert found.float64 == pytest.approx(math.exp(-200))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_one_that_is_rounded(dtype):
    def loss(m, x):
        p = (m(x) * 0 + 20).to(dtype).sigmoid()  # SIGMOID
        return (1 - p).log().float().sum()

    found = operand(loss)
    assert (found.made_by, found.op, found.source.line) == ("rounded_to_one", "aten.sigmoid", line("SIGMOID"))
    assert (found.here, found.dtype) == (0.0, str(dtype).removeprefix("torch."))
    assert found.float64 == pytest.approx(1 / (1 + math.exp(20)), rel=1e-4)


def test_a_loss_that_is_put_right_before_it_matters_is_not_blamed():
    def loss(m, x):
        h = (m(x) * 0).half() + 1e-8  # harmless: floored below
        h = h.clamp(min=1e-3)
        return (h / (m(x) * 0).half()).float().sum()  # TRUE ZERO

    found = operand(loss)
    assert (found.made_by, found.source.line) == ("computed", line("TRUE ZERO"))


def test_overwritten_losses_are_forgotten():
    def loss(m, x):
        h = (m(x) * 0).half().detach() + 1e-8
        h[:] = 1.0
        h.mul_(0.0)  # MADE
        return (m(x).half() / h).float().sum()

    found = operand(loss)
    assert (found.made_by, found.source.line) == ("computed", line("MADE"))


# -- computed, written, brought ----------------------------------------------------------------------------------------


def test_an_exact_zero_of_the_formula():
    found = operand(lambda m, x: (m(x) / (m(x) - m(x))).sum())
    assert (found.made_by, found.op, found.here, found.float64) == ("computed", "aten.sub", 0.0, None)


def test_a_zero_that_the_code_writes():
    assert operand(lambda m, x: (m(x) / torch.zeros(2)).sum()).made_by == "constant"
    found = operand(lambda m, x: m(x).div(0.0).sum())  # WRITTEN
    assert (found.made_by, found.source.line) == ("constant", line("WRITTEN"))


def test_a_count_of_nothing():
    def loss(m, x):
        mask = x > 5
        return m(x).sum() / mask.sum()  # COUNT

    found = operand(loss)
    assert (found.made_by, found.dtype) == ("computed", "bool")
    assert found.op == "aten.gt"


def test_a_zero_of_the_batch_through_ops():
    def loss(m, batch):
        norm = batch["x"].square().sum().sqrt().expand(2)
        return (m(batch["x"]) / norm).sum()

    found = operand(loss, batch={"x": torch.zeros(2)})
    assert (found.made_by, found.op, found.here) == ("data", None, 0.0)


def test_a_value_outside_the_domain():
    found = operand(lambda m, x: (m(x) * 0 - 2).log().sum())  # MINUS TWO
    assert (found.made_by, found.here, found.op, found.source.line) == ("computed", -2.0, "aten.sub", line("MINUS TWO"))
    found = operand(lambda m, x: (x - 3).sqrt().sum() + m(x).sum())
    assert (found.here, found.op) == (-2.0, "aten.sub")
    found = operand(lambda m, x: x.sqrt().sum() + m(x).sum(), batch=torch.tensor([-4.0, 1.0]))
    assert (found.here, found.made_by) == (-4.0, "data")


def test_targets_that_are_all_ignored():
    def loss(m, batch):
        return functional.cross_entropy(m(batch["x"]), batch["y"].flatten().clone())

    found = operand(loss, batch={"x": torch.ones(3, 2), "y": torch.full((3, 1), -100)})
    assert (found.made_by, found.here) == ("data", -100.0)


def test_a_masked_row_and_infinities_that_meet():
    def masked(m, x):
        return m(x).masked_fill(torch.tensor([True, True]), -math.inf).softmax(-1).sum()  # MASK

    found = operand(masked)
    assert (found.made_by, found.here, found.source.line) == ("masked_row", -math.inf, line("MASK"))
    found = operand(lambda m, x: (m(x) * torch.tensor([1.0, math.inf]) * torch.tensor([1.0, 0.0])).sum())
    assert found.made_by == "infinity"


def test_a_class_that_every_row_masks_is_no_masked_row():
    def entropy(m, x):
        log = m(x).masked_fill(torch.tensor([False, True]), -math.inf).log_softmax(-1)
        return (log.exp() * log).sum()

    assert operand(entropy, batch=torch.ones(3, 2)).made_by == "infinity"


def test_a_mask_that_is_added_up():
    """Label smoothing times -inf: what adds it up is named, and not the mask, which is well without smoothing."""

    def loss(m, x, smoothing=0.1, target=0):
        scores = m(x).masked_fill(torch.tensor([False, True]), -math.inf)  # SMOOTHED
        return functional.cross_entropy(scores, torch.full((3,), target), label_smoothing=smoothing)

    origin = only_birth(lin(), loss, batch=torch.ones(3, 2))
    assert (origin.where.op, origin.came_from, origin.operand.made_by) == ("aten.cross_entropy_loss", "op", "added_up")
    assert origin.operand.source.line == line("SMOOTHED")
    assert not births_of(lin(), lambda m, x: loss(m, x, 0.0), batch=torch.ones(3, 2))
    assert operand(lambda m, x: loss(m, x, 0.0, target=1), batch=torch.ones(3, 2)).made_by == "masked_target"


def test_a_number_that_python_made():
    found = operand(lambda m, x: (m(x) * float("nan")).sum())
    assert found.made_by == "number"
    assert math.isnan(found.here)


@pytest.mark.parametrize("read", [float, torch.Tensor.item])
def test_a_number_that_was_read_from_a_tensor_leads_back_to_it(read):
    """A trust ratio, 0 / 0, that the step takes as a number and multiplies with."""

    def loss(m, x):
        ratio = m(x).detach().norm() * 0 / (x.norm() * 0)  # RATIO
        masked = m(x).masked_fill(torch.zeros(1, 2, dtype=torch.bool), float("-inf"))
        return (masked * read(ratio)).sum()

    origins = births_of(lin(), loss)
    harmful = [origin for origin in origins if origin.affected]
    assert [(origin.where.op, origin.where.source.line) for origin in harmful] == [("aten.div", line("RATIO"))]


def test_an_empty_input():
    found = operand(lambda m, x: m(x)[:0].mean())
    assert (found.made_by, found.op) == ("empty_input", None)


# -- backward ----------------------------------------------------------------------------------------------------------


def test_a_backward_names_the_forward_op_that_flushed():
    def loss(m, x):
        h = (m(x) - m(x)).half().square() + 1e-8  # GUARDED
        return h.sqrt().float().sum()

    origin = only_birth(lin(), loss)
    assert origin.where.phase == "backward"
    assert (origin.operand.made_by, origin.operand.op) == ("flushed_epsilon", "aten.add")
    assert origin.operand.source.line == line("GUARDED")


# -- update ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizers_epsilon(foreach):
    origins = births_of(
        lin().half(),
        lambda m, x: m.weight[0].float().sum(),
        torch.ones(2).half(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=foreach),
        precision="fp16",
        autocast=False,
    )
    assert {b.where.tensor for b in origins} == {"weight"}
    assert {b.operand.made_by for b in origins} == {"flushed_epsilon"}
    assert {(b.operand.op, b.operand.dtype) for b in origins} == {("aten.add_", "float16")}


# -- nothing to explain ------------------------------------------------------------------------------------------------


def test_an_overflow_has_no_operand():
    origin = births_of(lin(), lambda m, x: (m(x).abs().half() + 1).mul(60000.0).float().sum())[0]
    assert origin.operand is None
    assert origin.recomputed.finite32 is True
    assert origin.recomputed.amax32 == pytest.approx(origin.recomputed.amax, rel=1e-3)


def test_losses_that_do_no_harm_leave_no_birth():
    def loss(m, x):
        p = (m(x).half() * 100 - 50).softmax(-1)
        return ((p + 1e-8) * functional.dropout(p).relu()).float().sum()

    trace, nonfinite = trace_of(lin(), loss)
    assert trace.origins == ()
    assert nonfinite.affected == ()
