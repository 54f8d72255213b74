"""A loss that the loop itself has seen to be not finite, and has left out or ended for, is looked at."""

from __future__ import annotations

import math
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.live.calls.loops import watching


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.log(self.first(x) * 0 + x.sum()))


def batches(*sick):
    for step in range(6):
        yield torch.full((2, 4), -1.0 if step in sick else 1.0)


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, x):
        return self.model(x).square().mean()

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def told(tmp_path, train, *sick):
    """The watch of a whole training, as `run` ends it; and what it has said."""
    with suppress(SystemExit), watching(tmp_path) as (reports, sentences, _):
        train(Loop(), batches(*sick))
    assert [said for said in sentences if "watched no more" in said or "recorded no more" in said] == []
    return reports, sentences


CHECKS = {
    "leaves": lambda loss: not torch.isfinite(loss),
    "sees a NaN": lambda loss: bool(torch.isnan(loss).any()),
    "asks for a number": lambda loss: not math.isfinite(loss.item()),
    "compares it with itself": lambda loss: loss.detach() != loss,
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_batch_that_is_left_out_is_a_warning_and_the_watch_goes_on(tmp_path, check):
    def train(loop, given):
        for x in given:
            loss = loop.loss(x)
            if not CHECKS[check](loss):
                loop.step(loss)

    reports, sentences = told(tmp_path, train, 2, 4)
    assert reports == []
    (said,) = sentences
    assert said.startswith("warning AMP202: step 2: a batch was left out by the loop's own check")
    assert "aten.log" in said
    assert (tmp_path / "health" / "bundle-2").is_dir()


@pytest.mark.parametrize("ends", ["break", "exit"])
def test_a_training_that_ends_itself_is_looked_at(tmp_path, ends):
    def train(loop, given):
        for x in given:
            loss = loop.loss(x)
            if not torch.isfinite(loss):
                if ends == "break":
                    break
                sys.exit(0)
            loop.step(loss)

    reports, sentences = told(tmp_path, train, 3)
    (report,) = reports
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.step, finding.where.op) == ("AMP202", "error", 3, "aten.log")
    assert report.verdict == "sick"
    assert sentences == []


# -- healthy -----------------------------------------------------------------------------------------------------------


def evaluates(loop, given):
    for x in given:
        loop.step(loop.loss(x))
        loop.model.eval()
        if not math.isfinite(loop.loss(-x).item()):  # whoever has forgotten `no_grad`
            loop.model.train()
            continue


def evaluates_without_gradients(loop, given):
    for x in given:
        loop.step(loop.loss(x))
        with torch.no_grad():
            assert math.isnan(loop.loss(-x).item())


def masks(loop, given):
    for x in given:
        out = loop.model(x)
        scores = out.masked_fill(torch.ones_like(out, dtype=torch.bool), -math.inf)
        assert scores.max().item() == -math.inf
        loop.step(out.square().mean())


def looks_and_uses_it(loop, given):
    """A loss that is finite where it counts: the rest is left out inside of it."""
    for x in given:
        out = loop.model(x)
        odd = torch.where(x[:, :1] > 2, out, torch.full_like(out, math.nan))
        torch.isnan(odd).any().item()
        loop.step(out.square().mean())


def logs_a_number_of_another_forward(loop, given):
    for x in given:
        loss = loop.loss(x)
        assert math.isnan(loop.loss(-x).item())
        loop.step(loss)


def ends_early(loop, given):
    for x in given:
        loss = loop.loss(x)
        loop.step(loss)
        if loss.item() < 1e9:
            break


@pytest.mark.parametrize(
    "train",
    [
        *(evaluates, evaluates_without_gradients, masks, looks_and_uses_it),
        *(logs_a_number_of_another_forward, ends_early),
    ],
    ids=lambda one: one.__name__,
)
def test_what_is_only_looked_at_is_not_told(tmp_path, train):
    assert told(tmp_path, train) == ([], [])
