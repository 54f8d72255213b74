"""Steps of the user's own, healthy and sick: gradients inside of a step, and a world that no snapshot holds."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ampdoctor import TrainingRun


class Cancel(nn.Module):
    """A large number that is added and taken off again: of a small one, fp16 has little left."""

    def forward(self, x):
        return (x + 4096.0) - 4096.0


def network(*, inputs, outputs, departs=False):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, 32),
        nn.Tanh(),
        *([Cancel()] if departs else []),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, outputs),
    )


def trained(model, step, *, scale=4096.0, batches=None, steps=6, precision="fp16"):
    return TrainingRun(
        model=model,
        batches=list(range(steps)) if batches is None else batches,
        step=step,
        optimizer=torch.optim.Adam(model.parameters(), 1e-3),
        precision=precision,
        scaler={"init_scale": scale},
    )


def examples(steps=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)) for _ in range(steps)
    ]


def maml(*, loss_scale=4096.0, small=1.0, departs=False):
    """The weights after a step on an inner loss, which no scaler scales, are what the outer loss is of."""
    model = network(inputs=20, outputs=5, departs=departs)

    def step(model, batch, optimizer, scaler, autocast):
        x, y = batch
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        with autocast():
            inner = functional.cross_entropy(model(x).float(), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        with autocast():
            loss = functional.cross_entropy(functional_call(model, fast, (x,)).float(), y) * small
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return trained(model, step, scale=loss_scale, batches=examples())


def checkpointed():
    """The forward is run again inside of the backward, in a backward of its own."""
    model = network(inputs=20, outputs=5)

    def step(model, batch, optimizer, scaler, autocast):
        x, y = batch
        optimizer.zero_grad()
        with autocast():
            loss = functional.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=True).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return trained(model, step, batches=examples())


def per_sample(*, departs=False):
    """Gradients of each sample, whose mean norm the batch's gradient is clipped to."""
    model = network(inputs=20, outputs=5, departs=departs)

    def step(model, batch, optimizer, scaler, autocast):
        x, y = batch
        optimizer.zero_grad()

        def one(weights, x, y):
            with autocast():
                return functional.cross_entropy(functional_call(model, weights, (x[None],)).float(), y[None])

        with autocast():
            loss = functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        weights = {name: w.detach() for name, w in model.named_parameters()}
        each = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0).mean()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), float(norm))
        scaler.step(optimizer)
        scaler.update()
        return loss

    return trained(model, step, batches=examples())


def world(dimensions, *, seed=3):
    """An environment: it goes on with each action, and nobody can turn it back."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(16, dimensions, generator=generator)
    action = yield
    while True:
        noise = torch.randn(16, dimensions, generator=generator)
        state = 0.9 * state + 0.1 * noise + 0.01 * torch.eye(dimensions)[action % dimensions]
        action = yield state, -state.abs().sum(1)


def policy(*, loss_scale=4096.0, small=1.0):
    """Rollouts in a world that goes on, and two passes over them in each step."""
    model = network(inputs=8, outputs=5)
    outside = world(8)
    next(outside)
    last = [outside.send(torch.zeros(16, dtype=torch.long))]

    def acting(seen):
        out = model(seen)
        return torch.distributions.Categorical(logits=out[:, :4].float()), out[:, 4].float()

    def rollout():
        rows = []
        for _ in range(8):
            seen, _ = last[0]
            with torch.no_grad():
                chosen, value = acting(seen)
                action = chosen.sample()
            last[0] = outside.send(action)
            rows.append((seen, action, chosen.log_prob(action), last[0][1], value))
        return (torch.cat(column) for column in zip(*rows, strict=True))

    def step(model, optimizer, scaler, autocast):
        seen, action, before, reward, value = rollout()
        gain = reward - value
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for part in torch.randperm(len(seen)).chunk(2):
            with autocast():
                chosen, value = acting(seen[part])
                ratio = (chosen.log_prob(action[part]) - before[part]).exp()
                loss = -(ratio * gain[part]).mean() + 0.5 * (value - reward[part]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * small).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return loss

    return trained(model, step, scale=loss_scale)
