"""Half that the user's own code writes down is no part of the fp32 reference."""

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor import ReplayRequest, bisect_nan
from ampdoctor.precision.dtype_overrides import AutocastOverride

FILE = "tests/workflows/against_fp32/test_written_casts.py"


class Norm(nn.Module):
    """A norm taken in half by hand: the sum of squares overflows, and the quotient is silently 0."""

    def __init__(self, wide):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)
        self.wide = wide

    def forward(self, x):
        h = self.layer(x)
        n = h.float() if self.wide else h.half()
        return self.out(h / (n * n).sum(-1, keepdim=True).float().sqrt())


def make_run(*, wide=False):
    torch.manual_seed(0)
    model = Norm(wide)
    with torch.no_grad():
        model.layer.weight.mul_(1000.0)
    batches = [torch.randn(16, 8) for _ in range(4)]
    return ampdoctor.TrainingRun(
        model=model,
        batches=batches,
        loss=lambda model, x: (model(x).float() - x.mean(-1, keepdim=True)).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp16",
        scaler={"init_scale": 128.0},
    )


def make_ema(*, literal=True):
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Linear(8, 4), "ema": nn.Linear(8, 4).bfloat16()})
    model["ema"].load_state_dict(model["net"].state_dict())
    model["ema"].requires_grad_(requires_grad=False)

    def after_step(run, step):
        with torch.no_grad():
            for e, p in zip(run.model["ema"].parameters(), run.model["net"].parameters(), strict=True):
                e.lerp_(p.to(torch.bfloat16) if literal else p.to(e.dtype), 5e-4)

    return ampdoctor.TrainingRun(
        model=model,
        batches=[torch.randn(16, 8) for _ in range(4)],
        loss=lambda model, x: (model["net"](x) - 3.0).square().mean(),
        optimizer=torch.optim.SGD(model["net"].parameters(), lr=1e-1),
        precision="bf16",
        after_step=after_step,
    )


def replay(function, **arguments):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{function}", arguments=arguments))


def test_an_overflow_in_half_by_hand_that_stays_finite_is_found():
    (finding,) = replay("make_run").findings
    assert (finding.code, finding.cause, finding.where.phase) == ("AMP201", "forward_overflow", "forward")
    assert finding.where.op in ("aten.mul", "aten.sum")
    assert (finding.prescription.kind, finding.prescription.status) == ("code", "intervention")


def test_the_same_in_float_is_well():
    assert replay("make_run", wide=True).verdict == "healthy"


@pytest.mark.parametrize("literal", [True, False])
def test_an_average_that_stands_still_is_found_however_the_cast_is_written(literal):
    (finding,) = replay("make_ema", literal=literal).findings
    assert (finding.code, finding.where.module, finding.where.op) == ("AMP508", "ema", "aten.lerp_")
    cure = finding.prescription
    expected = ("code", "intervention") if literal else ("fp32_modules", "verified")
    assert (cure.kind, cure.status) == expected
    assert [one.kind for one in cure.alternatives] == (["fp32_modules"] if literal else [])


def test_an_override_outside_and_a_caller_without_gradients_do_not_reach_a_replay():
    with AutocastOverride(torch.bfloat16), torch.inference_mode():
        (finding,) = replay("make_run").findings
        assert finding.code == "AMP201"
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
