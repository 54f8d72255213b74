"""Small runs for the tests of profile and recommend; factories, as a user would write them."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a module called twice, an in-place activation, a frozen and an unused parameter."""

    def __init__(self, *, vocabulary=20, width=16, sparse=False):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width, sparse=sparse)
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if not sparse:
            self.head.weight = self.tok.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        x = self.tok(ids)
        x = self.block(self.block(x)) + self.frozen(x)
        return self.head(self.norm(x))


def ids(steps, batch=4, length=8, vocabulary=20, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (batch, length), generator=generator) for _ in range(steps)]


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def tied(*, steps=4, precision="fp16", scale=1024.0, sparse=False, accumulation=1, weight=1.0):
    torch.manual_seed(3)
    return TrainingRun(
        model=Net(sparse=sparse),
        batches=ids(steps * accumulation),
        loss=lambda model, batch: weight * cross_entropy(model, batch),
        optimizer=sgd,
        precision=precision,
        scaler=None if scale is None else {"init_scale": scale},
        accumulation_steps=accumulation,
    )


class TwoWorlds(nn.Module):
    """Two heads whose gradients lie further apart than fp16 reaches: no loss scale serves both."""

    def __init__(self, wide):
        super().__init__()
        self.loud = nn.Linear(8, wide)
        self.quiet = nn.Linear(8, 4)


def two_worlds(*, apart=45, wide=4):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def loss(model, batch):
        loud, quiet = model.loud(batch).float(), model.quiet(batch).float()
        return loud.square().mean() * 2.0**10 + quiet.square().mean() * 2.0 ** (10 - apart)

    return TrainingRun(
        model=TwoWorlds(wide),
        batches=[torch.randn(16, 8, generator=generator) for _ in range(4)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        precision="fp16",
        scaler={"init_scale": 16.0},
    )


def nothing_learns():
    model = nn.Linear(2, 1)
    model.requires_grad_(False)
    return TrainingRun(model=model, batches=[torch.ones(1, 2)], loss=lambda m, b: m(b).sum(), precision="fp16")


def no_batch():
    return TrainingRun(model=nn.Linear(2, 1), batches=[], loss=lambda m, b: m(b).sum(), optimizer=sgd)


def key_bias(*, scale=65536.0):
    """Attention with a key projection of its own, whose bias has no gradient but rounding noise."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

        def forward(self, x):
            weights = (self.query(x) @ self.key(x).transpose(-1, -2)).softmax(-1)
            return (weights @ self.value(x)).mean(1)

    generator = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=Attention(),
        batches=[torch.randn(4, 6, 16, generator=generator) for _ in range(4)],
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=sgd,
        precision="fp16",
        scaler={"init_scale": scale},
    )


def odd_scaler(**arguments):
    run = tied()
    run.scaler = arguments
    return run


def converging(*, steps=50, lr=1.2):
    """Least squares that are solved: gradients fall by 25 binades, and the loss scale is none the worse for it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.linalg.qr(torch.randn(32, 8, generator=generator))[0] * 32**0.5
    target = inputs @ torch.randn(8, 8, generator=generator)
    return TrainingRun(
        model=nn.Sequential(nn.Linear(8, 8, bias=False)),
        batches=[(inputs, target)] * steps,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]).float(), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        precision="fp16",
        scaler={},
    )


class Detour(torch.autograd.Function):
    """The identity, whose backward takes the gradient up and down again: no range that is measured tells of it."""

    @staticmethod
    def forward(ctx, x, binades):
        ctx.binades = binades
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0**ctx.binades * 2.0**-ctx.binades, None


def detour(*, binades=8, steps=14, scale=2.0**16):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return TrainingRun(
        model=model,
        batches=[torch.randn(16, 8, generator=generator) for _ in range(steps)],
        loss=lambda model, batch: model[1](Detour.apply(model[0](batch), binades)).float().square().mean(),
        optimizer=sgd,
        precision="fp16",
        scaler={"init_scale": scale},
    )
