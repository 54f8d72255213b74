"""What a step draws from an iterator comes again after a restore, and afterwards the iterator is where it was."""

from __future__ import annotations

import contextlib
import copy
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ampdoctor import TrainingRun
from ampdoctor.replay import python_state
from ampdoctor.replay.python_state import ReplayableIterator
from ampdoctor.replay.session import Session
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class Noisy(torch.utils.data.Dataset):
    """Its items take random numbers: a draw that comes again has to leave the generators as the first one did."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.rand(4) + index


def run_of(step, precision="fp32"):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingRun(model=model, batches=range(9), optimizer=optimizer, step=step, precision=precision)


def session_of(step, precision="fp32"):
    return Session(run_of(step, precision), device=torch.device("cpu"))


def cycle(loader):
    while True:
        yield from loader


def shuffled():
    return DataLoader(Noisy(), batch_size=2, shuffle=True)


def in_a_variable():
    stream = cycle(shuffled())
    return lambda: next(stream)


def in_an_attribute():
    trainer = SimpleNamespace(dl=cycle(shuffled()))
    return lambda: next(trainer.dl)


def rebuilt_run():
    loader = shuffled()
    stream = iter(loader)

    def draw():
        nonlocal stream
        try:
            return next(stream)
        except StopIteration:
            stream = iter(loader)
            return next(stream)

    return draw


def with_a_generator_of_its_own():
    generator = torch.Generator().manual_seed(3)
    stream = cycle(DataLoader(Noisy(), batch_size=2, shuffle=True, generator=generator))
    return lambda: next(stream) + torch.rand(1, generator=generator)


HABITS = (in_a_variable, in_an_attribute, rebuilt_run, with_a_generator_of_its_own)


def drawing(draw):
    """A step that says what it has seen as its loss: a list would be put back."""

    def step(batch):
        item = draw()
        item.mul_(2)  # what a step writes into is its own copy
        return (item.sum() + torch.rand(1)).item()

    return step


@pytest.mark.parametrize("habit", HABITS)
def test_what_was_drawn_comes_again_and_then_what_would_have_come(habit):
    torch.manual_seed(1)
    bare = drawing(habit())
    wanted = [bare(0) for _ in range(9)]

    torch.manual_seed(1)
    step, begin = drawing(habit()), torch.get_rng_state()
    session = session_of(step)
    assert session.has_step(8)
    torch.set_rng_state(begin)
    snapshots, seen = [], []
    for index in range(6):
        snapshots.append(session.snapshot())
        seen.append(session.step(index).loss)
    assert seen == wanted[:6]
    for at in (4, 1, 3):
        snapshots[at].restore()
        assert [session.step(index).loss for index in range(at, 6)] == wanted[at:6]
    assert [session.step(index).loss for index in range(6, 9)] == wanted[6:]


def test_the_users_own_iterator_is_back_when_the_session_ends():
    stream = (torch.full((4,), float(at)) for at in range(9))
    own = stream

    def step(batch):
        assert (type(stream), isinstance(stream, types.GeneratorType), stream.gi_running) == (
            ReplayableIterator,
            True,
            False,
        )
        return next(stream)[0]

    session = session_of(step)
    assert session.has_step(0)
    start = session.snapshot()
    assert session.step(0).loss == 0.0
    start.restore()
    assert session.step(0).loss == 0.0
    session.close()
    assert stream is own
    assert next(stream)[0] == 1.0, "it was drawn from once"


def test_an_iterator_passes_for_itself():
    class Item:
        """Nobody knows whether a copy of it would do."""

    items = [Item(), nn.Parameter(torch.ones(1)), {"x": torch.ones(1)}]
    sized, plain = [iter(DataLoader(items, batch_size=None))], [iter(items)]
    session = session_of(lambda batch: (sized[0], plain[0]))
    start = session.snapshot()
    assert len(sized[0]) == 3
    first = list(plain[0])
    assert first == items
    start.restore()
    again = list(plain[0])
    assert again[:2] == items[:2]
    assert again[2] is not items[2], "of data each gets a copy"
    start.restore()
    assert len(list(copy.copy(plain[0]))) == 0, "a copy is the iterator's own, and that is at its end"
    assert bool(plain[0])


def test_beyond_the_room_the_first_do_not_come_again(monkeypatch):
    monkeypatch.setattr(python_state, "ROOM", 100)
    stream = (torch.full((4,), float(at)) for at in range(30))
    session = session_of(lambda batch: next(stream)[0])
    assert session.has_step(8)
    start = session.snapshot()
    seen = [session.step(index).loss for index in range(9)]
    start.restore()
    assert [*seen, session.step(0).loss] == [*map(float, range(10))], "as without a tape: the iterator goes on"


@pytest.mark.parametrize("wide_first", [True, False])
def test_items_are_drawn_as_written_and_handed_out_in_the_format_of_the_replay(wide_first):
    def items():
        while True:
            yield torch.full((4,), 0.1).half()

    stream = items()
    session = session_of(lambda batch: next(stream)[0], "fp16")
    assert session.has_step(0)
    before = session.snapshot()
    for wide in (wide_first, not wide_first):
        with session.reference() if wide else contextlib.nullcontext():
            session.step(0)
        (item,) = [tensor for _, tensor in session.current_tensors()]
        assert item.dtype is (torch.float32 if wide else torch.float16)
        assert item[0].item() == torch.tensor(0.1).half().item(), "it was rounded when it was made"
        before.restore()


def test_a_nan_that_a_step_draws_is_the_datas():
    def factory():
        items = iter([torch.ones(3, 4), torch.full((3, 4), torch.nan), torch.ones(3, 4)])

        def step(model, batch, optimizer, scaler, autocast):
            optimizer.zero_grad()
            with autocast():
                loss = model(next(items)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return run_of(step, "fp16")

    report = bisect_nan(ReplayRequest(factory=factory, steps=3))
    (finding,) = report.findings
    assert (finding.code, finding.where.step, finding.where.phase) == ("AMP204", 1, "data")
