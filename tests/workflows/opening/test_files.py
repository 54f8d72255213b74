"""What a replayed step does to the user's files is said, and is let be."""

from __future__ import annotations

import sys

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

TRAIN = """
import os
import torch
from ampdoctor import TrainingRun

def run(after_step):
    model = torch.nn.Linear(4, 2)
    return TrainingRun(
        model=model,
        batches=[torch.ones(2, 4)] * 3,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        after_step=after_step,
    )

def saving():
    def after_step(run, step):
        torch.save(run.model.state_dict(), f"step{step}.pt")
        os.replace(f"step{step}.pt", "last.pt")
    return run(after_step)

def logging():
    def after_step(run, step):
        with open("loss.log", "a") as file:
            file.write(str(step))
        os.makedirs(".cache", exist_ok=True)
        torch.save(run.model.state_dict(), ".cache/last.pt")
    return run(after_step)
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [("saving", ["the run's own code opens step0.pt for writing at train.py:18"]), ("logging", [])],
)
def test_the_first_file_that_a_step_changes_is_named_once(function, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    report = bisect_nan(ReplayRequest(factory=f"train.py:{function}", steps=2))
    sys.modules.pop("train", None)
    notes = [note for note in report.run["notes"] if "own code" in note]
    assert [note.partition(",")[0] for note in notes] == said
    assert (tmp_path / ("last.pt" if said else "loss.log")).is_file()
