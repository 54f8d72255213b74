"""Runs at the edges: nothing to replay, user code that raises, state that hides, scalers that are used wrongly."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun

LAST = []
"""The runs that the factory made, for a look at what a replay leaves behind."""


def batches(count=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def loss(model, x):
    return model(x).float().square().mean()


def run(**changes):
    torch.manual_seed(0)
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    given = {
        "model": model,
        "batches": batches(),
        "loss": loss,
        "optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3) if any(True for _ in m.parameters()) else None,
        "scaler": {"init_scale": 16.0},
        **changes,
    }
    made = TrainingRun(**given)
    LAST.append(made)
    return made


def no_batches():
    return run(batches=[])


def incomplete_accumulation():
    return run(batches=batches(5), accumulation_steps=2)


def loss_none():
    return run(loss=lambda model, x: None)


def loss_vector():
    return run(loss=lambda model, x: model(x))


def raising_loss(model, x):
    if model(x) is not None:
        raise ValueError("the user's own mistake")


def loss_raises():
    return run(loss=raising_loss)


def after_step_raises():
    def after_step(run, step):
        if step == 1:
            raise KeyError("after_step")

    return run(after_step=after_step)


class NoParameters(nn.Module):
    def forward(self, x):
        return x * 2.0


def no_parameters():
    return run(model=NoParameters(), optimizer=None)


def no_optimizer():
    return run(optimizer=None)


_FOREVER = itertools.count().__next__


def nondeterministic():
    """Each call sees other numbers, over fresh calls of the factory as well."""

    def odd(model, x):
        out = model(x + _FOREVER()).float()
        return (out - out).log().sum()

    return run(loss=odd)


def closure_counter():
    """Step 2 is sick because a counter in a closure says so: a snapshot cannot bring it back, a fresh run can."""
    calls = itertools.count().__next__

    def counted(model, x):
        out = model(x).float()
        if calls() == 2:
            return (out - out).log().mean() + out.square().mean()  # HIDDEN
        return out.square().mean()

    return run(loss=counted)


def module_counter():
    """The same, with the counter where a snapshot holds it."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            out = super().forward(x)
            return (out - out).log() if self.calls == 3 else out

    return run(model=nn.Sequential(Counting(3, 2)))


def overflow():
    def big(model, x):
        return (model(x) * 1e6).float().mean()

    return run(loss=big)


def preprocessing_micro_batch():
    """Born in loss code before the model, after an earlier micro-batch's backward."""

    def prepare(model, x):
        with torch.no_grad():
            x = x / x.abs().amax() if float(x[0, 0]) != 7.0 else (x - x) / (x - x)
        return model(x).float().mean()

    many = batches(4)
    many[3][0, 0] = 7.0
    return run(batches=many, accumulation_steps=2, loss=prepare)


class Remembering(nn.Linear):
    """Buffers that start out non-finite on purpose, and that no op of a step reads."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("best", torch.tensor(float("inf")))
        self.register_buffer("unset", torch.full((2,), float("nan")))


def meant_buffers():
    return run(model=nn.Sequential(Remembering()))


class MaskedOverflow(nn.Module):
    """A mask lies on the path of a real overflow."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, float("-inf")]))

    def forward(self, x):
        h = self.lin(x) * 1e6  # OVERFLOW
        return (h + self.mask).softmax(-1)


def masked_overflow():
    return run(model=MaskedOverflow(), loss=lambda m, x: (m(x)[:, 0] - 1).float().square().mean())


def frozen_mask_parameter():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 4)
            self.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, float("-inf")]), requires_grad=False)

        def forward(self, x):
            return (self.lin(x) + self.mask).softmax(-1)

    return run(model=Masked())


def lazy_module():
    return run(model=nn.LazyLinear(2), optimizer=None)


def root_of_zero(model, x):
    out = model(x)
    return (out - out.detach()).abs().sqrt().float().sum()  # ANOMALY


def average_by_deepcopy():
    kept = {}

    def after_step(run, step):
        average = kept.setdefault("average", copy.deepcopy(run.model) if not kept else None)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), run.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
            average(torch.ones(2, 3))

    return run(after_step=after_step)


def spectrum(*, sick: bool = False):
    def of_spectrum(model, x):
        values = torch.fft.fft(model(x).float())
        return (values / (values * 0) if sick else values).abs().mean()

    return run(loss=of_spectrum)


def anomaly_mode():
    """As users leave it on who have looked for a NaN already."""
    torch.autograd.set_detect_anomaly(True)
    return run(loss=root_of_zero)


def ctc():
    """ctc leaves uninitialised memory in what it saves."""

    def ctc_loss(model, x):
        out = model(x).float().log_softmax(-1).unsqueeze(1)
        return functional.ctc_loss(out, torch.tensor([[1]]), torch.tensor([len(out)]), torch.tensor([1]))

    return run(loss=ctc_loss)
