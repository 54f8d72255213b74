"""What a run's functions reach is put back with the run; what cannot be put back is seen to have moved."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ampdoctor import TrainingRun
from ampdoctor.replay.python_state import has_moved
from ampdoctor.replay.reachable_state import reached
from ampdoctor.replay.session import Session

COUNT = 0
LOG = logging.getLogger(__name__)


class Dice(random.Random):
    """A generator of a class of the user's own."""


class Shared:
    steps = 0


def session_of(make_step, *, batches=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = TrainingRun(
        model=model,
        optimizer=optimizer,
        batches=[torch.ones(1, 4)] * 3 if batches is None else batches,
        step=make_step(model, optimizer),
        precision="fp32",
    )
    session = Session(run, device=torch.device("cpu"))
    assert session.has_step(0)
    return session


def counting(place):
    """A step that moves one kind of state, and a look at that state."""
    names, ring, table = SimpleNamespace(steps=0), collections.deque([1, 2], maxlen=2), collections.defaultdict(list)
    array, tensor, average = np.zeros(3), torch.zeros(3), None
    chance, stream, own = Dice(0), np.random.default_rng(0), torch.Generator()
    kept, inner = [[0]], 0

    def helper():
        nonlocal inner
        inner += 1

    def by_default(held=[0]):  # noqa: B006 - as people write it, by accident
        held[0] += 1

    def moves(model):
        global COUNT  # noqa: PLW0603 - as people write it
        if place == "global":
            COUNT += 1
        elif place == "class":
            Shared.steps += 1
        elif place == "tensor":
            tensor.data.add_(1)
        elif place == "average":
            average.update_parameters(model)
        moved = {
            "object": lambda: setattr(names, "steps", names.steps + 1),
            "ring": lambda: ring.append(len(ring) + ring[-1]),
            "table": lambda: table["a"].append(1),
            "array": lambda: array.__iadd__(1),
            "random": chance.random,
            "numpy": stream.random,
            "torch": lambda: torch.rand(1, generator=own),
            "nested": lambda: kept[0].append(1),
            "helper": helper,
            "default": by_default,
        }
        moved.get(place, lambda: None)()

    def look():
        averaged = None if average is None else (int(average.n_averaged), average.module.weight.sum().item())
        return repr((
            *(COUNT, Shared.steps, names, ring, dict(table), array, tensor, averaged, chance.getstate()),
            *(stream.bit_generator.state, own.get_state().sum(), kept, inner, by_default.__defaults__),
        ))  # fmt: skip

    def make_step(model, optimizer):
        nonlocal average
        average = AveragedModel(model)

        def step(model, batch):
            moves(model)
            with torch.no_grad():
                model.weight.mul_(0.5)

        return step

    return make_step, look


class Odd(dict):
    """What a class of the user's own does when it is asked is its own affair."""

    def __iter__(self):
        raise RuntimeError("not for you")

    values = items = keys = __len__ = __iter__


class Silent:
    __slots__ = ("steps",)

    def __getattr__(self, name):
        raise RuntimeError(name)

    @property
    def __class__(self):
        raise RuntimeError("no class")


def odd_step(place):
    """A step that moves state in an odd place, and a look at it."""
    odd, silent, box = Odd(), Silent(), bytearray(2)
    tensor, iterator = torch.zeros(2), itertools.cycle([1, 2, 3])
    dict.__setitem__(odd, "n", 0)
    silent.steps = 0
    tensor.tag = 0

    def fresh():
        global FRESH  # noqa: PLW0603 - as people write it
        FRESH = 1

    def step(model, batch):
        moved = {
            "odd": lambda: dict.__setitem__(odd, "n", dict.__getitem__(odd, "n") + 1),
            "slots": lambda: setattr(silent, "steps", silent.steps + 1),
            "bytes": lambda: box.__setitem__(0, 1),
            "tag": lambda: setattr(tensor, "tag", 1),
            "grad": lambda: setattr(tensor, "grad", torch.ones(2)),
            "fresh": fresh,
            "class": lambda: setattr(Shared, "fresh", 1),
            "hook": lambda: model(torch.ones(1, 4)),
            "grows": lambda: tensor.resize_(9),
            "cycle": lambda: next(iterator),
        }
        moved[place]()

    def look():
        slots = object.__getattribute__(silent, "steps")
        new = "FRESH" in globals(), hasattr(Shared, "fresh")
        return repr((dict.__repr__(odd), slots, box, tensor.tag, tensor.grad, new, CALLED))

    return step, look, iterator


CALLED = [0]


def hook(*_):
    CALLED[0] += 1


@pytest.mark.parametrize("place", ["odd", "slots", "bytes", "tag", "grad", "fresh", "class", "hook"])
def test_odd_places_are_put_back_and_nothing_of_the_users_is_called(place):
    step, look, _ = odd_step(place)
    session = session_of(lambda model, optimizer: step)
    session.model.register_forward_hook(hook)
    start, before = session.snapshot(), look()
    session.step(0)
    assert look() != before
    start.restore()
    assert look() == before


def test_what_only_an_iterator_leads_to_is_left_with_it():
    """A cycle saves what it has yielded: emptied, it would end."""
    step, _, iterator = odd_step("cycle")
    session = session_of(lambda model, optimizer: step)
    start = session.snapshot()
    for _ in range(4):
        session.step(0)
    start.restore()
    assert [next(iterator) for _ in range(4)] == [2, 3, 1, 2]


def test_memory_that_cannot_be_written_to_is_not(tmp_path):
    np.arange(4.0).tofile(tmp_path / "data")
    with pytest.warns(UserWarning, match="not writable"):
        data = torch.from_numpy(np.memmap(tmp_path / "data", mode="r"))
    session = session_of(lambda model, optimizer: lambda model, batch: data.sum())
    start = session.snapshot()
    session.step(0)
    start.restore()  # would end the process


def test_a_tensor_that_grows_has_moved():
    step, *_ = odd_step("grows")
    session = session_of(lambda model, optimizer: step)
    start, before = session.snapshot(), session.reached.beyond()
    session.step(0)
    assert has_moved(before, session.reached.beyond())
    start.restore()


PLACES = ("global", "class", "tensor", "average", "object", "ring", "table", "array", "random", "numpy", "torch")


@pytest.mark.parametrize("place", [*PLACES, "nested", "helper", "default"])
def test_what_a_step_moves_is_put_back(place):
    make_step, look = counting(place)
    session = session_of(make_step)
    start, before, beyond = session.snapshot(), look(), session.reached.beyond()
    for _ in range(2):
        session.step(0)
        session.step(0)
        assert look() != before, "the step moves it"
        start.restore()
        assert look() == before
    assert not has_moved(beyond, session.reached.beyond())


def cached(_):
    return [1]


def call(function, arguments):
    function(next(arguments))


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(list(range(9))).__next__,
        lambda: itertools.count().__next__,
        lambda: (x for x in range(9)).__next__,
        lambda: functools.partial(next, zip(iter([1] * 9), itertools.repeat(0))),
        lambda: functools.partial(next, map(abs, iter([1] * 9))),
        lambda: functools.partial(call, functools.lru_cache(cached), iter(range(9))),
    ],
    ids=["list", "count", "generator", "zip", "map", "cache"],
)
def test_what_cannot_be_put_back_is_seen_to_move(make):
    def make_step(model, optimizer):
        one, moves = make(), [True]

        def draw():
            return one() if moves[0] else None

        def step(batch):
            draw()

        step.moves = moves
        return step

    session = session_of(make_step)
    before = session.reached.beyond()
    session.step(0)
    assert has_moved(before, session.reached.beyond()), "an iterator has moved on"
    before, session.run.step.moves[0] = session.reached.beyond(), False
    session.step(0)
    assert not has_moved(before, session.reached.beyond()), "nothing has moved"


def test_libraries_are_not_entered():
    def make_step(model, optimizer):
        def step(batch):
            LOG.getChild(str(next(fresh))).debug("a step")

        fresh = itertools.repeat(7)
        return step

    session = session_of(make_step)
    before = session.reached.beyond()
    session.step(0)
    assert not has_moved(before, session.reached.beyond())


class Kept:
    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor


def test_objects_with_slots_are_each_walked():
    """The walk makes a description of each, and one that is gone leaves its id to the next."""
    kept = [Kept(torch.full((2,), float(place))) for place in range(200)]
    found = [place for place, _ in reached([lambda: kept]) if type(place) is torch.Tensor]
    assert [int(tensor[0]) for tensor in found] == list(range(200))
