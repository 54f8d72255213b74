"""What a loop's own code does to scaled gradients is judged by what it makes of them, and a healthy habit is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ampdoctor

SCALE = 4096.0


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def loss(self):
        return self.model(torch.randn(8, 4)).pow(2).mean()

    def backward(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def gradients(self):
        return [p.grad for p in self.parameters if p.grad is not None]

    def divide(self, by):
        for gradient in self.gradients():
            gradient.div_(by)

    def norm(self):
        return torch.stack([gradient.norm() for gradient in self.gradients()]).norm()

    def shorten(self, most):
        norm = self.norm().item()
        if norm > most:
            self.divide(norm / most)


def told(tmp_path, iteration, *, steps=3):
    reports, sentences = [], []
    with ampdoctor.watch(folder=tmp_path / "health", tell=reports.append) as watch:
        watch._doctor._on_sentence = sentences.append
        loop = Loop()
        for _ in range(steps):
            iteration(loop)
    assert sentences == []
    return reports


def logs(loop):
    loop.scaler.get_scale()


# -- sick --------------------------------------------------------------------------------------------------------------


def cuts_values(loop):
    loop.backward()
    clip_grad_value_(loop.parameters, 0.5)
    loop.step()


def cuts_values_by_hand(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad.data.clamp_(-0.5, 0.5)
    loop.unscale()
    loop.step()


def cuts_norms_by_hand(loop):
    loop.backward()
    loop.shorten(1.0)
    loop.step()


def cuts_norms_and_logs(loop):
    logs(loop)
    loop.backward()
    clip_grad_norm_(loop.parameters, 1.0)
    loop.step()


def divides_after_unscaling(loop):
    loop.backward()
    loop.unscale()
    loop.divide(loop.scaler.get_scale())
    clip_grad_norm_(loop.parameters, 1.0)
    loop.step()


def divides_before_unscaling(loop):
    loop.backward()
    loop.divide(loop.scaler.get_scale())
    clip_grad_norm_(loop.parameters, 0.01)
    loop.step()


def divides_twice(loop):
    loop.backward()
    for _ in range(2):
        loop.divide(loop.scaler.get_scale())
    loop.optimizer.step()


def scales_twice(loop):
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.scaler.scale(loop.loss())).backward()
    loop.step()


def scales_a_part_twice(loop):
    loop.optimizer.zero_grad()
    penalty = loop.scaler.scale(sum(p.square().sum() for p in loop.parameters))
    loop.scaler.scale(loop.loss() + penalty).backward()
    loop.step()


def steps_past_it(loop):
    loop.backward()
    loop.unscale()
    clip_grad_norm_(loop.parameters, 1.0)
    loop.optimizer.step()
    loop.scaler.update()


def steps_past_it_without_unscaling_and_logs(loop):
    logs(loop)
    loop.backward()
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("iteration", "op", "words"),
    [
        (cuts_values, "gradient clipping", "were cut to 0.5 while they were still scaled by 4,096"),
        (cuts_values_by_hand, "gradient clipping", "were cut to 0.5 while they were still scaled by 4,096"),
        (cuts_norms_by_hand, "gradient clipping", "were shortened to norm 1, in this step as in others, while"),
        (cuts_norms_and_logs, "gradient clipping", "were shortened to norm 1, in this step as in others"),
        (divides_after_unscaling, "unscale", "divided by 4,096 twice: by the scaler and by the loop's own code"),
        (divides_before_unscaling, "unscale", "divided by 4,096 twice: by the scaler and by the loop's own code"),
        (divides_twice, "unscale", "the loop's own code divides the gradients by 4,096 twice"),
        (scales_twice, "GradScaler.scale", "is scaled once more, by 4,096, and unscaled once"),
        (scales_a_part_twice, "GradScaler.scale", "is scaled once more, by 4,096, and unscaled once"),
        (steps_past_it, "optimizer.step", "An update whose gradients overflow is made, and not skipped"),
        (steps_past_it_without_unscaling_and_logs, "optimizer.step", "still scaled by 4,096"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_gradients_that_are_mishandled(tmp_path, iteration, op, words):
    (report,) = told(tmp_path, iteration)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.cause, finding.where.op) == (
        "AMP407",
        "error",
        "scaler_misuse",
        op,
    )
    assert words in finding.message
    assert finding.where.step <= 1
    assert finding.where.source.file.endswith("test_handling_by_hand.py")
    assert finding.prescription.status == "not_run"
    assert finding.help[0].isupper()


# -- healthy -----------------------------------------------------------------------------------------------------------


def recipe_by_value(loop):
    loop.backward()
    loop.unscale()
    clip_grad_value_(loop.parameters, 0.001)
    loop.step()


def cuts_to_a_scaled_norm(loop):
    loop.backward()
    clip_grad_norm_(loop.parameters, 0.01 * loop.scaler.get_scale())
    loop.step()


def cuts_to_a_scaled_norm_by_hand(loop):
    loop.backward()
    loop.shorten(0.01 * loop.scaler.get_scale())
    loop.step()


def cuts_to_scaled_values(loop):
    loop.backward()
    clip_grad_value_(loop.parameters, 0.005 * loop.scaler.get_scale())
    loop.step()


def unscales_by_hand(loop):
    loop.backward()
    scale = loop.scaler.get_scale()
    for parameter in loop.parameters:
        parameter.grad.data.div_(scale)
    clip_grad_norm_(loop.parameters, 0.01)
    loop.optimizer.step()


def averages(loop):
    loop.optimizer.zero_grad()
    for _ in range(3):
        loop.scaler.scale(loop.loss()).backward()
    loop.divide(3)
    loop.step()


def divides_by_tokens(loop):
    """As many tokens as the scale says, of a loss that is their sum."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() * SCALE * 4).backward()
    loop.unscale()
    loop.divide(SCALE)
    loop.step()


def checks_by_itself(loop):
    loop.backward()
    loop.unscale()
    norm = clip_grad_norm_(loop.parameters, 1.0)
    if torch.isfinite(norm):
        loop.optimizer.step()
    loop.scaler.update()


def unscales_and_leaves_the_step_out(loop):
    loop.backward()
    loop.unscale()
    loop.scaler.update()
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.optimizer.step()


def penalises_its_gradients(loop):
    loop.optimizer.zero_grad()
    scaled = torch.autograd.grad(loop.scaler.scale(loop.loss()), loop.parameters, create_graph=True)
    inverse = 1.0 / loop.scaler.get_scale()
    penalty = sum((gradient * inverse).pow(2).sum() for gradient in scaled)
    loop.scaler.scale(loop.loss() + penalty).backward()
    loop.step()


def scales_twice_and_divides(loop):
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.scaler.scale(loop.loss())).backward()
    loop.unscale()
    loop.divide(loop.scaler.get_scale())
    loop.step()


def keeps_masters(loop):
    if not hasattr(loop, "master_weights"):
        loop.master_weights = [nn.Parameter(p.detach().clone().float()) for p in loop.parameters]
        loop.of_masters = torch.optim.SGD(loop.master_weights, lr=1e-2)
        loop.model.half()
    loop.model.zero_grad()
    loss = loop.model(torch.randn(8, 4).half()).float().pow(2).mean()
    loop.scaler.scale(loss).backward()
    for master, parameter in zip(loop.master_weights, loop.parameters, strict=True):
        master.grad = parameter.grad.float() / SCALE
    loop.of_masters.step()
    with torch.no_grad():
        for master, parameter in zip(loop.master_weights, loop.parameters, strict=True):
            parameter.copy_(master)


def two_optimizers(loop):
    if not hasattr(loop, "second"):
        loop.other = nn.Linear(2, 1)
        loop.second = torch.optim.Adam(loop.other.parameters())
    made = loop.model(torch.randn(8, 4))
    loop.second.zero_grad()
    loop.scaler.scale(loop.other(made.detach()).square().mean()).backward()
    loop.scaler.unscale_(loop.second)
    clip_grad_norm_(loop.other.parameters(), 0.01)
    loop.scaler.step(loop.second)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.other(made).square().mean()).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


@pytest.mark.parametrize(
    "iteration",
    [
        recipe_by_value,
        cuts_to_a_scaled_norm,
        cuts_to_a_scaled_norm_by_hand,
        cuts_to_scaled_values,
        unscales_by_hand,
        averages,
        divides_by_tokens,
        checks_by_itself,
        unscales_and_leaves_the_step_out,
        penalises_its_gradients,
        scales_twice_and_divides,
        keeps_masters,
        two_optimizers,
    ],
    ids=lambda one: one.__name__,
)
def test_gradients_that_are_handled_well(tmp_path, iteration):
    assert told(tmp_path, iteration, steps=4) == []


def test_a_norm_that_stays_while_the_scale_moves_was_not_meant_for_scaled_gradients(tmp_path):
    def iteration(loop):
        loop.backward()
        loop.shorten(0.01 * SCALE)  # a bound that a scale of 4096 would explain
        loop.step()
        loop.scaler.update(loop.scaler.get_scale() / 2)

    (report,) = told(tmp_path, iteration)
    assert "were shortened to norm 40.96" in report.findings[0].message
