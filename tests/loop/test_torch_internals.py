"""Backwards are seen at the engine: by whatever name they begin, nested, and torch is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Variable
from torch.autograd import backward as bound_backward
from torch.autograd import grad as bound_grad

from ampdoctor.hooks.torch_internals import replaced, seen_backwards, shims


def leaf():
    return torch.ones(3, requires_grad=True)


DOORS = {
    "Tensor.backward": lambda x: (x * 2).sum().backward(),
    "autograd.backward": lambda x: torch.autograd.backward((x * 2).sum()),
    "autograd.grad": lambda x: torch.autograd.grad((x * 2).sum(), x),
    "backward bound before": lambda x: bound_backward((x * 2).sum()),
    "grad bound before": lambda x: bound_grad((x * 2).sum(), x),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_is_seen_once_with_what_it_was_given(door):
    seen = []

    def look(backward, run):
        seen.append((len(backward.roots), [t is x for t in backward.inputs], backward.accumulated))
        return run()

    x = leaf()
    with seen_backwards(look):
        returned = DOORS[door](x)
    by_name = "grad" in door.split() or door.endswith("grad")
    assert seen == [(1, [True] if by_name else [], not by_name)]
    gradient = returned[0] if by_name else x.grad
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_torch_is_as_it_was_also_after_an_exception():
    engine = vars(Variable)["_execution_engine"]
    loss = leaf().sum()
    with pytest.raises(ZeroDivisionError), seen_backwards(lambda _backward, run: run() or 1 / 0):
        loss.backward()
    assert vars(Variable)["_execution_engine"] is engine
    leaf().sum().backward()


def test_without_the_engines_name_a_loop_runs_unseen(monkeypatch):
    monkeypatch.setattr("ampdoctor.hooks.torch_internals._ENGINE", "_no_such_name")
    x = leaf()
    with seen_backwards(lambda _backward, _run: pytest.fail("seen")):
        x.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0]
    assert list(shims()) == ["backwards-unseen"]


class Owner:
    """Has one method of its own, and inherits none."""

    def method(self):
        return "original"


class Heir(Owner):
    """Has none of its own."""


def around(what):
    before = what.method
    return lambda *_: f"around {before(*_)}"


@pytest.mark.parametrize("owner", [Owner, Heir, Owner()], ids=["class", "heir", "object"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_what_was_replaced_is_back_in_whatever_order_those_end_that_replaced_it(owner, order):
    before = dict(vars(owner))
    contexts = []
    for _ in range(3):
        contexts.append(replaced(owner, "method", around(owner)))
        contexts[-1].__enter__()
    for place in order:
        contexts[place].__exit__(None, None, None)
    assert dict(vars(owner)) == before


def test_what_another_has_put_around_a_replacement_stays():
    owner = Owner()
    with replaced(owner, "method", lambda: "ours"):
        owner.method = theirs = around(owner)
    assert owner.method is theirs
    assert owner.method() == "around ours"
