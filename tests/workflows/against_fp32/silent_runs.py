"""Runs that stay finite: sick ones, and their healthy twins."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampdoctor import TrainingRun

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Factored(torch.optim.Optimizer):
    """Second moments by rows and columns in fp32, as Adafactor's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.float()
                square = grad.square().add(1e-30).reshape(-1, p.shape[-1])
                if not state:
                    state["row"], state["column"] = square.mean(-1), square.mean(0)
                state["row"].lerp_(square.mean(-1), 0.1)
                state["column"].lerp_(square.mean(0), 0.1)
                size = (state["row"] / state["row"].mean()).unsqueeze(-1) * state["column"]
                p.add_((grad * size.rsqrt().view_as(p)).to(p.dtype), alpha=-group["lr"])


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, eps=1e-5),
    "adafactor": Factored,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(8, 32)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        h = self.emb(x)
        return self.head(h + self.block(h))


def batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 8, generator=generator).to(dtype) for _ in range(3)]


def mean_square(model, x):
    return model(x).float().square().mean()


def pure_half(optimizer: str, lr: float, precision: str, *, master_weights: bool = False) -> TrainingRun:
    torch.manual_seed(0)
    model = Net().to(DTYPES[precision])
    return TrainingRun(
        model=model,
        batches=batches(DTYPES[precision]),
        loss=mean_square,
        optimizer=OPTIMIZERS[optimizer](model.parameters(), lr),
        precision=precision,
        autocast=False,
        scaler=None,
        master_weights=master_weights,
    )


def averaged(decay: float, precision: str, *, master_weights: bool = False) -> TrainingRun:
    torch.manual_seed(0)
    net = Net().to(DTYPES[precision])
    model = nn.ModuleDict({"net": net, "ema": AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))})
    model["ema"].requires_grad_(False)

    def after_step(run, step):
        model["ema"].update_parameters(model["net"])

    return TrainingRun(
        model=model,
        batches=batches(DTYPES[precision]) * 2,  # the first update of an average copies: several have to follow
        loss=lambda m, x: mean_square(m["net"], x),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        precision=precision,
        autocast=False,
        scaler=None,
        master_weights=master_weights,
        after_step=after_step,
    )


def small_loss(factor: float, scale: float | None, *, hidden: bool = False, half: bool = False) -> TrainingRun:
    torch.manual_seed(0)
    model, count = Net().half() if half else Net(), itertools.count().__next__

    def loss(m, x):
        return mean_square(m, x * (1 + 0.01 * count()) if hidden else x) * factor

    return TrainingRun(
        model=model,
        batches=batches(torch.float16 if half else torch.float32),
        autocast=not half,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e4)
        if half
        else torch.optim.Adam(model.parameters(), lr=1e-3),
        precision="fp16",
        scaler=None if scale is None else {"init_scale": scale},
    )


def chaotic(precision: str) -> TrainingRun:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(30.0)
    return TrainingRun(
        model=model,
        batches=batches(),
        loss=mean_square,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision=precision,
        scaler={"init_scale": 1024.0} if precision == "fp16" else None,
    )


def few_pictures() -> TrainingRun:
    """Batch norm over a handful of values: any rounding grows from layer to layer.

    How far, hangs on the last bit, and so on the processor: one batch and small steps make it about as far each time.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(24):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))
    return TrainingRun(
        model=model,
        batches=[torch.randn(2, 3, 4, 4)] * 3,
        loss=mean_square,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-7),
        scaler={"init_scale": 1024.0},
    )


def warming_up(*, steps_at_zero=0, rises_over=0, full=2e-2, by_hand=False):
    """A small model in pure bf16 under a warm-up: at its first learning rates nothing of it moves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), full)
    count = {"steps": 0}

    def share():
        rising = count["steps"] - steps_at_zero
        return 0.0 if rising < 0 else min(1.0, (rising + 1) / (rises_over or 1))

    schedule = None if by_hand else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: share())

    def step(model, batch, optimizer):
        if by_hand:
            optimizer.param_groups[0]["lr"] = full * share()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        loss.backward()
        optimizer.step()
        count["steps"] += 1
        if schedule is not None:
            schedule.step()
        return loss

    drawn = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(16, 16, generator=drawn).bfloat16(), torch.randint(0, 4, (16,), generator=drawn))
        for _ in range(40)
    ]
    return TrainingRun(model=model, optimizer=optimizer, step=step, batches=batches, precision="bf16", autocast=False)


class Trusting(torch.optim.Optimizer):
    """Steps as long as their weights, as LAMB's: the squared norm of the update is summed up in its own format."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                trust = p.float().norm() / (update * update).sum().sqrt()
                p.add_((trust * update.float()).to(p.dtype), alpha=-group["lr"])


def trusting(times):
    """Pure fp16: where the loss is large, the squared gradient of one layer is infinite, and its step 0."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(8, 16), "head": nn.Linear(16, 2)}).half()
    drawn = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=model,
        loss=lambda model, x: times * model["head"](torch.tanh(model["body"](x))).float().square().mean(),
        optimizer=Trusting(model.parameters(), 0.05),
        batches=[torch.randn(16, 8, generator=drawn).half() for _ in range(4)],
        precision="fp16",
        autocast=False,
    )


def settled(momentum=0.01):
    """Pure bf16 with a BatchNorm whose running statistics have settled: they stand still in most steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Tanh(), nn.Linear(16, 2))
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randn(256, 8, generator=drawn) for _ in range(8)]
    with torch.no_grad():
        features = model[0](torch.cat(batches))
        model[1].running_mean.copy_(features.mean(0))
        model[1].running_var.copy_(features.var(0))
    return TrainingRun(
        model=model.bfloat16(),
        loss=lambda model, batch: model(batch.bfloat16()).float().square().mean(),
        optimizer=torch.optim.SGD([*model[3].parameters()], lr=0.1),
        batches=batches,
        precision="bf16",
        autocast=False,
    )
