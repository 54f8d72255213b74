"""Kernels that give NaN where the arithmetic is finite and in range: named as such, and other kernels are tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

ARITHMETIC = "this kernel returns NaN where the result is finite and in range"


@pytest.fixture
def library():
    made = torch.library.Library("ampdoctor_tests", "DEF")
    yield made
    made._destroy()


def spoiled(values, *, wrong):
    if not wrong:
        return values
    values = values.clone()
    values[0, -1] = float("nan")
    return values


class ByFunction(torch.autograd.Function):
    """Its backward is an operator of the user's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.ops.ampdoctor_tests.sin_backward(gradient, x)


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.q, self.o, self.middle = nn.Linear(8, 8), nn.Linear(8, 4), middle

    def forward(self, x):
        return self.o(self.middle(self.q(x)))


def report_of(middle, *, precision="bf16", at=2, **given):
    """A run of four steps, the third with another shape."""

    def make_run():
        torch.manual_seed(0)
        model = Net(middle)
        batches = [torch.randn(3 if step == at else 4, 8) for step in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = {"init_scale": 64.0} if precision == "fp16" else None
        return TrainingRun(
            model=model,
            batches=batches,
            loss=lambda model, x: model(x).float().square().mean(),
            optimizer=optimizer,
            precision=precision,
            scaler=scaler,
            **given,
        )

    return bisect_nan(ReplayRequest(factory=make_run))


def half(tensor):
    return tensor.dtype in (torch.float16, torch.bfloat16)


def error_of(report):
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert errors, report.verdict
    return errors[0]


def test_a_backward_of_the_users_own_that_is_wrong_for_one_shape(library):
    library.define("sin_backward(Tensor g, Tensor x) -> Tensor")
    library.impl(
        "sin_backward",
        lambda g, x: spoiled(g * torch.cos(x.float()).to(g.dtype), wrong=half(g) and g.shape[0] == 3),
        "CompositeExplicitAutograd",
    )
    finding = error_of(report_of(ByFunction.apply, precision="fp16"))
    assert finding.cause == "kernel_defect"
    assert finding.where.step == 2
    assert finding.where.phase == "backward"
    assert ARITHMETIC in finding.message
    assert "constant" not in finding.message
    cure = finding.prescription
    tried = [cure, *cure.alternatives]
    assert any("oneDNN off" in one.detail and one.status == "failed" for one in tried)
    assert all("proves no cause" in one.detail for one in tried if one.kind in ("dtype", "fp32_modules"))
    assert "Try another kernel" in finding.help


def test_nan_that_the_code_writes_down_is_said_to_be_written():
    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return spoiled(x * 2, wrong=half(x) and x.shape[0] == 3)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    finding = error_of(report_of(Marked.apply))
    assert "the code writes NaN here" in finding.message
    assert "before" not in finding.message
    assert "Write a finite number there" in finding.help


def test_memory_that_is_written_behind_the_back_of_torch():
    """As a kernel of Triton's does it, or one that ctypes calls: no op of torch's runs."""

    def behind(made, *, wrong):
        if wrong:
            made.detach().view(torch.int16).numpy().reshape(-1)[1] = 0x7FFF  # NaN in both halves
        return made

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return behind(gradient * 2, wrong=half(gradient) and len(gradient) == 3)

    finding = error_of(report_of(Fused.apply))
    assert finding.cause == "kernel_defect"
    assert (finding.where.op, finding.where.phase) == ("aten.mul", "backward")
    assert finding.where.source.file.endswith("test_kernel_defects.py")
    assert "code outside torch" in finding.message


def test_an_operator_that_shows_other_memory_each_time(library):
    calls = []

    def racing(x):
        calls.append(0)
        return spoiled(torch.sin(x), wrong=half(x) and x.shape[0] == 3 and torch.is_grad_enabled())

    library.define("sine(Tensor x) -> Tensor")
    library.impl("sine", racing, "CompositeExplicitAutograd")
    finding = error_of(report_of(lambda x: x + torch.ops.ampdoctor_tests.sine(x.detach())))
    assert finding.cause == "kernel_defect"
    assert "a finite result again from the same inputs" in finding.message
    assert finding.evidence["comes_again"] is False


def test_an_attention_kernel_that_is_wrong_is_cured_by_another(monkeypatch, library):
    """A flash kernel that is wrong for one length; torch's own attention, which `sdpa_kernel` chooses, is right."""
    library.define("attention(Tensor x) -> Tensor")
    library.impl(
        "attention", lambda x: spoiled(x * 0.5, wrong=half(x) and x.shape[1] == 3), "CompositeExplicitAutograd"
    )
    original = functional.scaled_dot_product_attention

    def attention(q, k, v, *args, **kwargs):
        out = original(q, k, v, *args, **kwargs)
        if torch.backends.cuda.flash_sdp_enabled():
            return out + torch.ops.ampdoctor_tests.attention(out.detach())
        return out + 0.5 * out.detach()

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    finding = error_of(report_of(lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]))
    assert finding.cause == "kernel_defect"
    assert finding.prescription.status == "intervention"
    assert "SDPBackend.MATH" in finding.prescription.detail


def test_a_constant_of_the_op_that_its_format_loses(library):
    library.define("normalised(Tensor x, float eps) -> Tensor")
    library.impl(
        "normalised", lambda x, eps: (x - x) / ((x - x) + torch.tensor(eps, dtype=x.dtype)), "CompositeExplicitAutograd"
    )
    finding = error_of(
        report_of(lambda x: x + torch.ops.ampdoctor_tests.normalised(x.detach(), 1e-9), precision="fp16", at=9)
    )
    assert finding.cause == "invalid_op"
    assert "not in fp64: a constant of 1e-09 inside the op becomes 0" in finding.message


def test_a_healthy_operator_is_left_alone(library):
    library.define("sin_backward(Tensor g, Tensor x) -> Tensor")
    library.impl("sin_backward", lambda g, x: g * torch.cos(x.float()).to(g.dtype), "CompositeExplicitAutograd")
    assert report_of(ByFunction.apply).verdict == "healthy"
