"""Runs whose remedy is known, made to any size: chains and branches of modules of which some overflow in fp16."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun

BATCHES = 6


class Layer(nn.Module):
    """A linear layer; a loud one goes beyond fp16 on the way and comes back."""

    def __init__(self, width, *, loud):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))  # the values neither grow nor vanish, however many layers
        self.gain = 3e5 if loud else 1.0

    def forward(self, x):
        return functional.linear(x, self.weight) * self.gain / self.gain  # LOUD


class Chain(nn.Module):
    """One after the other: what is cured lets the next one's overflow come to light."""

    def __init__(self, layers, loud, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, loud=i in loud) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Branches(nn.Module):
    """Side by side: every overflow comes to light at once."""

    def __init__(self, layers, loud, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, loud=i in loud) for i in range(layers))

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def data(width=4, rows=3, batches=BATCHES):
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(rows, width, generator=generator) + 0.5 for _ in range(batches)]


def stack(kind, layers, loud, width=4):
    torch.manual_seed(0)
    model = {"chain": Chain, "branches": Branches}[kind](layers, set(loud), width)
    return TrainingRun(
        model=model,
        batches=data(width),
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        scaler={"init_scale": 16.0},
    )


def line(loss, **changes):
    """A small model whose loss is one line."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return TrainingRun(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        **{"batches": data(), "scaler": {"init_scale": 16.0}, **changes},
    )


def log_of_zero():
    return line(lambda m, x: (m(x).float().relu() * 0).log().mean() + m(x).float().square().mean())  # LOG


def nothing_counted_after_the_step():
    """Codes of which none is used in step 3: 0 / 0 in what runs behind the backward."""

    def after(run, step):
        counts = torch.zeros(4) if step == 3 else torch.tensor([3.0, 1.0, 0.0, 2.0])
        run.model.usage.mul_(0.9).add_(0.1 * (counts / counts.sum()))  # COUNTED

    made = line(lambda m, x: m(x).float().square().mean(), after_step=after)
    made.model.register_buffer("usage", torch.ones(4))
    return made


def _masked(loss):
    """Two of four classes are masked in step 3."""
    marked = [torch.cat([x, torch.full((len(x), 1), float(i == 3))], 1) for i, x in enumerate(data())]

    def masked(m, x):
        mask = (torch.arange(4) > 1) & (x[:, 4:] > 0)
        return loss(m(x[:, :4]).float().masked_fill(mask, float("-inf")))

    return line(masked, batches=marked)


def smoothing_over_a_mask():
    return _masked(lambda z: functional.cross_entropy(z, torch.zeros(len(z)).long(), label_smoothing=0.1))  # SMOOTHED


def equal_rewards():
    def loss(m, batch):
        x, reward = batch[:, :4], batch[:, 4]
        return -((reward - reward.mean()) / reward.std() * m(x).float().sum(-1)).mean()

    rewards = [torch.arange(3.0)[:, None] if i != 3 else torch.ones(3, 1) for i in range(BATCHES)]
    return line(loss, batches=[torch.cat([x, reward], 1) for x, reward in zip(data(), rewards, strict=True)])


def entropy_of_a_mask():
    return _masked(lambda z: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean())


class Adapted(nn.Module):
    """A frozen layer beside an adapter of two matrices, all of one half format."""

    def __init__(self, half, trained):
        super().__init__()
        self.base = nn.Linear(16, 16).to(half).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 16, dtype=trained) * 0.1)
        self.up = nn.Parameter(torch.randn(16, 2, dtype=trained) * 0.1)

    def forward(self, x):
        return self.base(x) + (x.to(self.down.dtype) @ self.down.T @ self.up.T).to(x.dtype)


def adapter(half, trained):
    torch.manual_seed(0)
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    model = Adapted(formats[half], formats[trained])
    return TrainingRun(
        model=model,
        batches=[batch.to(formats[half]) for batch in data(width=16)],
        loss=lambda m, x: m(x).float().square().mean() * (1e-4 if half == "fp16" else 1.0),
        optimizer=torch.optim.AdamW([model.down, model.up], lr=1e-5),
        precision=half,
        autocast=False,
        scaler=None,
    )


def norm_of_a_zero_row():
    """0 / 0 as the epsilon is flushed, and behind it a root whose derivative at 0 is infinite."""

    def loss(m, x):
        h = m(x) * (torch.arange(len(x)) > 0)[:, None]
        return (h / ((h * h).amax(-1, keepdim=True).sqrt() + 1e-9)).float().sum(-1).square().mean()  # NORM

    return line(loss)


def rounded_on_another_line():
    """1 - a of a schedule in half, whose first entry is 1.0 there and 0.9999 in fp32."""
    schedule = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def loss(m, x):
        a = schedule.half()[: len(x), None]  # ROUNDED
        return ((x - a.sqrt() * m(x)) / (1 - a).sqrt()).float().square().mean() / 100

    return line(loss)


def exp_beyond_fp32():
    return line(lambda m, x: (100.0 * m(x).float().sigmoid() + 40.0).exp().mean().log())  # EXP


def pure_half_exp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()

    def loss(m, x):
        hidden = m[0](x)
        return m[1]((hidden * 0 + 12.0).exp() / 1e5).mean()  # HALF

    return TrainingRun(
        model=model,
        batches=[batch.half() for batch in data()],
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        autocast=False,
        scaler=None,
    )


# -- steps that break the scaler's protocol ------------------------------------------------------------------------


def protocol(step, scale=1024.0):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return TrainingRun(
        model=model,
        batches=data(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        scaler={"init_scale": scale},
        step=step,
    )


def _backward(model, batch, optimizer, scaler, autocast):
    optimizer.zero_grad()
    with autocast():
        loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    return loss


def steps_past_an_overflow():
    def step(model, batch, optimizer, scaler, autocast):
        loss = _backward(model, batch, optimizer, scaler, autocast)
        optimizer.step()
        return loss.detach()

    return protocol(step, scale=2.0**22)


def scales_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(model, batch, optimizer, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = model(batch).float().square().sum()
        (loss * 2.0**20).backward()
        for parameter in model.parameters():
            parameter.grad.div_(2.0**20)
        optimizer.step()
        return loss.detach()

    return TrainingRun(
        model=model, batches=data(), optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), scaler=None, step=step
    )


# -- state that is broken before the first step --------------------------------------------------------------------


def broken(what):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in data(batches=2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        if what == "weight":
            model[0].weight[1, 1] = float("inf")
        elif what == "running":
            model.eval()
            model[1].running_var[2] = float("nan")
        elif what == "moment":
            optimizer.state[model[0].weight]["exp_avg_sq"].fill_(float("inf"))
    return TrainingRun(
        model=model,
        batches=data(),
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=optimizer,
        scaler={"init_scale": 16.0},
    )
