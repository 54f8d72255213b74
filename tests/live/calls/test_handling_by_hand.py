"""What a loop's own code does to scaled gradients is judged by what it makes of them, and a healthy habit is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.live.calls.loops import Loop, told

SCALE = 4096.0


class Scaled(Loop):
    def loss(self, factor=1.0):
        return self.model(torch.randn(8, 4)).pow(2).mean() * factor

    def gradients(self):
        return [p.grad for p in self.parameters if p.grad is not None]

    def divide(self, by=None):
        for gradient in self.gradients():
            gradient.div_(self.scaler.get_scale() if by is None else by)

    def clip(self, norm):
        clip_grad_norm_(self.parameters, norm)

    def clip_values(self, value):
        clip_grad_value_(self.parameters, value)

    def shorten(self, most):
        norm = torch.stack([gradient.norm() for gradient in self.gradients()]).norm().item()
        if norm > most:
            self.divide(norm / most)

    def backward_twice_scaled(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.scaler.scale(self.loss())).backward()


def of(tmp_path, iteration, *, steps=3):
    reports, sentences = told(tmp_path, iteration, steps=steps, loop=Scaled, scale=SCALE)
    assert sentences == []
    return reports


# -- sick --------------------------------------------------------------------------------------------------------------


def scales_a_part_twice(it):
    it.optimizer.zero_grad()
    penalty = it.scaler.scale(sum(p.square().sum() for p in it.parameters))
    it.scaler.scale(it.loss() + penalty).backward()
    it.step()


def cuts_values_by_hand(it):
    it.backward()
    for parameter in it.parameters:
        parameter.grad.data.clamp_(-0.5, 0.5)
    it.unscale()
    it.step()


CUT = "were cut to 0.5 while they were still scaled by 4,096"
SHORT = "were shortened to norm 1, in this step as in others"
TWICE = "divided by 4,096 twice: by the scaler and by the loop's own code"
MORE = "is scaled once more, by 4,096, and unscaled once"
SICK = {
    "cuts values": (lambda it: (it.backward(), it.clip_values(0.5), it.step()), "gradient clipping", CUT),
    "cuts values by hand": (cuts_values_by_hand, "gradient clipping", CUT),
    "cuts norms by hand": (
        lambda it: (it.backward(), it.shorten(1.0), it.step()),
        "gradient clipping",
        f"{SHORT}, while",
    ),
    "cuts norms and logs": (
        lambda it: (it.scaler.get_scale(), it.backward(), it.clip(1.0), it.step()),
        "gradient clipping",
        SHORT,
    ),
    "divides after unscaling": (
        lambda it: (it.backward(), it.unscale(), it.divide(), it.clip(1.0), it.step()),
        "unscale",
        TWICE,
    ),
    "divides before unscaling": (lambda it: (it.backward(), it.divide(), it.clip(0.01), it.step()), "unscale", TWICE),
    "divides twice": (
        lambda it: (it.backward(), it.divide(), it.divide(), it.optimizer.step()),
        "unscale",
        "the loop's own code divides the gradients by 4,096 twice",
    ),
    "scales twice": (lambda it: (it.backward_twice_scaled(), it.step()), "GradScaler.scale", MORE),
    "scales a part twice": (scales_a_part_twice, "GradScaler.scale", MORE),
    "steps past it": (
        lambda it: (it.backward(), it.unscale(), it.clip(1.0), it.optimizer.step(), it.scaler.update()),
        "optimizer.step",
        "An update whose gradients overflow is made, and not skipped",
    ),
    "steps past it without unscaling, and logs": (
        lambda it: (it.scaler.get_scale(), it.backward(), it.optimizer.step()),
        "optimizer.step",
        "still scaled by 4,096",
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_gradients_that_are_mishandled(tmp_path, name):
    iteration, op, words = SICK[name]
    (report,) = of(tmp_path, iteration)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP407", "error", "scaler_misuse")
    assert finding.where.op == op
    assert words in finding.message
    assert finding.where.step <= 1
    assert finding.where.source.file.endswith(("test_handling_by_hand.py", "calls/loops.py"))
    assert finding.prescription.status == "not_run"
    assert finding.help[0].isupper()
    if op == "gradient clipping":
        assert finding.prescription.value == (
            "call scaler.unscale_(self.optimizer) before clipping or changing self.optimizer's gradients"
        )


# -- healthy -----------------------------------------------------------------------------------------------------------


def unscales_by_hand(it):
    it.backward()
    scale = it.scaler.get_scale()
    for parameter in it.parameters:
        parameter.grad.data.div_(scale)
    it.clip(0.01)
    it.optimizer.step()


def averages(it):
    it.optimizer.zero_grad()
    for _ in range(3):
        it.scaler.scale(it.loss()).backward()
    it.divide(3)
    it.step()


def divides_by_tokens(it):
    """As many tokens as the scale says, of a loss that is their sum."""
    it.optimizer.zero_grad()
    it.scaler.scale(it.loss() * SCALE * 4).backward()
    it.unscale()
    it.divide(SCALE)
    it.step()


def checks_by_itself(it):
    it.backward()
    it.unscale()
    if torch.isfinite(clip_grad_norm_(it.parameters, 1.0)):
        it.optimizer.step()
    it.scaler.update()


def penalises_its_gradients(it):
    it.optimizer.zero_grad()
    scaled = torch.autograd.grad(it.scaler.scale(it.loss()), it.parameters, create_graph=True)
    inverse = 1.0 / it.scaler.get_scale()
    penalty = sum((gradient * inverse).pow(2).sum() for gradient in scaled)
    it.scaler.scale(it.loss() + penalty).backward()
    it.step()


def keeps_masters(it):
    if not hasattr(it, "master_weights"):
        it.master_weights = [nn.Parameter(p.detach().clone().float()) for p in it.parameters]
        it.of_masters = torch.optim.SGD(it.master_weights, lr=1e-2)
        it.model.half()
    it.model.zero_grad()
    loss = it.model(torch.randn(8, 4).half()).float().pow(2).mean()
    it.scaler.scale(loss).backward()
    for master, parameter in zip(it.master_weights, it.parameters, strict=True):
        master.grad = parameter.grad.float() / SCALE
    it.of_masters.step()
    with torch.no_grad():
        for master, parameter in zip(it.master_weights, it.parameters, strict=True):
            parameter.copy_(master)


def two_optimizers(it):
    if not hasattr(it, "second"):
        it.other = nn.Linear(2, 1)
        it.second = torch.optim.Adam(it.other.parameters())
    made = it.model(torch.randn(8, 4))
    it.second.zero_grad()
    it.scaler.scale(it.other(made.detach()).square().mean()).backward()
    it.scaler.unscale_(it.second)
    clip_grad_norm_(it.other.parameters(), 0.01)
    it.scaler.step(it.second)
    it.optimizer.zero_grad()
    it.scaler.scale(it.other(made).square().mean()).backward()
    it.scaler.step(it.optimizer)
    it.scaler.update()


HEALTHY = {
    "the recipe, by value": lambda it: (it.backward(), it.unscale(), it.clip_values(0.001), it.step()),
    "cuts to a scaled norm": lambda it: (it.backward(), it.clip(0.01 * it.scaler.get_scale()), it.step()),
    "cuts to a scaled norm by hand": lambda it: (it.backward(), it.shorten(0.01 * it.scaler.get_scale()), it.step()),
    "cuts to scaled values": lambda it: (it.backward(), it.clip_values(0.005 * it.scaler.get_scale()), it.step()),
    "unscales and leaves the step out": lambda it: (
        *(it.backward(), it.unscale(), it.scaler.update()),
        *(it.plain_backward(), it.optimizer.step()),
    ),
    "scales twice and divides": lambda it: (it.backward_twice_scaled(), it.unscale(), it.divide(), it.step()),
    **{
        one.__name__: one
        for one in (
            *(unscales_by_hand, averages, divides_by_tokens, checks_by_itself, penalises_its_gradients),
            *(keeps_masters, two_optimizers),
        )
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_gradients_that_are_handled_well(tmp_path, name):
    assert of(tmp_path, HEALTHY[name], steps=4) == []


def test_a_norm_that_stays_while_the_scale_moves_was_not_meant_for_scaled_gradients(tmp_path):
    def iteration(it):
        it.backward()
        it.shorten(0.01 * SCALE)  # a bound that a scale of 4096 would explain
        it.step()
        it.scaler.update(it.scaler.get_scale() / 2)

    (report,) = of(tmp_path, iteration)
    assert "were shortened to norm 40.96" in report.findings[0].message
