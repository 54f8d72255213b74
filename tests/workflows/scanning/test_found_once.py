"""A path is looked at once: each file of a checkpoint is opened once, each folder listed once; a log at most twice."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.workflows.scan import scan, scan_several
from ampdoctor.workflows.scan_against import compare
from ampdoctor.workflows.scan_checkpoint import list_structure


@pytest.fixture
def run(tmp_path):
    """A run of the Trainer's with four checkpoints, one of them sick, and a log beside them."""
    for step in (100, 200, 300, 400):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"fc.weight": torch.full((4, 4), torch.nan if step > 200 else 1.0)}, folder / "model.safetensors")
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    (tmp_path / "run" / "train.jsonl").write_text('{"step": 100, "loss": 1.0}\n')
    return tmp_path / "run"


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """How often each path below the test's folder is opened or listed."""
    counts = Counter()

    def counting(name):
        real = getattr(os, name)

        def called(path=".", *arguments, **options):
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(tmp_path):
                counts[Path(path).relative_to(tmp_path).as_posix()] += 1
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, name, called)

    for name in ("open", "scandir", "listdir"):
        counting(name)
    return counts


def require_once(counted):
    """A log is looked at before it is read."""
    logs = {path for path in counted if path.endswith((".json", ".jsonl"))}
    assert {path: count for path, count in counted.items() if count > (2 if path in logs else 1)} == {}


LOOKS = {
    "scan": scan,
    "scan of several": lambda path: scan_several([path, Path(path).parent / "gone.pt"]),
    "list": list_structure,
    "load": load_state,
}


@pytest.mark.parametrize("look", [pytest.param(look, id=name) for name, look in LOOKS.items()])
def test_a_file_is_opened_once(look, run, counted):
    look(run / "checkpoint-100" / "model.safetensors")
    assert counted == {"run/checkpoint-100/model.safetensors": 1}


@pytest.mark.parametrize("look", [pytest.param(look, id=name) for name, look in LOOKS.items()])
def test_a_folder_is_listed_once_and_each_of_its_files_opened_once(look, run, counted):
    look(run / "checkpoint-100")
    names = ("", "/model.safetensors", "/optimizer.pt", "/trainer_state.json")
    assert counted.keys() == {f"run/checkpoint-100{name}" for name in names}
    require_once(counted)


@pytest.mark.parametrize("every", [False, True])
def test_a_run_and_each_of_its_checkpoints_are_listed_once(every, run, counted):
    assert scan(run, every_member=every).trend.first_sick == "checkpoint-300"
    folders = {"run", *(f"run/checkpoint-{step}" for step in (100, 200, 300, 400))}
    assert {path for path in counted if "." not in path} == folders
    require_once(counted)
    assert counted["run/train.jsonl"] == 2
    assert counted["run/checkpoint-100/model.safetensors"] == every


def test_of_a_run_that_is_only_listed_no_file_is_opened(run, counted):
    assert len(list_structure(run).structure.members) == 4
    assert set(counted) == {"run", *(f"run/checkpoint-{step}" for step in (100, 200, 300, 400))}
    assert set(counted.values()) == {1}


def test_two_that_are_compared_are_each_looked_at_once(run, counted):
    compare(run / "checkpoint-200", run / "checkpoint-100")
    assert len(counted) == 8
    require_once(counted)
