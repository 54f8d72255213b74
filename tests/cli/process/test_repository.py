"""What GitHub shows is named from the repository's root; what people read, from the working directory."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.cli.main import main
from ampdoctor.cli.output import place_in_repository

FACTORY = """
import sys
import torch
from ampdoctor import TrainingRun

sys.path.insert(0, "../src")

def make_run():
    from net import Net
    return TrainingRun(model=Net(), batches=[torch.ones(2, 4)], precision="fp16", scaler={},
                       loss=lambda model, batch: model(batch).sum(),
                       optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
"""
NET = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return torch.log(super().forward(x) * 0)
"""


@pytest.fixture
def clone(tmp_path):
    """A clone with a sick checkpoint and code in folders of it, and a sick checkpoint beside it."""
    root = tmp_path / "clone"
    for name in ("training", "eval", "src", ".git"):
        (root / name).mkdir(parents=True)
    for file in (root / "training/sick.safetensors", root / "eval/sick.safetensors", tmp_path / "sick.safetensors"):
        save_file({"fc.weight": torch.tensor([[1.0, float("nan")]])}, file)
    (root / "training/run.py").write_text(FACTORY)
    (root / "src/net.py").write_text(NET)
    return root


@pytest.fixture
def annotated(capsys, tmp_path):
    """Return a function that runs a command and gives the one path that its annotation and its SARIF name."""

    def run(*arguments):
        sarif = tmp_path / "report.sarif"
        assert main([*arguments, "--format", "github", "--report", f"sarif={sarif}"]) == 1
        (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("::error"))
        (result,) = json.loads(sarif.read_text())["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        (named, *line) = said.partition("file=")[2].partition(",title")[0].split(",line=")
        assert [str(place["region"]["startLine"])] == (line or ["1"])
        base = {"%SRCROOT%": "", "ROOT": "/"}[place["artifactLocation"]["uriBaseId"]]
        assert base + place["artifactLocation"]["uri"] == named
        return named

    return run


@pytest.fixture
def at(monkeypatch):
    """Return a function that goes to a folder and says where in a repository that is, as root and folder."""

    def go(folder):
        monkeypatch.chdir(folder)
        place = place_in_repository().get("repository")
        return place and (place["root"], place["folder"])

    return go


def test_a_checkpoint_below_the_root_is_named_from_it_wherever_the_command_runs(clone, annotated, monkeypatch):
    for folder, path in ((clone, "training/sick.safetensors"), (clone / "training", "sick.safetensors")):
        monkeypatch.chdir(folder)
        assert annotated("scan", path) == "training/sick.safetensors"
    assert annotated("scan", "../eval/sick.safetensors") == "eval/sick.safetensors"


def test_a_line_of_code_is_named_from_the_root_and_a_saved_report_keeps_that_elsewhere(clone, annotated, monkeypatch):
    monkeypatch.chdir(clone / "training")
    saved = clone.parent / "r.json"
    assert annotated("bisect-nan", "run.py:make_run", "--report", f"json={saved}") == "src/net.py"
    for folder in (clone.parent, clone, clone / "eval"):
        monkeypatch.chdir(folder)
        assert annotated("merge", str(saved)) == "src/net.py"


def test_the_root_is_the_nearest_clone(clone, at):
    assert at(clone / "training") == (clone.as_posix(), "training")
    assert at(clone) is None
    assert at(clone.parent) is None
    inner = clone / "training/deeper/yet"
    inner.mkdir(parents=True)
    (inner.parent / ".git").write_text("gitdir: elsewhere")  # of a submodule
    assert at(inner) == (inner.parent.as_posix(), "yet")
