"""Batches are drawn once, lazily, and every replay gets copies of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ampdoctor import TrainingRun
from ampdoctor.replay import batches as tape_module
from ampdoctor.replay.batches import BatchBuffer


def tape_of(batches):
    return BatchBuffer(TrainingRun(model=nn.Linear(1, 1), batches=batches, loss=lambda m, x: m(x)))


def test_drawn_only_as_far_as_asked_and_only_once():
    drawn = []

    def source():
        for index in range(5):
            drawn.append(index)
            yield torch.tensor([index])

    tape = tape_of(source)
    assert drawn == []
    assert tape.draw(2) == 2
    assert drawn == [0, 1]
    assert tape.draw(1) == 2
    assert tape.draw(9) == 5
    assert tape.draw(9) == 5
    assert drawn == [0, 1, 2, 3, 4]
    assert [int(tape[i]) for i in range(len(tape))] == [0, 1, 2, 3, 4]


def test_a_copy_for_each_replay():
    original = {"x": torch.zeros(2), "names": ["a"]}
    tape = tape_of([original])
    tape.draw(1)
    first = tape[0]
    first["x"].fill_(5.0)
    first["names"].append("b")
    original["x"].fill_(7.0)
    assert tape[0]["x"].tolist() == [0.0, 0.0]
    assert tape[0]["names"] == ["a"]


def test_workers_are_let_go():
    tape = tape_of(DataLoader(torch.arange(4.0), batch_size=2, num_workers=1))
    assert tape.draw(1) == 1
    workers = tape._iterator._workers
    tape.close()
    for worker in workers:
        worker.join(timeout=10)
        assert not worker.is_alive()


def test_batches_are_let_go_of_only_where_they_take_too_much(monkeypatch):
    tape = tape_of([{"x": torch.full((4,), float(i)), "names": ["a"]} for i in range(5)])
    tape.draw(4)
    assert tape.size == 4 * 16
    tape.keep(lambda index: index == 3)
    assert not tape.cut
    monkeypatch.setattr(tape_module, "ROOM", 40)
    tape.keep(lambda index: index == 3)
    assert (tape.cut, tape.size, len(tape)) == (True, 16, 4)
    assert tape[3]["x"].tolist() == [3.0] * 4
    with pytest.raises(AssertionError, match="batch 1 was let go of"):
        tape[1]
    tape.rewind()
    assert (tape.cut, tape.size, len(tape)) == (False, 0, 0)
    assert tape.draw(9) == 5
    assert tape[1]["x"].tolist() == [1.0] * 4
