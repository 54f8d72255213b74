"""Scalers of subclasses are heard as torch's own, whether or not they call on; afterwards nothing is left in place."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor.hooks.callbacks import on_scaler_call


class Own(torch.amp.GradScaler):
    """As FSDP's: multiplies by itself."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        if isinstance(outputs, list):
            return [self.scale(one) for one in outputs]
        return outputs * self._scale


class Below(Own):
    def scale(self, outputs):
        return super().scale(outputs)

    def update(self, new_scale=None):
        super().update(new_scale)


class Calls:
    def __init__(self):
        self.seen = []

    def scaler_called(self, scaler, method, argument, run):
        self.seen.append(method)
        return run()


def later():
    """A class that nobody has seen before the watch."""

    class Later(Own):
        def update(self, new_scale=None):
            return torch.amp.GradScaler.update(self, new_scale)

    return Later


def step(scaler, losses=None, model=None):
    model = model or nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).mean()
    scaled = scaler.scale(loss if losses is None else [loss] * losses)
    (scaled if losses is None else sum(scaled)).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Own, Below, later])
def test_each_call_is_told_once(kind):
    calls = Calls()
    before = dict(vars(torch.amp.GradScaler)), dict(vars(Own)), dict(vars(Below))
    with on_scaler_call(calls.scaler_called):
        step((later() if kind is later else kind)("cpu"))
    assert calls.seen == ["scale", "step", "unscale_", "update"]
    assert (dict(vars(torch.amp.GradScaler)), dict(vars(Own)), dict(vars(Below))) == before


@pytest.mark.parametrize("losses", [None, 2])
def test_the_loss_that_is_logged_is_not_the_scaled_one(tmp_path, losses):
    with ampdoctor.watch(folder=tmp_path):
        torch.manual_seed(0)
        scaler = Own("cpu", init_scale=1024.0)
        model = nn.Linear(2, 1)
        step(scaler, losses, model)
        step(scaler, losses, model)
    (file,) = tmp_path.glob("log*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    logged = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(logged) == 2
    assert all(abs(loss) < 16 for loss in logged)
    assert {line["loss_scale"] for line in lines if line["kind"] == "step"} == {1024.0}
