"""The forward beside fp32: the op that makes a large error, and the op that rounded; nothing of the step is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.probes.forward_fp32 import WideForwardProbe
from tests.probes.traced import Inline, session_of, stepped

HALF = torch.bfloat16


def seen(function, batch, **children):
    """(op, op that rounded) of everything that was recorded in one step's forward."""
    model = Inline(function, w=nn.Linear(1, 1), **children)
    probe = WideForwardProbe()
    session = session_of(model, lambda model, x: model(x).float().square().sum() + model.w.weight.sum(), [batch])
    stepped(session, probe)
    session.close()
    return [(one.where.op, one.source.op) for one in probe.amplified]


LONG = torch.arange(700.0)


@pytest.mark.parametrize(
    ("function", "batch", "found"),
    [
        (lambda _, x: torch.arange(len(x), dtype=HALF).sin(), LONG, ("aten.sin", "aten.arange")),
        (lambda _, x: x.to(HALF).cos(), LONG, ("aten.cos", "aten._to_copy")),
        (
            lambda _, x: torch.eye(700)[torch.ones(700, dtype=HALF).cumsum(0).long() - 1],
            LONG,
            ("aten.index", "aten.cumsum"),
        ),
        (lambda _, x: 1 - torch.sigmoid(x.to(HALF)), torch.full((8,), 9.0), ("aten.rsub", "aten.sigmoid")),
        (lambda _, x: x.to(HALF).diff(), 1000 + LONG[:8] / 8, ("aten.diff", "aten._to_copy")),
        (lambda _, x: x.clone().to(HALF).view(-1, 2).t().contiguous().sin(), LONG, ("aten.sin", "aten._to_copy")),
        (lambda _, x: x.new_zeros(700, dtype=HALF).add_(x).cos_(), LONG, ("aten.cos_", "aten.add_")),
        (lambda _, x: 1 - torch.tensor([0.999, 0.998], dtype=HALF), LONG, ("aten.rsub", "aten.tensor")),
    ],
    ids=["arange", "cast", "count", "saturated", "difference", "views", "in place", "numbers"],
)
def test_the_op_that_suffers_and_the_op_that_rounded_are_named(function, batch, found):
    assert found in seen(function, batch)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: torch.arange(200, dtype=HALF).cos(),  # whole numbers up to 256 are exact
        lambda _, x: x.to(HALF).float().tanh().mul(3).softmax(0),
        lambda _, x: torch.where(x > 3, x.to(HALF), float("-inf")).softmax(0),
        lambda _, x: nn.functional.layer_norm(x.to(HALF) - x.to(HALF).mean(), (700,)),  # its mean is only rounding
        lambda _, x: nn.functional.dropout(x.to(HALF), 0.5),
        lambda _, x: torch.rand(700, dtype=HALF).sin(),
        lambda _, x: x.double().cos(),
        lambda _, x: (40 * (x.to(HALF).view(7, 100) @ torch.eye(100, dtype=HALF) * 0.3)).exp(),
    ],
    ids=["exact", "smooth", "mask", "norm", "dropout", "random", "wide", "out of a product"],
)
def test_ordinary_rounding_is_left_alone(function):
    assert seen(function, LONG / 100) == []


class Counting(nn.Module):
    """What a second run of an op would change: running statistics, a counter, a buffer, the random state."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        hidden = self.norm(self.body(x))
        self.mean.lerp_(hidden.detach().float().mean(0), 0.1)
        return nn.functional.dropout(hidden, 0.3) + torch.randn(8)


def trained(*probes):
    torch.manual_seed(0)
    model = Counting()
    session = session_of(
        model,
        lambda model, x: model(x).float().square().mean(),
        [torch.randn(16, 4) for _ in range(3)],
        precision="bf16",
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    )
    losses = [outcome.loss for outcome in stepped(session, *probes, steps=3)]
    state = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    session.close()
    return losses, state


def test_a_watched_step_changes_no_bit():
    (losses, state), (watched, left) = trained(), trained(WideForwardProbe())
    assert watched == losses
    assert all(torch.equal(left[name], tensor) for name, tensor in state.items())
    assert int(left["calls"]) == 3
