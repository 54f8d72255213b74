"""Every shape of model as a run: its batches, loss, optimizer and step."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ampdoctor import TrainingRun
from tests.workflows.shape_models import MODELS, WIDTH, Normalised, Plain

STEPS = 3
LAST = []
"""The runs that the factory made, for a look at what a replay leaves behind."""


class Rows(Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        x, y = rows()
        x = x * 1000 if 4 <= index < 8 else x
        return x[index % 4], y[index % 4]


def rows():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, WIDTH, generator=generator).abs() + 0.5
    return x, torch.randint(0, WIDTH, (4,), generator=generator)


def batches():
    for step in range(STEPS):
        x, y = rows()
        yield (x * 1000 if step == 1 else x), y


def loss_of(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x).float(), y)


def penalty(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    return functional.cross_entropy(out.float(), y) + 1e-3 * (gradient.float().pow(2).sum(1) - 1).abs().mean()


def two_optimizers(model, body):
    return {
        "body": body([*model.first.parameters(), *model.culprit.parameters()], lr=1e-3),
        "head": torch.optim.Adam(model.head.parameters(), lr=1e-3),
    }


def step_in_chunks(model, batch, optimizer, scaler, autocast):
    """Micro-batches of the user's own, inside one step."""
    optimizer.zero_grad()
    for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        with autocast():
            loss = loss_of(model, (x, y)) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def batches_with_a_loud_half():
    for step in range(STEPS):
        x, y = rows()
        x[2:] *= 1000 if step == 1 else 1
        yield x, y


def halves():
    for x, y in batches():
        yield x.half(), y


def make_run(shape: str = "plain", origin: str = "forward"):
    torch.manual_seed(0)
    model = MODELS.get(shape, Plain)(origin)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    kind = Normalised if origin == "optimizer" else torch.optim.SGD
    rate = 1e-2 if shape == "fast_path" else 1e-4  # without fp32 masters a small update rounds away
    extra = {}
    if shape == "gradient_penalty":
        extra = {"loss": penalty}
    elif shape == "two_optimizers":
        extra = {"optimizer": two_optimizers(model, kind)}
    elif shape == "accumulation":
        extra = {"accumulation_steps": 4, "batches": [b for b in batches() for _ in range(4)]}
    elif shape == "own_chunks":
        extra = {"step": step_in_chunks, "batches": batches_with_a_loud_half}
    elif shape == "fast_path":
        extra = {"autocast": False, "scaler": None, "batches": halves}
    elif shape == "loader_workers":
        extra = {"batches": DataLoader(Rows(), batch_size=4, num_workers=1)}
    elif shape == "lbfgs":
        extra = {"optimizer": torch.optim.LBFGS(model.parameters())}
    given = {
        "model": model,
        "batches": batches,
        "loss": loss_of,
        "optimizer": kind([p for p in model.parameters() if p.requires_grad], lr=rate),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
        **extra,
    }
    LAST.append(TrainingRun(**given))
    return LAST[-1]
