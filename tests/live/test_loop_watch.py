from __future__ import annotations

import random

import torch
from torch import nn

from ampdoctor.live.loop_watch import LoopWatch


class Looks:
    """Looks at every step as a look in place does: it steps the same optimizer, and draws a number."""

    def __init__(self):
        self.watch = LoopWatch(self)
        self.told = []

    def unscaling(self, optimizer):
        pass

    def about_to_step(self, attempt, _losses):
        with self.watch.looking_away():
            random.random()
            attempt.optimizer.step()

    held_back = about_to_step

    def attempted(self, attempt, *, skipped):
        self.told.append((attempt.step, skipped))


def trained(listener, *, fail=False):
    """Three steps under watch."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with listener.watch.watching():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if fail:
                listener.watch.recorder.fail(ValueError("ours"))
            optimizer.step()


def test_an_update_that_is_looked_at_counts_once():
    listener = Looks()
    state = random.getstate()
    trained(listener)
    assert listener.told == [(0, False), (1, False), (2, False)]
    assert random.getstate() == state


def test_a_recording_that_has_failed_does_not_begin_again_after_a_look():
    listener = Looks()
    trained(listener, fail=True)
    assert listener.watch.recorder.away


def stepped(optimizers):
    """What is told of updates by these optimizers, which are made one after the other: the name and the number."""
    told = []

    class Notes(Looks):
        def about_to_step(self, attempt, _losses):
            told.append((attempt.name, attempt.step))

        held_back = about_to_step

    listener = Notes()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with listener.watch.watching():
        for optimizer in optimizers(model):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return told


def test_an_optimizer_that_takes_another_s_place_goes_on_with_its_count():
    def optimizers(model):
        yield from [torch.optim.SGD(model[1].parameters(), lr=0.1)] * 3
        yield from [torch.optim.Adam(model.parameters(), lr=0.1)] * 2

    assert stepped(optimizers) == [("optimizer", step) for step in range(5)]


def test_optimizers_that_take_turns_count_each_for_itself():
    def optimizers(model):
        yield from [torch.optim.SGD(model[1].parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)] * 2

    assert stepped(optimizers) == [(name, step) for step in range(2) for name in ("optimizer", "optimizer2")]


def test_optimizers_of_models_that_follow_each_other_count_each_for_itself():
    def optimizers(model):
        yield from [torch.optim.SGD(model[0].parameters(), lr=0.1)] * 2
        yield from [torch.optim.SGD(model[1].parameters(), lr=0.1)] * 2

    assert stepped(optimizers) == [(name, step) for name in ("optimizer", "optimizer2") for step in range(2)]
