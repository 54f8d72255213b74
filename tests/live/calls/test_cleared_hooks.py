"""A program that clears torch's tables of global hooks clears ours with its own: it is watched all the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import ampdoctor

TABLES = (
    *(optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks),
    *(modules._global_forward_hooks, modules._global_forward_pre_hooks),
)


def clear():
    for table in TABLES:
        table.clear()


def train(*, at, sick):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(5):
        if at == "begin" or (at == "once" and step == 0):
            clear()
        optimizer.zero_grad()
        x = torch.full((2, 4), math.nan if sick and step == 3 else 1.0)
        loss = model(x).square().mean()
        if at == "forward":
            clear()
        scaler.scale(loss).backward()
        if at == "backward":
            clear()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("at", ["once", "begin", "forward", "backward"])
@pytest.mark.parametrize("sick", [False, True])
def test_steps_are_seen_all_the_same(tmp_path, at, sick):
    reports, sentences = [], []
    with ampdoctor.watch(folder=tmp_path / "health", tell=reports.append) as watch:
        watch._doctor._hear = sentences.append
        train(at=at, sick=sick)
    assert sentences == []
    assert [one.findings[0].code for one in reports] == ["AMP204"] * sick
    assert watch._doctor._lines.attempted == 5
    assert [len(table) for table in TABLES] == [0, 0, 0, 0]
