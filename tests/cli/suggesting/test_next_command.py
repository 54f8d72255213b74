"""The command that a report ends with: typed as it stands, it is about the same run, and is accepted."""

from __future__ import annotations

import shlex

import pytest
import torch

from ampdoctor.cli.main import main

RUN = """
import torch
from ampdoctor import TrainingRun

def make_run(width, name="x"):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    return TrainingRun(
        model=model, batches=[torch.ones(2, width)] * 3, loss=lambda net, x: net(x).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), 0.01), scaler={},
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "train_wide.py").write_text(RUN)
    model = torch.nn.Linear(3, 1)
    torch.save({"model": model.state_dict()}, tmp_path / "a folder" / "PATH")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def next_of(capsys):
    """What follows `ampdoctor` in the last line."""
    last = capsys.readouterr().out.splitlines()[-1]
    return last.rpartition("ampdoctor ")[2]


@pytest.mark.parametrize("command", ["profile", pytest.param("recommend", marks=pytest.mark.slow)])
def test_the_command_on_a_run_has_all_that_was_said_of_it(command, folder, capsys):
    given = ["--arg", "width=3", "--arg", 'name="it\'s $HOME"', "--policy", "native", "--steps", "2"]
    assert main([command, "a folder/train_wide.py:make_run", *given]) == 0
    again = shlex.split(next_of(capsys))
    assert [again.count(word) for word in ("width=3", 'name="it\'s $HOME"', "native")] == [1, 1, 1]
    assert main(again) == 0
    said = capsys.readouterr()
    assert "verdict: " in said.out
    assert "error" not in said.err
