"""Updates that are kept behind them: how many, for how long, and what they may take."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.hooks.program import Program
from ampdoctor.live.recording import programs
from ampdoctor.live.recording.programs import KeptUpdate, KeptUpdates
from ampdoctor.live.recording.recorder import StepRecorder


def update(step, *given, optimizer="optimizer", buffers=None):
    program = Program(
        model=nn.Module(),
        optimizer=None,
        optimizer_name=optimizer,
        scaler=None,
        instructions=(),
        given=given,
        buffers=buffers or {},
        step=step,
        line=None,
    )
    return KeptUpdate.of(program, ())


def steps(kept):
    return [one.program.step for one in kept._updates]


@pytest.mark.parametrize(("most", "left"), [(1, []), (2, [7]), (3, [6, 7]), (100, list(range(8)))])
def test_those_that_are_sound_are_kept_for_the_next(most, left):
    """With the next one, which may be sick, they are as many as were asked for."""
    kept = KeptUpdates(most, 1000)
    for step in range(8):
        kept.keep(update(step))
        kept.was_sound("optimizer", step, 0.5)
    assert steps(kept) == left


def test_those_whose_numbers_are_on_their_way_are_kept_besides():
    kept = KeptUpdates(2, 1000)
    for step in range(8):
        kept.keep(update(step))
        if step >= 4:
            kept.was_sound("optimizer", step - 4, 0.5)
    assert steps(kept) == [3, 4, 5, 6, 7]
    kept.was_sound("optimizer", 6, 0.5)  # those between were lost
    assert steps(kept) == [6, 7]
    kept.was_sound("optimizer", 1, 0.5)
    kept.was_sound("another", 7, 0.5)
    assert steps(kept) == [6, 7]


def test_the_oldest_go_for_what_they_take():
    kept = KeptUpdates(100, 1000)
    table = torch.zeros(100)  # enters each, and is held once
    for step in range(8):
        kept.keep(update(step, torch.zeros(50), table))
    assert steps(kept) == [5, 6, 7]
    assert kept.crowded_out
    kept.clear()
    assert steps(kept) == []
    assert not kept.crowded_out
    kept.keep(update(9, torch.zeros(10_000)))
    assert steps(kept) == []


def test_a_graph_behind_what_is_given_is_not_kept_and_writes_are_still_seen():
    weight = torch.ones(2, requires_grad=True)
    state = weight * 2
    kept = update(0, state)
    assert kept.program.given[0].grad_fn is None
    assert kept.program_of(nn.Module(), ()).unexplained == ()
    state.detach().zero_()
    assert "1 of the tensors" in kept.program_of(nn.Module(), ()).unexplained[0]


def recorded(model, optimizer):
    recorder = StepRecorder()
    with recorder.watching():
        for step in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            kept = recorder.keepable(optimizer, name="optimizer", scaler=None, step=step)
            with recorder.pausing():
                optimizer.step()
            recorder.updated(optimizer)
            recorder.models.settle()
    return recorder, kept


def test_a_kept_update_is_its_program_with_the_settings_that_it_had():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    recorder, kept = recorded(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    program = recorder.kept(kept)
    assert program.optimizer is optimizer
    assert program.model is model
    assert float(program.settings[0]["lr"]) == 0.5
    assert set(program.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert int(program.buffers["1.num_batches_tracked"]) == 1


def test_neither_model_nor_optimizer_is_kept_alive():
    def loop():
        model = nn.Linear(4, 4)
        return recorded(model, torch.optim.SGD(model.parameters(), lr=0.1))

    recorder, kept = loop()
    gc.collect()
    assert kept.optimizer() is None
    assert recorder.kept(kept) is None


SYNCHRONISES = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item", "aten._to_copy", "aten.copy_"}


class Heard(TorchDispatchMode):
    """Hears which of torch's ops run."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


def test_to_keep_an_update_waits_for_no_device_and_copies_nothing(monkeypatch):
    heard, keepable = Heard(), StepRecorder.keepable

    def hearing(*args, **kwargs):
        with heard:
            return keepable(*args, **kwargs)

    monkeypatch.setattr(StepRecorder, "keepable", hearing)
    monkeypatch.setattr(programs, "unseen", torch.no_grad)  # which no mode would see
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    recorded(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    assert not heard.ops & SYNCHRONISES
    assert heard.ops <= {"aten.clone", "aten.detach"}  # of the learning rate
