"""The default step, and the call of the user's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import FactoryError
from ampdoctor.replay.parts import call_user_step, default_step, update_scaler_without_optimizer


def run_of(loss, **changes):
    return TrainingRun(model=nn.Linear(2, 1), batches=[1], loss=loss, **changes)


def stepped(run, batches, optimizers=()):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return default_step(run, batches, dict(optimizers), scaler, nullcontext)


def test_gradients_of_the_last_step_are_cleared_also_those_no_optimizer_holds():
    run = run_of(lambda m, x: m(x).sum())
    run.model.weight.grad = torch.full((1, 2), 9.0)
    stepped(run, [torch.ones(1, 2)])
    assert run.model.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("gradient", "scale"), [(1.0, 16.0), (float("inf"), 8.0), (float("nan"), 8.0)])
def test_without_an_optimizer_the_scaler_still_learns_of_an_overflow(gradient, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    model = nn.Linear(2, 1, dtype=torch.float16)
    scaler.scale(model.weight.sum()).backward()
    model.weight.grad.fill_(gradient)
    before = model.weight.grad.clone()
    assert update_scaler_without_optimizer(model, scaler) is (scale < 16.0)
    assert scaler.get_scale() == scale
    assert torch.equal(model.weight.grad.nan_to_num(), before.nan_to_num())


def test_a_loss_without_a_gradient_has_nothing_to_train():
    with pytest.raises(FactoryError, match="does not depend on any parameter"):
        stepped(run_of(lambda _, x: x.sum()), [torch.ones(1, 2)])


@pytest.mark.parametrize("wrong", [3.0, torch.ones(2)])
def test_what_is_no_loss(wrong):
    with pytest.raises(FactoryError, match="the loss"):
        stepped(run_of(lambda _m, _x: wrong), [torch.ones(1, 2)])


AVAILABLE = {"model": 1, "batch": 2, "optimizer": 3}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda batch, model: (batch, model), (2, 1)),
        (lambda model, /, batch: (model, batch), (1, 2)),
        (lambda *, optimizer: optimizer, 3),
        (lambda model, other=7: (model, other), (1, 7)),
        (lambda **everything: everything, AVAILABLE),
    ],
)
def test_arguments_are_matched_by_name(step, expected):
    assert call_user_step(step, AVAILABLE) == expected
