from __future__ import annotations

import random

import pytest
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


def trained(listener):
    """Three steps under watch."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with listener.watch.watching():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_an_update_that_is_looked_at_counts_once():
    listener = Looks()
    state = random.getstate()
    trained(listener)
    assert listener.told == [(0, False), (1, False), (2, False)]
    assert random.getstate() == state


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


def in_a_loop(watch, *, scaler=None):
    """Two steps; returns the weight and how often the optimizer has stepped."""
    torch.manual_seed(0)
    model, steps = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    with watch.watching():
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return model.weight.tolist(), len(steps)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("part", ["_innermost", "_attempt_of", "_steps_again", "_ended"])
def test_a_watch_that_fails_raises_nothing_into_the_loop(part, scaled, monkeypatch):
    """It says so once, and each of the loop's own calls is made once."""

    class Silent(Looks):
        def about_to_step(self, attempt, losses):
            pass

        held_back = about_to_step

        def failed(self, error):
            self.told.append(str(error))

    def fails(*_args, **_kwargs):
        raise TypeError("ours")

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None

    expected = in_a_loop(Silent().watch, scaler=scaler())
    listener = Silent()
    monkeypatch.setattr(listener.watch, part, fails)
    assert in_a_loop(listener.watch, scaler=scaler()) == expected
    assert expected[1] == 2
    assert listener.told.count("ours") == 1


def test_what_the_loop_itself_raises_in_a_scaler_s_call_stays_its_own():
    """The call is not made again, as it would be after a failure of ours."""
    listener = Looks()
    calls = []

    def run():
        calls.append(1)
        raise ValueError("the loop's")

    scaler = torch.amp.GradScaler("cpu")
    with listener.watch.watching(), pytest.raises(ValueError, match="the loop's"):
        listener.watch.scaler_called(scaler, "update", None, run)
    assert calls == [1]
