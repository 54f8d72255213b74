"""What a script's loop runs over: what comes before its first step, its epochs, a checkpoint's place."""

from __future__ import annotations

import textwrap

import pytest
import torch

from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from tests.probes.traced import stepped

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
torch.manual_seed(1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(rows):
    optimizer.zero_grad()
    loss = model(rows).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
SAMPLER = """
rows = torch.arange(160.0).reshape(40, 4)
sampler = DistributedSampler(range(40), num_replicas=1, rank=0, seed=3)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
step = 0
for epoch in range(9):
    sampler.set_epoch(epoch)
    for batch in loader:
        train(batch)
        print("rows", batch[:, 0].tolist())
        step += 1
        if step == 14 and len(sys.argv) > 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, sys.argv[1])
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda body: (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))


def replayed(capsys, steps, **request):
    """What the steps print, the numbers of optimizer steps they take, and what was left out."""
    with open_replay(ReplayRequest(factory="train.py", **request)) as replay:
        session = replay.session()
        capsys.readouterr()
        taken = [outcome.optimizer_steps for outcome in stepped(session, steps=steps)]
        session.close()
        left_out = [left.reason for left in replay.left_out()]
    return capsys.readouterr().err.splitlines(), taken, left_out


def test_what_fills_a_buffer_before_the_first_backward_is_part_of_no_step(write, capsys):
    write("""
        seen = []
        for turn in range(400):
            seen.append(torch.randn(4))
            if turn >= 250:
                train(torch.stack(seen[-3:]))
                print("turn", turn, len(seen))
    """)
    said, taken, _ = replayed(capsys, 3)
    assert taken == [1, 1, 1]
    assert said == ["turn 250 251", "turn 251 252", "turn 252 253"]


def test_a_loop_that_draws_nothing_is_run_up_to_its_first_backward_too(write, capsys):
    write("""
        turn = 0
        while turn < 400:
            turn += 1
            if turn % 2 == 0 and turn > 20:
                train(torch.randn(3, 4))
            print("turn", turn)
    """)
    said, taken, _ = replayed(capsys, 3)
    assert (said, taken) == (["turn 22", "turn 23", "turn 24"], [1, 0, 1])


def bare(capsys, arguments=()):
    import runpy
    import sys

    before, sys.argv = sys.argv, ["train.py", *arguments]
    try:
        torch.manual_seed(0)
        runpy.run_path("train.py", run_name="__main__")
    finally:
        sys.argv = before
    return capsys.readouterr().out.splitlines()


def test_each_round_has_the_order_of_its_epoch(write, capsys):
    write(SAMPLER)
    order = bare(capsys)
    assert len({*order[:20]}) == 20
    assert replayed(capsys, 23)[0] == order[:23]


def test_behind_a_checkpoint_the_epoch_is_the_trainings_and_the_loops_counter_is_the_files(write, capsys):
    write(SAMPLER)
    order = bare(capsys, ["saved.pt"])
    said, _, left_out = replayed(capsys, 9, checkpoint="saved.pt", until_sick=True)
    assert said == order[14:23]
    assert any(reason.startswith("of the script step = 14 are set") for reason in left_out)


def test_counters_of_a_function_and_of_an_object_are_set_as_well(write, capsys):
    write("""
        class Trainer:
            def __init__(self):
                self.step, self.best = 0, 9.5
            def fit(self, iter_num=0):
                if len(sys.argv) > 1:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    more = {"step": 7, "iter_num": 70, "best": 0.5, "model_args": {"step": 3}}
                    torch.save({**state, **more}, sys.argv[1])
                while True:
                    train(torch.randn(3, 4))
                    self.step += 1
                    iter_num += 1
                    print("at", self.step, iter_num, self.best)
                    if self.step > 40:
                        break
        Trainer().fit()
    """)
    bare(capsys, ["saved.pt"])
    said, _, _ = replayed(capsys, 2, checkpoint="saved.pt", until_sick=True)
    assert said == ["at 8 71 0.5", "at 9 72 0.5"]
