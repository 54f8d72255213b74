"""A framework's own training beside its replay, on the machine that a replay makes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ampdoctor.workflows.open_replay import open_replay, seed_all
from ampdoctor.workflows.requests import ReplayRequest


@dataclass(kw_only=True)
class Seen:
    """What a training went through: a row for each micro-batch, the weights after the last, the optimizer's rate."""

    rows: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    rate: float = 0.0


@contextmanager
def machine(make, *, policy="cuda", **request):
    with open_replay(ReplayRequest(factory=make, policy=policy, **request)) as replay:
        yield replay


def bare(make, train, *, policy="cuda"):
    """What `train` returns for what the factory makes, in the user's own code."""
    with machine(make, policy=policy) as replay:
        seed_all()
        with replay.factory.user_code("the training itself"):
            return train(replay.factory.function())


def replayed(make, rows, steps, *, policy="cuda", **request):
    """The same training, replayed; `rows` is where its code writes them."""
    with machine(make, policy=policy, **request) as replay:
        session = replay.session()
        rows.clear()
        for index in range(steps):
            assert session.has_step(index)
            session.step(index)
        weights = {name: value.clone() for name, value in session.model.state_dict().items()}
        optimizer = next(iter(session.optimizers.values()))
        seen = Seen(rows=list(rows), weights=weights, rate=optimizer.param_groups[0]["lr"])
        session.close()
        return seen


def same(one, other):
    assert one.rows == other.rows
    assert one.rate == other.rate
    assert one.weights.keys() == other.weights.keys()
    assert [name for name, value in one.weights.items() if not torch.equal(value, other.weights[name])] == []
