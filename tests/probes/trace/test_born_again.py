"""An op that leaves its domain in the forward, and again in its derivative at the same operand, is one birth."""

import pytest
import torch
from torch import nn

from ampdoctor.diagnosis.replay.nonfinite import culprits
from tests.probes.traced import trace_of


class Masked(nn.Module):
    """`where` takes the bad values out again; the derivative multiplies them by zero."""

    def __init__(self, func):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.func = func

    def forward(self, x):
        x = self.layer(x)
        return torch.where(x > 0, self.func(x), torch.zeros_like(x))


class Squashed(nn.Module):
    """A finite value is made from the bad one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x) / torch.zeros(()))


def main_birth(module):
    torch.manual_seed(0)
    batch = torch.randn(8, 4)
    batch[0] = 0.0
    return culprits(trace_of(module, lambda model, x: model(x).mean(), batch)[0])[0]


@pytest.mark.parametrize("func", [torch.sqrt, torch.log])
def test_the_forward_is_named_also_where_its_own_value_is_masked_out(func):
    birth = main_birth(Masked(func))
    assert (birth.where.phase, birth.where.op) == ("forward", f"aten.{func.__name__}")
    assert all(sink.startswith("grad:") for sink in birth.harms), "the loss is finite"


def test_a_division_by_zero_that_tanh_makes_finite():
    birth = main_birth(Squashed())
    assert (birth.where.phase, birth.where.op) == ("forward", "aten.div")
