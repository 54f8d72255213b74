"""Pickles of a few kilobytes that ask for more work or memory than a machine has.

Seconds are those of the processor, with room for a slow machine: without its protection each takes minutes.
"""

from __future__ import annotations

import time

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import LimitExceededError


def doubled(levels, pair):
    node = pair(1, 2)
    for _ in range(levels):
        node = pair(node, node)
    return node


PAIRS = [
    lambda left, right: [left, right],
    lambda left, right: (left, right),
    lambda left, right: {"a": left, "b": right},
    lambda left, right: [{"a": left}, (right,)],
]


@pytest.mark.parametrize(
    ("pair", "place"), [*((pair, "extra") for pair in PAIRS), (PAIRS[0], "state"), (PAIRS[0], "root")]
)
def test_a_value_that_is_shared_at_every_level_is_refused_at_once(tmp_path, pair, place):
    bomb = doubled(60, pair)
    whole = {
        "extra": {"model": {"w": torch.ones(2)}, "x": bomb},
        "state": {"state": {0: {"exp_avg": bomb}}, "param_groups": [{"params": [0]}]},
        "root": bomb,
    }
    torch.save(whole[place], tmp_path / "c.pt")
    began = time.process_time()
    with pytest.raises(LimitExceededError, match="values"):
        load_state(tmp_path / "c.pt")
    assert time.process_time() - began < 25


def test_what_is_shared_a_few_times_is_read_at_each_place(tmp_path):
    state = {"w": torch.full((2,), 3.0)}
    torch.save({"model": state, "ema": state, "history": doubled(8, PAIRS[0])}, tmp_path / "c.pt")
    assert {name: float(model["w"][0]) for name, model in load_state(tmp_path / "c.pt").models.items()} == {
        "model": 3.0,
        "ema": 3.0,
    }


def test_sharing_does_not_hide_nesting(tmp_path):
    deep = []
    for _ in range(150):
        deep = [deep]
    chain = deep
    for _ in range(100):
        chain = [chain]
    torch.save({"model": {"w": torch.ones(2)}, "first": deep, "second": chain}, tmp_path / "c.pt")
    with pytest.raises(LimitExceededError, match="nesting"):
        open_checkpoint(tmp_path / "c.pt")


def test_a_large_value_below_many_levels_is_searched_once(tmp_path):
    plain = list(range(20_000))
    nest = {"z": torch.ones(2), "plain": plain}
    for _ in range(190):
        nest = {"n": nest, "plain": plain, "z": torch.ones(2)}
    torch.save(nest, tmp_path / "c.pt")
    began = time.process_time()
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert len(checkpoint) == 191
    assert time.process_time() - began < 75


class _Bytes:
    def __reduce__(self):
        return bytearray, (10**12,)


def test_memory_that_the_pickle_asks_for_is_not_given(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "x": _Bytes()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w"]
