"""A loop under a scaler, and what a watch of it reports and says."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

import ampdoctor


class Loop:
    """A model, an optimizer and a scaler, and the usual parts of a step."""

    def __init__(self, scale=1024.0, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, **{"lr": 1e-2, **settings})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss(self, factor=1.0):
        return self.model(torch.ones(2, 4)).pow(2).mean() * factor

    def plain_backward(self):
        self.optimizer.zero_grad()
        self.loss().backward()

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(factor)).backward()

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@contextmanager
def watching(tmp_path):
    """Yields the reports and the sentences of the watch inside, and the watch."""
    reports, sentences = [], []
    with ampdoctor.watch(folder=tmp_path / "health", tell=reports.append) as watch:
        watch._doctor._on_sentence = sentences.append
        yield reports, sentences, watch


def told(tmp_path, iteration, *, steps, loop=Loop, **settings):
    """The reports and the sentences of the watch of some iterations; the watch itself must not have ended."""
    with watching(tmp_path) as (reports, sentences, _):
        made = loop(**settings)
        for _ in range(steps):
            iteration(made)
    assert [said for said in sentences if "watched no more" in said or "recorded no more" in said] == []
    return reports, sentences
