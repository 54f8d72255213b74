"""An optimizer that steps again on gradients that it has used is told, and is no step; what looks like it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ampdoctor.hooks.callbacks import on_clip
from ampdoctor.live.loop_watch import LoopWatch
from tests.live.calls.loops import Loop, told, watching


class Told:
    """Notes each update, and each that is no step of its own."""

    def __init__(self):
        self.watch, self.steps, self.again = LoopWatch(self), [], []

    def unscaling(self, optimizer):
        pass

    def about_to_step(self, attempt, _losses):
        pass

    held_back = about_to_step

    def attempted(self, attempt, *, skipped):
        self.steps.append((attempt.name, attempt.step))

    def clipped(self, clip):
        self.watch.recorder.clipped(clip)

    def stepping_again(self, step, _name, *, scaled, held_back):
        self.again.append((step, scaled, held_back))


def watched(iteration, steps=3, **settings):
    told = Told()
    with told.watch.watching(), on_clip(told.clipped):
        loop = Loop(**settings)
        for _ in range(steps):
            iteration(loop)
    assert told.watch.recorder.failed is None
    return told


def by_hand(it):
    it.backward()
    it.step()
    it.optimizer.step()


SICK = {
    "by hand": by_hand,
    "after a clipping": lambda it: (it.backward(), it.step(), clip_grad_norm_(it.parameters, 0.1), it.optimizer.step()),
    "by the scaler": lambda it: (it.backward(), it.step(), it.step()),
    "by a closure without a backward": lambda it: (it.backward(), it.step(), it.optimizer.step(lambda: 0.0)),
}


@pytest.mark.parametrize("name", SICK)
def test_a_second_step_is_told_and_does_not_count(name):
    told = watched(SICK[name], fused=True)
    assert told.steps == [("optimizer", step) for step in range(3)]
    assert told.again == [(step, True, False) for step in range(3)]


def test_a_skip_that_is_bypassed_is_said():
    told = watched(lambda loop: (loop.backward(torch.inf), loop.step(), loop.optimizer.step()), steps=1)
    assert (told.steps, told.again) == ([("optimizer", 0)], [(0, True, True)])


# -- healthy -----------------------------------------------------------------------------------------------------------


def asked_for_by_grad(loop):
    loop.loss().backward()
    loop.optimizer.step()
    for parameter, gradient in zip(loop.parameters, torch.autograd.grad(loop.loss(), loop.parameters), strict=True):
        parameter.grad.data.copy_(gradient)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def evolution(loop):
    for parameter in loop.parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data.copy_(torch.randn(parameter.shape))  # which no counter of versions sees
    loop.optimizer.step()


def sam(loop):
    loop.loss().backward()
    with torch.no_grad():
        for parameter in loop.parameters:
            parameter.add_(parameter.grad, alpha=0.01)
    kept = [parameter.grad.clone() for parameter in loop.parameters]
    loop.optimizer.zero_grad()
    loop.loss().backward()
    with torch.no_grad():
        for parameter, gradient in zip(loop.parameters, kept, strict=True):
            parameter.sub_(gradient, alpha=0.01)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


HEALTHY = {
    "heavy ball": lambda it: (it.loss().backward(), it.optimizer.step()),  # nothing is cleared
    "zeroed in place": lambda it: (
        *(it.loss().backward(), it.optimizer.step()),
        *(it.optimizer.zero_grad(set_to_none=False), it.optimizer.step()),  # weight decay alone
    ),
    "two backwards": lambda it: (
        *(it.loss().backward(), it.optimizer.step(), it.loss().backward(), it.optimizer.step()),
        it.optimizer.zero_grad(),
    ),
    "gradients are None": lambda it: (
        *(it.optimizer.step(), it.optimizer.step(), it.backward(), it.step()),
        *(it.optimizer.zero_grad(), it.optimizer.step()),
    ),
    "asked for by grad": asked_for_by_grad,
    "evolution": evolution,
    "SAM": sam,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_no_second_step_is_not_told(name):
    assert watched(HEALTHY[name]).again == []


class Twice(torch.optim.SGD):
    """Steps as its class does, more than once: what a step consists of is the optimizer's own affair."""

    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


def test_a_step_of_several_parts_is_one():
    told = Told()
    with told.watch.watching():
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # torch hooks a class at its first optimizer
        loop = Loop()
        optimizer = Twice(loop.parameters, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loop.loss().backward()
            optimizer.step()
    assert told.again == []
    assert told.steps == [("optimizer", 0), ("optimizer", 1)]


def test_optimizers_in_the_backward_step_once_each():
    told = Told()
    with told.watch.watching():
        loop = Loop()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in loop.parameters}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in loop.parameters:
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            loop.loss().backward()
    assert told.again == []
    assert len(told.steps) == 8


# -- what is said ------------------------------------------------------------------------------------------------------


def test_run_tells_it_once_with_its_line_and_numbers_the_steps_by_their_backwards(tmp_path):
    with watching(tmp_path) as (reports, sentences, watch):
        loop = Loop()
        for _ in range(4):
            by_hand(loop)
    (report,) = reports
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.step, report.verdict) == ("AMP407", "error", 0, "sick")
    assert finding.where.source.file.endswith("test_stepping_again.py")
    assert finding.prescription.status == "not_run"
    assert "remove the second call" in finding.prescription.detail
    assert not [said for said in sentences if "AMP407" in said]
    assert watch._doctor._lines.attempted == 4


def test_without_a_scaler_it_is_a_warning_and_no_step_is_sick(tmp_path):
    def without_a_scaler(it):
        it.plain_backward()
        it.optimizer.step()
        it.optimizer.step()

    reports, sentences = told(tmp_path, without_a_scaler, steps=4)
    assert reports == []
    (said,) = sentences
    assert said.startswith("warning AMP407: step 0: ")
    assert "steps again on the gradients of its last update" in said


def test_a_graph_that_is_replayed_may_hold_a_backward(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)

    def iteration(loop):
        if loop.parameters[0].grad is None:
            loop.scaler.scale(loop.loss()).backward()  # as at the capture
        torch.cuda.CUDAGraph.replay(None)
        loop.step()

    assert watched(iteration).again == []
