"""Training steps as people write them: healthy habits that look odd, and faults that hide in them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ampdoctor import TrainingRun


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def _batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)) for _ in range(count)
    ]


def _loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def _run(**parts):
    defaults = {
        "model": _net(),
        "batches": _batches(),
        "loss": _loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "scaler": {},
    }
    return TrainingRun(**{**defaults, **parts})


def fused(scale=65536.0):
    """The optimizer unscales, and skips, by itself."""
    return _run(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), scaler={"init_scale": scale}
    )


def guards_itself(scale=2.0**20, *, halves=True):
    """A loss scaled by hand; the step is left out, and the scale halved, where a gradient is not finite."""
    own = {"scale": scale}
    model = _net()

    def step(model, batch, optimizer, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch)
        (loss * own["scale"]).backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            for p in model.parameters():
                p.grad.mul_(1 / own["scale"])
            optimizer.step()
        elif halves:
            own["scale"] /= 2
        return loss

    return _run(model=model, step=step, loss=None, scaler=None)


def checks_the_norm(scale=2.0**20):
    """Unscale, clip, and a plain step where the norm is finite; the scaler learns of it from its own unscaling."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
        scaler.update()
        return loss

    return _run(step=step, loss=None, scaler={"init_scale": scale})


def counter_in_a_closure():
    """A warm-up counter of the loss's own."""
    calls = []

    def loss(model, batch):
        calls.append(None)
        return _loss(model, batch) * min(1.0, len(calls) / 4)

    return _run(loss=loss)


def accumulates_by_a_counter(scale=2.0**20):
    """The user's own counter decides when to step; the scale comes down meanwhile."""
    calls = []

    def step(model, batch, optimizer, scaler, autocast):
        if len(calls) % 2 == 0:
            optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch) / 2
        scaler.scale(loss).backward()
        if len(calls) % 2:
            scaler.step(optimizer)
            scaler.update()
        calls.append(None)
        return loss

    return _run(loss=None, step=step, scaler={"init_scale": scale})


def own_generator():
    """Noise from a generator that nobody else knows."""
    generator = torch.Generator().manual_seed(3)

    def loss(model, batch):
        return _loss(model, (batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]))

    return _run(loss=loss)


def shuffled_loader_and_dropout():
    data = TensorDataset(*(torch.cat(part) for part in zip(*_batches(), strict=True)))
    return _run(batches=DataLoader(data, batch_size=16, shuffle=True))


def scaler_in_a_closure():
    scaler = torch.amp.GradScaler("cpu")

    def step(model, batch, optimizer, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return _run(loss=None, step=step, scaler=scaler)


def never_cleared():
    """`zero_grad` only after a step that was taken: one overflow stays in the gradients for ever."""

    def step(model, batch, optimizer, scaler, autocast):
        with autocast():
            loss = _loss(model, batch)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            optimizer.zero_grad()
        return loss

    return _run(loss=None, step=step, scaler={"init_scale": 2.0**26})


def past_the_scaler():
    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
        return loss

    return _run(loss=None, step=step, scaler={"init_scale": 2.0**26})


def nan_loss_as_a_number():
    """The loop guards itself: a bad batch is left out, and the loss returned as a float."""

    def step(model, batch, optimizer, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, batch) + torch.log(batch[0].sum() * 0)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        return loss.item()

    return _run(loss=None, step=step, scaler=None)


def nothing_happens():
    return _run(loss=None, step=lambda: None)


def diverges():
    return _run(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e12), precision="fp32", scaler=None)
