"""What a step does to its scaler and optimizers is recorded from their methods, in order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import UserCodeError
from ampdoctor.hooks.scaler_events import StepEvents
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped

CPU = torch.device("cpu")


def outcome_of(step, *, scaler=16.0, optimizers=1, factor=1.0):
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    if optimizers == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in model}
    run = TrainingRun(
        model=model,
        batches=[torch.ones(3, 2) * factor],
        step=step,
        optimizer=optimizer,
        scaler={"init_scale": scaler} if scaler else None,
    )
    return stepped(Session(run, device=CPU))[0]


class OwnScaler(torch.amp.GradScaler):
    """With methods of its own that ask torch's: each call is one event all the same."""

    def __init__(self):
        super().__init__("cpu", init_scale=2.0**127)

    def step(self, optimizer):
        return super().step(optimizer)

    def unscale_(self, optimizer):
        super().unscale_(optimizer)


def loss(model, batch):
    return model["a"](batch).sum() + model["b"](batch).sum()


def kinds(outcome):
    return [(event.kind, event.optimizer) for event in outcome.events]


def clip(optimizer):
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1e-3)


def test_the_right_order():
    def step(model, batch, optimizer, scaler):
        scaler.scale(loss(model, batch)).backward()
        scaler.unscale_(optimizer)
        clip(optimizer)
        scaler.step(optimizer)
        scaler.update()

    outcome = outcome_of(step)
    name = "optimizer"
    assert kinds(outcome) == [
        ("scale", ""),
        ("unscale", name),
        ("step", name),
        ("optimizer_step", name),
        ("update", ""),
    ]
    unscale, stepped = outcome.events[1], outcome.events[3]
    assert unscale.edited == 0
    assert unscale.scale == 16.0
    assert stepped.unscaled
    assert stepped.edited == 4
    assert (outcome.optimizer_steps, outcome.skipped) == (1, False)


def misscaled(outcome):
    return [(event.kind, event.misscaled) for event in outcome.events if event.kind in ("unscale", "optimizer_step")]


@pytest.mark.parametrize("second", ["scaled", "plain"])
@pytest.mark.parametrize("unscales", ["first", "between", "last"])
@pytest.mark.parametrize("cleared", [None, "none", "zero"])
def test_gradients_are_of_one_scale_or_of_two(second, unscales, cleared):
    def step(model, batch, optimizer, scaler):
        scaler.scale(model["a"](batch).sum()).backward()
        if unscales == "between":
            scaler.unscale_(optimizer)
        if cleared:
            optimizer.zero_grad(set_to_none=cleared == "none")
        more = loss(model, batch)
        (scaler.scale(more) / 2 if second == "scaled" else more).backward()
        if unscales == "last":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    late = 4 if unscales == "between" and second == "scaled" else 0
    plain = 4 if unscales != "between" and second == "plain" else 0
    assert misscaled(outcome_of(step)) == [("unscale", plain), ("optimizer_step", late)]


def test_gradients_with_their_graph_are_no_backward():
    def step(model, batch, optimizer, scaler):
        total = loss(model, batch).square()
        torch.autograd.grad(scaler.scale(total), list(model.parameters()), retain_graph=True)
        torch.autograd.grad(scaler.scale(total), list(model.parameters()), create_graph=True)
        scaler.scale(total).backward()
        scaler.step(optimizer)

    outcome = outcome_of(step)
    assert [(event.kind, event.scale) for event in outcome.events if event.kind == "grad"] == [("grad", 16.0)]
    assert misscaled(outcome) == [("unscale", 0), ("optimizer_step", 0)]


@pytest.mark.parametrize("made", [lambda: torch.amp.GradScaler("cpu", init_scale=2.0**127), OwnScaler])
def test_a_scaler_of_the_steps_own_is_watched(made):
    def step(model, batch, optimizer):
        scaler = made()
        scaler.scale(loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()

    outcome = outcome_of(step, scaler=None, factor=1e3)
    assert [event.kind for event in outcome.events] == ["scale", "step", "unscale", "update"]
    assert outcome.events[1].scale == 2.0**127
    assert outcome.skipped
    assert outcome.scale_before is None


def test_the_part_that_runs_is_known_also_after_an_exception():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = []

    def step(model, batch, optimizer, scaler, run):
        parts.append(session.events.part)
        hook = optimizer.register_step_pre_hook(lambda *_: parts.append(session.events.part))
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        hook.remove()
        parts.append(session.events.part)
        raise ValueError

    run = TrainingRun(model=model, batches=[torch.ones(1, 1)], step=step, optimizer=optimizer, scaler={})
    session = Session(run, device=CPU)
    with session.watched():
        assert session.has_step(0)
        with pytest.raises(UserCodeError):
            session.step(0)
        assert parts == [None, "optimizer", None]
        assert session.events.part is None


def test_a_closure_that_an_optimizer_calls_is_no_part_of_its_arithmetic():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events = StepEvents(model.parameters, {"optimizer": optimizer})
    parts = []

    def closure():
        parts.append(events.part)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with events.watching():
        optimizer.step(closure)
        optimizer.step(closure=closure)
    assert parts == [None, None]
    assert events.part is None


@pytest.mark.parametrize("turn", ["before", "after"])
def test_a_clipping_by_norm_is_known_while_gradients_are_scaled(turn):
    norms = []

    def step(model, batch, optimizer, scaler):
        scaler.scale(loss(model, batch)).backward()
        if turn == "after":
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if turn == "before":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    unscale = next(event for event in outcome_of(step).events if event.kind == "unscale")
    assert unscale.clipped == ((norms[0], 0.5) if turn == "before" else None)
