"""What the calls of a loop alone show: a step past the scaler, a clipping too early, no update; and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.live.calls.loops import Loop, told


class Cast(Loop):
    """Its loss is computed under autocast."""

    def loss(self, factor=1.0):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(torch.ones(2, 4))
        return out.float().pow(2).mean() * factor

    def clip(self, norm=0.01):
        clip_grad_norm_(self.model.parameters(), norm)

    def recipe(self):
        self.backward()
        self.unscale()
        self.clip()
        self.step()


def of(tmp_path, iteration, *, steps=6, scale=1024.0):
    return told(tmp_path, iteration, steps=steps, loop=Cast, scale=scale, lr=1e-3)[0]


def past_it(it):
    it.backward()
    it.optimizer.step()


@pytest.mark.parametrize(
    ("iteration", "op", "words"),
    [
        (past_it, "optimizer.step", "uses 4 gradients that are still scaled by 1,024"),
        (
            lambda it: (it.backward(), it.clip(), it.step()),
            "clip_grad_norm_",
            "to 0.01 while they were still scaled by 1,024",
        ),
    ],
    ids=["past it", "clips too early"],
)
def test_calls_that_break_the_protocol(tmp_path, iteration, op, words):
    (report,) = of(tmp_path, iteration)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.op) == ("AMP407", "error", op)
    assert words in finding.message
    assert finding.where.step == 0
    assert finding.where.source.file.endswith(("test_calls_under_run.py", "calls/loops.py"))
    assert finding.prescription.status == "not_run"
    assert report.verdict == "sick"


@pytest.mark.parametrize("logs", [False, True])
def test_an_overflow_that_a_scaler_would_have_skipped_reaches_the_weights(tmp_path, logs):
    def iteration(loop):
        if logs:
            loop.scaler.get_scale()
        past_it(loop)

    (report,) = of(tmp_path, iteration, steps=1, scale=2.0**24)
    (finding,) = report.findings
    assert (finding.code, finding.where.op, finding.where.step) == ("AMP407", "optimizer.step", 0)
    assert ("scaler.step(optimizer) would have skipped the step" in finding.message) is logs


def test_a_scaler_that_is_never_updated(tmp_path):
    def without_update(it):
        it.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        it.backward()
        it.scaler.step(it.optimizer)

    (report,) = of(tmp_path, without_update)
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.verdict) == ("AMP405", "error", "sick")
    assert finding.where.step == 3
    assert finding.help.startswith("scaler.update() is never called")


def test_a_scaler_that_comes_down_is_healthy(tmp_path):
    assert of(tmp_path, Cast.recipe, steps=24, scale=2.0**24) == []


def written_by_hand(loop):
    loop.model.zero_grad()
    loop.loss().backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.sub_(parameter.grad * math.inf)


def with_a_bad_rate(loop):
    loop.recipe()
    loop.optimizer.param_groups[0]["lr"] = math.inf
    loop.recipe()


@pytest.mark.parametrize(
    ("iteration", "phase", "words"),
    [
        (written_by_hand, "optimizer", "from finite tensors, with inf among its arguments"),
        (with_a_bad_rate, "optimizer", "lr is inf"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_weights_that_the_last_update_has_lost(tmp_path, iteration, phase, words):
    (report,) = of(tmp_path, iteration, steps=1)
    (finding,) = report.findings
    assert (finding.severity, finding.where.phase, report.verdict) == ("error", phase, "sick")
    assert words in finding.message
    assert finding.where.nonfinite != "none"


def test_what_is_wrong_before_any_scale_is_said_first(tmp_path):
    def iteration(loop):
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.model(torch.full((2, 4), math.nan)).mean()).backward()
        loop.optimizer.step()

    (report,) = of(tmp_path, iteration, steps=1)
    assert [finding.code for finding in report.findings] == ["AMP204"]


# -- healthy -----------------------------------------------------------------------------------------------------------


def a_frozen_mask(it):
    if not hasattr(it, "mask"):
        it.mask = it.model[0].mask = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    it.recipe()


HEALTHY = {
    "the recipe": Cast.recipe,
    "a frozen mask": a_frozen_mask,
    "clips what is short": lambda it: (it.backward(), it.clip(1e6), it.step()),
    "without the scaler": lambda it: (it.recipe(), it.plain_backward(), it.clip(), it.optimizer.step()),
    "saved": lambda it: (it.scaler.state_dict(), it.recipe()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_calls_that_keep_to_it(tmp_path, name):
    assert of(tmp_path, HEALTHY[name], steps=3) == []
