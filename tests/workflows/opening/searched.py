"""Models for the search over layers: towers whose layers count their calls, and values that do not stay bad."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun

WIDTH = 4
CALLS: list[tuple[str, int]] = []
"""(forward or backward, layer) of every layer that ran, in order; cleared by the tests."""


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.index = index
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CALLS.append(("backward", ctx.index))
        return gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, index, origin=""):
        super().__init__()
        self.index = index
        self.origin = origin
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        CALLS.append(("forward", self.index))
        self.seen += 1
        h = _Counted.apply(functional.linear(x, self.lin.weight, self.lin.bias), self.index)
        if self.origin == "forward":
            return h + torch.log(h - h - 1)
        if self.origin == "backward":
            return h + (h - h.detach()).abs().sqrt()
        return h


class Swallowing(nn.Module):
    """A user's net under their net."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        try:
            return self.layers(x)
        except Exception:  # noqa: BLE001 - what the case is about
            return x


class Masked(nn.Module):
    """The first layers' NaN is masked; the last ones bring another."""

    def __init__(self, first, layers):
        super().__init__()
        self.first = first
        self.layers = layers
        self.head = Layer(99)

    def forward(self, x):
        return self.head(self.layers(torch.nan_to_num(self.first(x).detach()) + x))


class Beside(nn.Module):
    """Made before the layers, masked, and added again behind them."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.head = Layer(99)

    def forward(self, x):
        bad = torch.log(x - x - 1)
        return self.head(self.layers(torch.nan_to_num(bad) + x) + bad)


def tower(count, at, origin):
    return nn.Sequential(*[Layer(i, origin if i == at else "") for i in range(count)])


def make_run(kind: str = "tower", layers: int = 8, at: int = 3, origin: str = "forward"):
    torch.manual_seed(0)
    if kind == "masked":  # a NaN that is dropped, then the culprit
        model = Masked(Layer(50, "forward"), tower(layers, at, origin))
    elif kind == "beside":
        model = Beside(tower(layers, -1, ""))
    elif kind == "swallowing":
        model = Swallowing(tower(layers, at, origin))
    else:
        model = tower(layers, at, origin)
    return TrainingRun(
        model=model,
        batches=[torch.rand(3, WIDTH) + 0.5 for _ in range(3)],
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
        precision="fp16",
        scaler={"init_scale": 4.0},
    )
