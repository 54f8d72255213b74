"""Hooks on gradients that are undefined: torch hands them None, and no door of ours may trip over it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ampdoctor
from ampdoctor import TrainingRun
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest, WatchRequest
from ampdoctor.workflows.watcher import TrainingWatcher


class _LogitsAndLoss(torch.autograd.Function):
    """As a compiled model's graph: of two outputs the loss is differentiated, and the logits' gradient is undefined."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        logits = x @ weight
        return logits, logits.square().mean()

    @staticmethod
    def backward(ctx, of_logits, of_loss):
        assert of_logits is None
        x, weight = ctx.saved_tensors
        through = of_loss * 2 * (x @ weight) / x.shape[0] / weight.shape[1]
        return through @ weight.T, x.T @ through


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return _LogitsAndLoss.apply(self.body(x), self.weight)


def two_outputs():
    torch.manual_seed(0)
    model = TwoOutputs()
    return TrainingRun(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch)[1],
        batches=[torch.randn(2, 4), torch.full((2, 4), torch.nan), torch.randn(2, 4)],
    )


def test_a_hook_is_told_of_gradients_alone():
    told = []
    x = torch.randn(2, 4, requires_grad=True)
    logits, loss = _LogitsAndLoss.apply(x, torch.eye(4))
    on_gradient(logits, told.append)
    handle = on_gradient(loss, lambda gradient: gradient * 3)
    on_gradient(loss, told.append)
    loss.backward(retain_graph=True)
    assert [float(gradient) for gradient in told] == [3.0]
    handle.remove()
    loss.backward()
    assert [float(gradient) for gradient in told] == [3.0, 1.0]


def test_a_replay_passes_by_undefined_gradients():
    report = bisect_nan(ReplayRequest(factory=two_outputs, precision="fp32", steps=3))
    assert (report.verdict, report.complete, [one.code for one in report.findings]) == ("sick", True, ["AMP204"])


def test_a_watched_loop_passes_by_undefined_gradients(tmp_path):
    said = []
    doctor = TrainingWatcher(WatchRequest(health=str(tmp_path), script="train.py"), lambda _: None, said.append)
    run = two_outputs()
    with doctor.attending():
        for batch in run.batches:
            run.optimizer.zero_grad()
            run.model(batch)[1].backward()
            run.optimizer.step()
    doctor.ended(None)
    assert not any("NoneType" in sentence for sentence in said), said
    assert [one.code for one in doctor.report.findings] == ["AMP204"]


def test_every_hook_on_a_gradient_goes_through_the_one_door():
    package = Path(ampdoctor.__file__).parent
    files = [path.stem for path in package.rglob("*.py") if ".register_hook(" in path.read_text(encoding="utf-8")]
    assert files == ["callbacks"]
