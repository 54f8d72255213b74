"""What the trainings learn: eight tasks on data that is made, each with the optimizer that its kind is trained with.

Each function draws sizes, optimizer settings and the data's own law from `draw`, and gives the same run for the same
draw. Batches depend on the run and the step alone.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from benchmarks.alerting.loop import Batch, Run
from benchmarks.alerting.nets import (
    Autoencoder,
    Cnn,
    Fp8Linear,
    HalfLinear,
    Mixture,
    Mlp,
    Recurrent,
    Transformer,
    TwoTowers,
)

CLEAN = -1
"""The step that the clean data is drawn as."""
LINEAR: dict[str, type[nn.Linear]] = {"fp32": nn.Linear, "fp16": HalfLinear, "fp8": Fp8Linear}


def classify(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """Points, and the class that a random network gives them; one label in twenty is wrong."""
    law = _law(draw)
    inputs, classes, size = draw.choice([12, 16, 24]), draw.choice([4, 6, 10]), draw.choice([32, 64])
    teacher = torch.randn(inputs, 24, generator=law) / math.sqrt(inputs), torch.randn(24, classes, generator=law)
    model = Mlp(
        inputs, draw.choice([24, 32, 48]), draw.choice([2, 3, 4]), classes,
        norm=draw.random() < 0.5 or "norm" in own, linear=LINEAR[precision],
    )  # fmt: skip

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        count = 256 if step == CLEAN else size
        x = torch.randn(count, inputs, generator=source)
        y = ((2 * x @ teacher[0]).tanh() @ teacher[1]).argmax(1)
        wrong = torch.rand(count, generator=source) < (0.0 if step == CLEAN else 0.05)
        return x, torch.where(wrong, torch.randint(classes, (count,), generator=source), y)

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([1e-3, 2e-3, 3e-3]))
    return _run(
        draw,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda b: F.cross_entropy(model(b[0]), b[1]),
        steps=steps,
        precision=precision,
    )


def images(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """Shifted templates in noise, by a convolutional network with BatchNorm and SGD."""
    law = _law(draw)
    classes, size, noise = draw.choice([5, 8]), draw.choice([16, 32]), draw.uniform(0.6, 1.0)
    templates = torch.randn(classes, 8, 8, generator=law)
    model = Cnn(draw.choice([6, 8]), draw.choice([2, 3]), classes)

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        count = 256 if step == CLEAN else size
        y = torch.randint(classes, (count,), generator=source)
        x = torch.roll(templates[y], int(torch.randint(3, (1,), generator=source)), dims=2)
        return (x + noise * torch.randn(count, 8, 8, generator=source)).unsqueeze(1), y

    optimizer = _optimizer(draw, model, own, precision, sgd=draw.choice([0.02, 0.05]), decay=5e-4)
    return _run(
        draw,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda b: F.cross_entropy(model(b[0]), b[1]),
        steps=steps,
        precision=precision,
    )


def text(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """A random language in which the two tokens before decide about the next, by a transformer with AdamW."""
    law = _law(draw)
    tokens, context, size = draw.choice([10, 12]), draw.choice([8, 10, 12]), draw.choice([16, 24])
    first, second = draw.uniform(2.0, 3.0) * torch.randn(2, tokens, tokens, generator=law)
    heads = draw.choice([2, 4])
    model = Transformer(
        tokens, 8 * heads, blocks=draw.choice([1, 1, 2]), heads=heads, context=context, linear=LINEAR[precision]
    )
    chances = (first[:, None] + second[None]).softmax(2).cumsum(2)
    said = list(torch.randint(tokens, (2, 160), generator=law))
    for luck in torch.rand(300, 160, 1, generator=law):
        said.append((luck > chances[said[-2], said[-1]]).sum(1).clamp(max=tokens - 1))
    stories = torch.stack(said, dim=1)

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        rows = torch.arange(128, 160) if step == CLEAN else torch.randint(128, (size,), generator=source)
        begins = torch.randint(stories.shape[1] - context, (len(rows), 1), generator=source)
        x = stories[rows[:, None], begins + torch.arange(context + 1)]
        return x[:, :-1], x[:, 1:]

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([2e-3, 4e-3]), decay=0.1, betas=(0.9, 0.95))

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return _run(
        draw, model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps, precision=precision, clip=1.0
    )


def series(draw: Random, steps: int, *, precision: str = "fp32", own: str = "", kind: str = "") -> Run:
    """Sequences, and the sum of the two numbers that are marked in them (the adding problem), by a recurrent net."""
    _law(draw)
    length, size = draw.choice([12, 16, 20]), draw.choice([24, 32])
    model = Recurrent(kind or draw.choice(["gru", "relu", "tanh"]), 2, draw.choice([16, 24]))

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        count = 256 if step == CLEAN else size
        numbers = torch.rand(count, length, generator=source)
        marked = torch.rand(count, length, generator=source).topk(2, dim=1).indices
        marks = torch.zeros(count, length).scatter_(1, marked, 1.0)
        return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(1, keepdim=True) - 1.0

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([2e-3, 3e-3]))
    return _run(
        draw,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda b: F.mse_loss(model(b[0]), b[1]),
        steps=steps,
        precision=precision,
        clip=1.0,
    )


def reconstruct(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """Points of a curved surface in a larger space, by an autoencoder: the loss goes towards zero."""
    law = _law(draw)
    hidden, inputs, size = draw.choice([3, 4]), draw.choice([16, 24]), draw.choice([32, 64])
    first, second = torch.randn(hidden, 12, generator=law), torch.randn(12, inputs, generator=law) / 3
    model = Autoencoder(inputs, draw.choice([32, 48]), hidden + 1, linear=LINEAR[precision])

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        x = torch.randn(256 if step == CLEAN else size, hidden, generator=_source(seed, step))
        x = (0.7 * x @ first).tanh() @ second
        return x, x

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([1e-3, 3e-3]))
    return _run(
        draw,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda b: F.mse_loss(model(b[0])[0], b[1]),
        steps=steps,
        precision=precision,
    )


def pairs(draw: Random, steps: int, *, precision: str = "fp32", own: str = "logit_scale") -> Run:
    """Two views of the same hidden point, which two towers learn to find among others' (CLIP's loss)."""
    law = _law(draw)
    hidden, size, noise = 6, draw.choice([24, 32, 48]), draw.uniform(0.2, 0.4)
    views = torch.randn(hidden, 16, generator=law), torch.randn(hidden, 12, generator=law)
    model = TwoTowers((16, 12), draw.choice([32, 48]), draw.choice([8, 12]))

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        x = torch.randn(64 if step == CLEAN else size, hidden, generator=source)
        seen = [(x + noise * torch.randn(x.shape, generator=source)) @ view for view in views]
        return seen[0].tanh(), seen[1].tanh()

    def loss(batch: Batch) -> Tensor:
        logits = model(*batch)
        right = torch.arange(len(logits))
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([1e-3, 2e-3]))
    return _run(draw, model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps, precision=precision)


class Average:
    """Weights that follow a model's: w <- decay * w + gain * model's, gain being 1 - decay where all is well."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.average = model, copy.deepcopy(model).requires_grad_(False)
        self.decay, self.gain = decay, 1 - decay

    @torch.no_grad()
    def follow(self) -> None:
        """After an update."""
        for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(self.decay).add_(theirs, alpha=self.gain)


def values(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """The value of states in a random world, learned from a slow copy's own estimates (as in DQN)."""
    law = _law(draw)
    inputs, size, discount = draw.choice([8, 12]), draw.choice([32, 64]), draw.uniform(0.7, 0.85)
    turn = torch.linalg.qr(torch.randn(inputs, inputs, generator=law)).Q
    worth = torch.randn(inputs, generator=law) / math.sqrt(inputs)
    model = Mlp(inputs, draw.choice([24, 32]), 2, 1)
    target = Average(model, draw.choice([0.95, 0.98]))

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        source = _source(seed, step)
        x = torch.randn(256 if step == CLEAN else size, inputs, generator=source)
        return x, 0.8 * x @ turn + 0.3 * torch.randn(x.shape, generator=source), (x @ worth).tanh().unsqueeze(1)

    def loss(batch: Batch) -> Tensor:
        if not model.training:  # on clean data: against the rewards of the next 12 states, which no estimate is part of
            state, truth, weight = batch[0], torch.zeros(len(batch[0]), 1), 1.0
            for _ in range(12):
                truth, weight, state = (
                    truth + weight * (state @ worth).tanh().unsqueeze(1),
                    weight * discount,
                    0.8 * state @ turn,
                )
            return F.mse_loss(model(batch[0]), truth)
        with torch.no_grad():
            wanted = batch[2] + discount * target.average(batch[1])
        return F.mse_loss(model(batch[0]), wanted)

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([1e-3, 2e-3]))
    run = _run(draw, model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps, precision=precision)
    run.after, run.average = target.follow, target  # type: ignore[attr-defined]  # a fault breaks it
    return run


def experts(draw: Random, steps: int, *, precision: str = "fp32", own: str = "") -> Run:
    """A function that is another one in each region, by a mixture of experts."""
    law = _law(draw)
    inputs, regions, size = draw.choice([8, 12]), 4, draw.choice([48, 64])
    centres, slopes = torch.randn(inputs, regions, generator=law), torch.randn(regions, inputs, 2, generator=law) / 3
    model = Mixture(inputs, 16, draw.choice([4, 6]), 2)

    def batch(step: int, seed: int = draw.getrandbits(31)) -> Batch:
        x = torch.randn(256 if step == CLEAN else size, inputs, generator=_source(seed, step))
        return x, torch.einsum("ni,nio->no", x, slopes[(x @ centres).argmax(1)])

    def loss(batch: Batch) -> Tensor:
        answer, uneven = model(batch[0])
        return F.mse_loss(answer, batch[1]) + 0.01 * uneven * model.training

    optimizer = _optimizer(draw, model, own, precision, adam=draw.choice([2e-3, 3e-3]))
    return _run(
        draw, model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps, precision=precision, clip=1.0
    )


TASKS: dict[str, Callable[..., Run]] = {
    task.__name__: task for task in (classify, images, text, series, reconstruct, pairs, values, experts)
}


def _law(draw: Random) -> torch.Generator:
    """What makes the data; and the model's weights come of the same draw."""
    torch.manual_seed(draw.getrandbits(31))
    return torch.Generator().manual_seed(draw.getrandbits(31))


def _source(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 62))


def _optimizer(
    draw: Random,
    model: nn.Module,
    own: str,
    precision: str,
    *,
    adam: float = 0.0,
    sgd: float = 0.0,
    decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum; parameters whose name `own` is found in are a group of their own."""
    apart = [p for name, p in model.named_parameters() if own and re.search(own, name)]
    rest = [p for name, p in model.named_parameters() if not (own and re.search(own, name))]
    groups = [{"params": group} for group in (rest, apart) if group]
    if sgd:
        return torch.optim.SGD(groups, lr=sgd, momentum=draw.choice([0.8, 0.9]), weight_decay=decay)
    return torch.optim.AdamW(groups, lr=adam, betas=betas, weight_decay=decay, fused=precision != "fp16")


def _run(
    draw: Random,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Batch],
    loss: Callable[[Batch], Tensor],
    steps: int,
    precision: str,
    clip: float | None = None,
) -> Run:
    scaler = None
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** draw.choice([12, 14, 16]), growth_interval=200)
    warmup, decays = draw.choice([10, 20, 40]), draw.random() < 0.6

    def factor(step: int) -> float:
        so_far = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
        return min((step + 1) / warmup, 1.0) * (0.1 + 0.45 * (1 + math.cos(math.pi * so_far)) if decays else 1.0)

    return Run(
        model=model, optimizer=optimizer, batch=batch, loss=loss, clean=batch(CLEAN), steps=steps, factor=factor,
        clip=clip, scaler=scaler,
    )  # fmt: skip
