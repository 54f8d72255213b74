"""The folder of a watch that nobody has named."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.workflows.output_files import give_back, usual_folder
from ampdoctor.workflows.requests import WatchRequest


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(time, "time", lambda: 1e9)


@pytest.mark.parametrize(
    ("script", "is_module", "name"),
    [("a/train.py", False, "train"), ("pkg.sub.train", True, "train"), ("my train;.py", False, "my_train_")],
)
def test_it_is_named_for_the_time_and_the_script(script, is_module, name):
    folder = usual_folder(script, is_module=is_module)
    assert re.fullmatch(rf"ampdoctor-health/2001090\d-\d{{6}}-{name}", folder)


def test_two_runs_of_one_second_have_one_each():
    first = usual_folder("train.py", is_module=False)
    assert usual_folder("train.py", is_module=False) == f"{first}-2"
    assert Path(first).is_dir()
    assert Path(f"{first}-2").is_dir()


def test_a_folder_that_nobody_has_written_to_is_given_back():
    first, other = (usual_folder("train.py", is_module=False) for _ in range(2))
    Path(other, "log.jsonl").touch()
    give_back(first)
    give_back(other)
    assert not Path(first).exists()
    assert Path(other).is_dir()
    Path("named").mkdir()
    give_back("named")
    assert Path("named").is_dir()


def test_the_processes_of_a_launcher_share_theirs(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = usual_folder("train.py", is_module=False)
    monkeypatch.setattr(time, "time", lambda: 1e9 + 60)
    Path(first).mkdir(parents=True)
    assert usual_folder("train.py", is_module=False) == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"on_sick": "heal"},
        {"look": "closely"},
        {"look": "off", "on_sick": "stop"},
        {"bundle_max": 0},
        {"record_batches": -1},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        WatchRequest(health="x", script="train.py", **wrong)
