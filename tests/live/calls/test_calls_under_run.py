"""What the calls of a loop alone show: a step past the scaler, a clipping too early, no update; and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import ampdoctor

SCALE = 1024.0


class Loop:
    def __init__(self, scale=SCALE):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss(self, factor=1.0):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(torch.ones(2, 4))
        return out.float().pow(2).mean() * factor

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(factor)).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, norm=0.01):
        clip_grad_norm_(self.model.parameters(), norm)


def told(tmp_path, iteration, *, steps=6, scale=SCALE):
    reports, sentences = [], []
    with ampdoctor.watch(folder=tmp_path / "health", tell=reports.append) as watch:
        watch._doctor._on_sentence = sentences.append
        loop = Loop(scale)
        for _ in range(steps):
            iteration(loop)
    assert [said for said in sentences if "watched no more" in said or "recorded no more" in said] == []
    return reports


def past_it(loop):
    loop.backward()
    loop.optimizer.step()


def clips_too_early(loop):
    loop.backward()
    loop.clip()
    loop.step()


@pytest.mark.parametrize(
    ("iteration", "op", "words"),
    [
        (past_it, "optimizer.step", "uses 4 gradients that are still scaled by 1,024"),
        (clips_too_early, "clip_grad_norm_", "to 0.01 while they were still scaled by 1,024"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_calls_that_break_the_protocol(tmp_path, iteration, op, words):
    (report,) = told(tmp_path, iteration)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.op) == ("AMP407", "error", op)
    assert words in finding.message
    assert finding.where.step == 0
    assert finding.where.source.file.endswith("test_calls_under_run.py")
    assert finding.prescription.status == "not_run"
    assert report.verdict == "sick"


@pytest.mark.parametrize("logs", [False, True])
def test_an_overflow_that_a_scaler_would_have_skipped_reaches_the_weights(tmp_path, logs):
    def iteration(loop):
        if logs:
            loop.scaler.get_scale()
        past_it(loop)

    (report,) = told(tmp_path, iteration, steps=1, scale=2.0**24)
    (finding,) = report.findings
    assert (finding.code, finding.where.op, finding.where.step) == ("AMP407", "optimizer.step", 0)
    assert ("scaler.step(optimizer) would have skipped the step" in finding.message) is logs


def without_update(loop):
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    loop.backward()
    loop.scaler.step(loop.optimizer)


def test_a_scaler_that_is_never_updated(tmp_path):
    (report,) = told(tmp_path, without_update)
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.verdict) == ("AMP405", "error", "sick")
    assert finding.where.step == 3
    assert finding.help.startswith("scaler.update() is never called")


def test_a_scaler_that_comes_down_is_healthy(tmp_path):
    assert told(tmp_path, recipe, steps=24, scale=2.0**24) == []


def written_by_hand(loop):
    loop.model.zero_grad()
    loop.loss().backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.sub_(parameter.grad * math.inf)


def with_a_bad_rate(loop):
    recipe(loop)
    loop.optimizer.param_groups[0]["lr"] = math.inf
    recipe(loop)


@pytest.mark.parametrize(
    ("iteration", "phase", "words"),
    [
        (written_by_hand, "optimizer", "from finite tensors, with inf among its arguments"),
        (with_a_bad_rate, "optimizer", "lr is inf"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_weights_that_the_last_update_has_lost(tmp_path, iteration, phase, words):
    (report,) = told(tmp_path, iteration, steps=1)
    (finding,) = report.findings
    assert (finding.severity, finding.where.phase, report.verdict) == ("error", phase, "sick")
    assert words in finding.message
    assert finding.where.nonfinite != "none"


def test_what_is_wrong_before_any_scale_is_said_first(tmp_path):
    def iteration(loop):
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.model(torch.full((2, 4), math.nan)).mean()).backward()
        loop.optimizer.step()

    (report,) = told(tmp_path, iteration, steps=1)
    assert [finding.code for finding in report.findings] == ["AMP204"]


# -- healthy -----------------------------------------------------------------------------------------------------------


def recipe(loop):
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.step()


def clips_what_is_short(loop):
    loop.backward()
    loop.clip(1e6)
    loop.step()


def without_the_scaler(loop):
    recipe(loop)
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.clip()
    loop.optimizer.step()


def saved(loop):
    loop.scaler.state_dict()
    recipe(loop)


def a_frozen_mask(loop):
    if not hasattr(loop, "mask"):
        loop.mask = loop.model[0].mask = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    recipe(loop)


@pytest.mark.parametrize(
    "iteration",
    [
        recipe,
        a_frozen_mask,
        clips_what_is_short,
        without_the_scaler,
        saved,
    ],
    ids=lambda one: one.__name__,
)
def test_calls_that_keep_to_it(tmp_path, iteration):
    assert told(tmp_path, iteration, steps=3) == []
