"""Runs that write single tensors wrongly, and their healthy twins."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun


class Kahan(torch.optim.Optimizer):
    """What rounding loses of a step is kept, and added to the next."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                lost = state.setdefault("lost", torch.zeros_like(p))
                lost.sub_((group["lr"] * p.grad.float().sign()).to(p.dtype))
                before = p.clone()
                p.add_(lost)
                lost.add_(before - p)


class Stochastic(torch.optim.Optimizer):
    """Rounds to bf16 up or down by chance; fp32 weights it leaves as they are."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                wide = p.float() - group["lr"] * p.grad.float().sign()
                bits = wide.view(torch.int32) + torch.randint_like(wide, 1 << 16).int()
                p.copy_((bits & -65536).view(torch.float32) if p.dtype is torch.bfloat16 else wide)


OPTIMIZERS = {"adam": lambda p, lr: torch.optim.Adam(p, lr=lr), "kahan": Kahan, "stochastic": Stochastic}


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, x):
        return nn.functional.normalize(self.body(x).float(), dim=-1) * self.scale.float().exp()


def tempered(*, lr: float = 1e-3, optimizer: str = "adam", held: bool = True) -> TrainingRun:
    """A temperature in bf16."""
    torch.manual_seed(0)
    model = Tempered().bfloat16()
    trained = model.parameters() if held else model.body.parameters()
    return _run(model, OPTIMIZERS[optimizer](trained, lr), torch.bfloat16, classes)


def stepped(eps: float, *, gain: float = 1.0) -> TrainingRun:
    """Gradients whose squares, a thousandth of them, fp16 cannot hold; with the gain it can."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    return _run(model, optimizer, torch.float16, lambda m, x: gain * 0.03 * classes(m, x))


class Running(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.body(x))).float()


def running(momentum: float) -> TrainingRun:
    torch.manual_seed(0)
    model = Running(momentum).bfloat16()
    return _run(model, torch.optim.SGD(model.parameters(), lr=0.5), torch.bfloat16, classes)


class Counter(nn.Module):
    def __init__(self, start, by):
        super().__init__()
        self.register_buffer("count", torch.tensor(start))
        self.register_buffer("seen", torch.zeros(16))
        self.by = by

    def forward(self, x):
        with torch.no_grad():
            self.count += self.by
            self.seen += x.mean(0)
        return x


def counted(start: float, *, by: float = 1.0) -> TrainingRun:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 16))
    model.add_module("counter", Counter(start, by))
    model.add_module("head", nn.Linear(16, 4))
    return _run(model.half(), torch.optim.SGD(model.parameters(), lr=0.1), torch.float16, classes)


def averaged(decay: float, *, anew: bool = False, gains: bool = False, lr: float = 0.1) -> TrainingRun:
    """An average in a dict that the loop's own code keeps, written in place or bound anew; of norm gains as well."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(16, bias=False) if gains else nn.Identity()
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def after_step(run, step):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if anew:
                    shadow[name] = decay * shadow[name] + (1 - decay) * p
                else:
                    shadow[name].lerp_(p.to(shadow[name].dtype), 1 - decay)

    optimizer = torch.optim.Adam if gains else torch.optim.SGD
    run = _run(model, optimizer(model.parameters(), lr=lr), torch.bfloat16, classes)
    run.after_step = after_step
    return run


def classes(model, x):
    return nn.functional.cross_entropy(model(x).float(), x[:, :4].float().argmax(1))


def _run(model, optimizer, dtype, loss):
    generator = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=model,
        batches=[torch.randn(16, 8, generator=generator).to(dtype) for _ in range(6)],
        loss=loss,
        optimizer=optimizer,
        precision="fp16" if dtype is torch.float16 else "bf16",
        autocast=False,
        scaler=None,
    )
