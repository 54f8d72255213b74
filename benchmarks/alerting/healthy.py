"""Healthy trainings in which much happens that looks like sickness: each as long as a rule needs to go wrong in it.

None of them is a twin of a sick one. What they do (restarts, jumps of batch size, new data, losses that fall to zero,
rewards that come and go) is what their kind does elsewhere; all end better than they began, which is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import watch
from benchmarks.alerting import tasks
from benchmarks.alerting.loop import Batch, Fault, Run, clean_loss, train
from benchmarks.alerting.nets import Autoencoder, Mlp


def _plain(task: Callable[..., Run], **settings: str) -> Callable[[Random, int], Run]:
    return lambda draw, steps: task(draw, steps, **settings)


def constant(draw: Random, steps: int) -> Run:
    """The learning rate stays, after a short warm-up."""
    run = tasks.classify(draw, steps)
    run.factor = lambda step: min((step + 1) / 20, 1.0)
    return run


def warm_restarts(draw: Random, steps: int) -> Run:
    """SGDR: the cosine begins again, four times."""
    run = tasks.images(draw, steps)
    length = steps // 4
    run.factor = lambda step: 0.02 + 0.49 * (1 + math.cos(math.pi * (step % length) / length))
    return run


def one_cycle(draw: Random, steps: int) -> Run:
    """Up to ten times the usual rate, and down to nothing."""
    run = tasks.experts(draw, steps)
    run.factor = lambda step: (
        3 * (step + 1) / (0.3 * steps) if step < 0.3 * steps else 3 * (1 - step / steps) / 0.7 + 1e-4
    )
    return run


def steps_down(draw: Random, steps: int) -> Run:
    """The rate falls to a tenth, twice (ResNet's schedule)."""
    run = tasks.images(draw, steps)
    run.factor = lambda step: min((step + 1) / 20, 1.0) * 0.1 ** sum(step > share * steps for share in (0.5, 0.75))
    return run


def larger_batches(draw: Random, steps: int) -> Run:
    """Four times the batch from the middle on, by joining four."""
    run = tasks.classify(draw, steps)
    small = run.batch

    def batch(step: int) -> Batch:
        if step < steps // 2:
            return small(step)
        return tuple(torch.cat(parts) for parts in zip(*(small(4 * step + i) for i in range(4)), strict=True))

    run.batch = batch
    return run


def smaller_batches(draw: Random, steps: int) -> Run:
    """A quarter of the batch from the middle on."""
    run = tasks.series(draw, steps)
    whole = run.batch
    run.batch = lambda step: whole(step) if step < steps // 2 else tuple(part[: len(part) // 4] for part in whole(step))
    return run


def curriculum(draw: Random, steps: int) -> Run:
    """Sequences that grow from 4 to their length in four stages."""
    run = tasks.series(draw, steps, kind="gru")
    whole = run.batch

    def batch(step: int) -> Batch:
        x, _ = whole(step)
        length = min(4 + (x.shape[1] - 4) * (4 * step // steps) // 3, x.shape[1])
        marks = torch.zeros(len(x), length)
        marks[:, 0] = marks[:, -1] = 1.0
        x = torch.stack([x[:, :length, 0], marks], dim=2)
        return x, (x[:, :, 0] * marks).sum(1, keepdim=True) - 1.0

    run.batch, run.clean = batch, batch(4 * steps)
    return run


def another_mix(draw: Random, steps: int) -> Run:
    """The classes are uneven at first and even from the middle on."""
    run = tasks.classify(draw, steps)
    even = run.batch

    def batch(step: int) -> Batch:
        x, y = (torch.cat(parts) for parts in zip(even(2 * step), even(2 * step + 1), strict=True))
        order = (y > 1).to(torch.int8).argsort(stable=True) if step < steps // 2 else torch.arange(len(y))
        kept = order[: len(y) // 2]
        return x[kept], y[kept]

    run.batch = batch
    return run


def fine_tuning(draw: Random, steps: int) -> Run:
    """From weights that were trained before, with a small rate and no warm-up, on shifted data."""
    run = tasks.classify(draw, steps)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=2e-3)
    for step in range(400):
        optimizer.zero_grad()
        run.loss(run.batch(10**6 + step)).backward()
        optimizer.step()
    run.model.zero_grad()
    fresh = run.batch
    run.batch = lambda step: (0.8 * fresh(step)[0] + 0.2, fresh(step)[1])
    run.rates, run.factor = [2e-4], lambda step: 1 - step / steps
    run.clean = run.batch(-1)
    return run


def to_zero(draw: Random, steps: int) -> Run:
    """A linear law that the model can learn wholly: loss and gradients fall by many orders of magnitude."""
    run = tasks.reconstruct(draw, steps)
    inputs = run.clean[0].shape[1]
    law = torch.randn(inputs, inputs) / math.sqrt(inputs)
    model = nn.Sequential(nn.Linear(inputs, 32), nn.Linear(32, inputs))
    drawn = run.batch

    def batch(step: int) -> Batch:
        x = drawn(step)[0]
        return x, x @ law

    return Run(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True),
        batch=batch, loss=lambda b: F.mse_loss(model(b[0]), b[1]), clean=batch(-1), steps=steps,
        factor=lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)),
    )  # fmt: skip


def few_examples(draw: Random, steps: int) -> Run:
    """Sixteen batches in epochs until they are known by heart: the training's loss nears zero."""
    run = tasks.classify(draw, steps)
    all_of_them = run.batch
    run.batch = lambda step: all_of_them((step // 16 * 7 + step) % 16)
    run.clean = tuple(torch.cat(parts) for parts in zip(*(all_of_them(i) for i in range(16)), strict=True))
    return run


def rare_losses(draw: Random, steps: int) -> Run:
    """Rare examples of large loss, as in detection or ranking: the gradient's norm has a heavy tail."""
    run = tasks.reconstruct(draw, steps)
    usual = run.batch

    def batch(step: int) -> Batch:
        x, y = usual(step)
        rare = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(step)) < 0.01
        return torch.where(rare, 2.5 * x, x), torch.where(rare, 2.5 * y, y)

    run.batch, run.clip = batch, 1.0
    return run


def variational(draw: Random, steps: int) -> Run:
    """A VAE whose divergence is warmed up (KL annealing): the loss rises while all is well."""
    run = tasks.reconstruct(draw, steps)
    inputs = run.clean[0].shape[1]
    model = Autoencoder(inputs, 32, 4, variational=True)
    drawn, seen = run.batch, [0]

    def batch(step: int) -> Batch:
        seen[0] = step
        x = drawn(step)[0]
        return x, torch.randn(len(x), 4, generator=torch.Generator().manual_seed(step + 1))

    def loss(b: Batch) -> Tensor:
        if not model.training:
            return F.mse_loss(model(b[0])[0], b[0])
        decoded, divergence = model(*b)
        return F.mse_loss(decoded, b[0]) + 2e-3 * min(2 * seen[0] / steps, 1.0) * divergence

    return Run(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True), batch=batch, loss=loss,
        clean=run.clean, steps=steps,
    )  # fmt: skip


def gan(draw: Random, steps: int, folder: Path, every: int) -> tuple[float, float]:
    """A generator of a ring of points against a critic, each with its own Adam; returns distances of the means."""
    torch.manual_seed(draw.getrandbits(31))
    size, noise = draw.choice([48, 64]), draw.choice([4, 8])
    generator, critic = Mlp(noise, 32, 2, 2), Mlp(2, 32, 2, 1)
    steps_of = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True) for m in (generator, critic)]

    def distance() -> float:
        with torch.no_grad():
            return float((generator(torch.randn(512, noise)).norm(dim=1) - 2.0).abs().mean())

    first = distance()
    with watch(folder=folder, every=every, look="off", bundle=False):
        for _ in range(steps // 2):
            angle = 2 * math.pi * torch.rand(size)
            real = 2.0 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(size, 2)
            made = generator(torch.randn(size, noise))
            against = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
            steps_of[1].zero_grad()
            against.backward()
            steps_of[1].step()
            wins = F.softplus(-critic(made)).mean()
            steps_of[0].zero_grad()
            wins.backward()
            steps_of[0].step()
    return first, distance()


def actor_critic(draw: Random, steps: int, folder: Path, every: int) -> tuple[float, float]:
    """A point that is steered to the origin: advantages, entropy, and losses of either sign; returns mean costs."""
    torch.manual_seed(draw.getrandbits(31))
    envs, horizon = draw.choice([16, 24]), draw.choice([5, 8])
    policy, value = Mlp(4, 24, 2, 5), Mlp(4, 24, 2, 1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=draw.choice([5e-4, 1e-3]), fused=True)
    pushes = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    costs: list[float] = []
    state = torch.randn(envs, 4)
    with watch(folder=folder, every=every, look="off", bundle=False):
        for _ in range(steps):
            chances, values, rewards, entropies = [], [], [], []
            for _ in range(horizon):
                choice = torch.distributions.Categorical(logits=policy(state))
                action = choice.sample()
                chances.append(choice.log_prob(action))
                entropies.append(choice.entropy())
                values.append(value(state).squeeze(1))
                speed = 0.9 * state[:, 2:] + 0.2 * pushes[action]
                state = torch.cat([state[:, :2] + 0.2 * speed, speed], dim=1)
                rewards.append(-state[:, :2].norm(dim=1))
                anew = (torch.rand(envs, 1) < 0.02) | (state.norm(dim=1, keepdim=True) > 6)
                state = torch.where(anew, torch.randn(envs, 4), state)
            with torch.no_grad():
                ahead, returns = value(state).squeeze(1), []
                for reward in reversed(rewards):
                    ahead = reward + 0.95 * ahead
                    returns.append(ahead)
            back = torch.stack(returns[::-1])
            advantage = back - torch.stack(values)
            loss = (
                -(torch.stack(chances) * advantage.detach()).mean()
                + 0.5 * (advantage**2).mean()
                - 0.01 * torch.stack(entropies).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            costs.append(-float(torch.stack(rewards).mean()))
    part = max(len(costs) // 5, 1)
    return sum(costs[:part]) / part, sum(costs[-part:]) / part


RUNS: dict[str, tuple[Callable[[Random, int], Run], int]] = {
    "classify": (_plain(tasks.classify), 8000),
    "classify in fp16": (_plain(tasks.classify, precision="fp16"), 5000),
    "reconstruct in fp16": (_plain(tasks.reconstruct, precision="fp16"), 5000),
    "images": (_plain(tasks.images), 3000),
    "text": (_plain(tasks.text), 3000),
    "gru": (_plain(tasks.series, kind="gru"), 3000),
    "reconstruct": (_plain(tasks.reconstruct), 8000),
    "contrastive": (_plain(tasks.pairs), 8000),
    "values": (_plain(tasks.values), 6000),
    "experts": (_plain(tasks.experts), 3000),
    "constant": (constant, 8000),
    "warm restarts": (warm_restarts, 4000),
    "one cycle": (one_cycle, 3000),
    "steps down": (steps_down, 3000),
    "larger batches": (larger_batches, 5000),
    "smaller batches": (smaller_batches, 4000),
    "curriculum": (curriculum, 4000),
    "another mix": (another_mix, 5000),
    "fine-tuning": (fine_tuning, 5000),
    "to zero": (to_zero, 8000),
    "few examples": (few_examples, 8000),
    "rare large losses": (rare_losses, 6000),
    "variational": (variational, 6000),
}
"""What trains in the common loop, and how many steps."""
LOOPS: dict[str, tuple[Callable[[Random, int, Path, int], tuple[float, float]], int]] = {
    "gan": (gan, 6000),
    "actor-critic": (actor_critic, 3000),
}
"""What has a loop of its own."""


def train_healthy(name: str, draw: Random, folder: Path, every: int) -> tuple[float, float]:
    """Trains one of them; returns a loss before and after, of which the second is the smaller one.

    Args:
        name: Of `RUNS` or `LOOPS`.
        draw: What decides about sizes and data.
        folder: Of the log.
        every: Steps from one look at single tensors to the next.
    """
    if name in LOOPS:
        loop, steps = LOOPS[name]
        return loop(draw, steps, folder, every)
    make, steps = RUNS[name]
    run = make(draw, steps)
    before = clean_loss(run)
    train(run, Fault(), folder, every=every)
    return before, clean_loss(run)
