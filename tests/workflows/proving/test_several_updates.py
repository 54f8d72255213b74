"""Steps that make several updates: each is skipped or taken by itself, by its own scaler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest


class Lost(torch.autograd.Function):
    """Passes its input on, and loses its gradient: 0 / 0."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * 0) / (gradient * 0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def epochs(init=65536.0, lost=()):
    """Four epochs over one rollout in each step, as PPO makes them."""
    torch.manual_seed(0)
    model = Critic()
    generator = torch.Generator().manual_seed(1)
    rollouts = [(torch.randn(16, 6, generator=generator), torch.arange(16) % 3) for _ in range(5)]

    def step(model, batch, optimizer, scaler, autocast):
        states, actions = batch
        for epoch in range(4):
            optimizer.zero_grad()
            with autocast():
                policy, value = model(states)
                policy = Lost.apply(policy) if epoch in lost else policy
                loss = functional.cross_entropy(policy.float(), actions) + (value.float() - 2).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return TrainingRun(
        model=model,
        batches=rollouts,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        precision="fp16",
        autocast=True,
        scaler={"init_scale": init},
        step=step,
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def adversaries(init, own_init=None, steps=8):
    """Two optimizers in each step; with `own_init` the judge's has a scaler of its own in the loop's code."""
    torch.manual_seed(0)
    model = Pair()
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 6, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(steps)]
    own = None if own_init is None else torch.amp.GradScaler("cpu", init_scale=own_init)

    def step(model, batch, optimizer, scaler, autocast):
        real, noise = batch
        judging = scaler if own is None else own
        optimizer["judge"].zero_grad()
        with autocast():
            fake = model.maker(noise).detach()
            loss = functional.softplus(-model.judge(real).float()) + functional.softplus(model.judge(fake).float())
        judging.scale(loss.mean()).backward()
        judging.step(optimizer["judge"])
        judging.update()
        optimizer["maker"].zero_grad()
        with autocast():
            loss = functional.softplus(-model.judge(model.maker(noise)).float()).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer["maker"])
        scaler.update()
        return loss

    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), lr=1e-3) for name in ("judge", "maker")}
    return TrainingRun(
        model=model,
        batches=batches,
        optimizer=optimizers,
        precision="fp16",
        autocast=True,
        scaler={"init_scale": init},
        step=step,
    )


def report_of(factory, **arguments):
    return bisect_nan(ReplayRequest(factory=factory, arguments=arguments))


HEALTHY = {
    "whole steps, and a part of one": (epochs, {"init": 2.0**24}),
    "one scaler for two": (adversaries, {"init": 2.0**17}),
    "a scaler each": (adversaries, {"init": 2.0**12, "own_init": 2.0**20}),
    "the maker's backward overflows the judge's gradients": (adversaries, {"init": 2.0**17, "own_init": 2.0**10}),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_updates_that_are_skipped_until_a_scale_settles_are_healthy(case):
    factory, arguments = HEALTHY[case]
    report = report_of(factory, **arguments)
    assert [finding.message for finding in report.findings] == []
    assert report.verdict == "healthy"


def test_updates_that_are_skipped_until_a_scale_settles_need_no_other_scale():
    report = recommend(ReplayRequest(factory=adversaries, arguments={"init": 2.0**17}))
    assert (report.verdict, [finding.message for finding in report.findings]) == ("healthy", [])


def test_a_scaler_in_the_loops_own_code_that_starts_too_high_is_that_and_no_collapse():
    report = report_of(adversaries, init=65536.0, own_init=2.0**30, steps=6)
    assert [(f.code, f.severity) for f in report.findings] == [("AMP405", "warning")]
    assert report.findings[0].prescription.verified


def test_an_epoch_whose_gradient_is_lost_at_every_scale_is_sick_though_the_others_are_taken():
    finding = report_of(epochs, init=1024.0, lost=(2,)).findings[0]
    assert (finding.code, finding.severity, finding.where.phase) == ("AMP202", "error", "backward")
    assert finding.where.nonfinite == "nan"
