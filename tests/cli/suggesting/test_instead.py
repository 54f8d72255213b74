"""Wrong invocations of someone who has never seen the tool: each is told what to type, and that then works."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from ampdoctor import TrainingRun
from ampdoctor.cli.main import main
from ampdoctor.workflows.profile import profile as measured
from ampdoctor.workflows.requests import ReplayRequest

ROOT = Path(__file__).parents[3]
RUN = """
from ampdoctor import TrainingRun

def make_model():
    raise NotImplementedError

def make_run():
    return TrainingRun(model=make_model(), batches=[])
"""
WRONG = {
    # a command is missing, or is not one
    "model.pt": "scan model.pt",
    "modle.pt": "scan model.pt",
    "runs": "scan runs",
    "train.py": "bisect-nan train.py:make_run",
    "train.py:make_run": "bisect-nan train.py:make_run",
    "AMP201": "rule AMP201",
    "scn model.pt": "scan model.pt",
    "SCAN model.pt": "scan model.pt",
    "bisect_nan train.py:make_run": "bisect-nan train.py:make_run",
    "help scan": "scan --help",
    "-h": "--help",
    "scan -h": "scan --help",
    "version": "--version",
    "-V": "--version",
    "--format json scan model.pt": "scan model.pt --format json",
    "bisect nan ok.py:make_run": "bisect-nan ok.py:make_run",
    "bisect": "bisect-nan FACTORY",
    # a file or a function is named wrongly, or is not for this command
    "scan modle.pt": "scan model.pt",
    "scan runs/chekpoint-4": "scan runs/checkpoint-4",
    "scan train.py": "bisect-nan train.py:make_run",
    "scan train.py:make_run": "bisect-nan train.py:make_run",
    "recommend model.pt": "scan model.pt",
    "profile model.pt": "scan model.pt",
    "bisect-nan model.pt": "scan model.pt",
    "bisect-nan train.py": "bisect-nan train.py:make_run",
    "bisect-nan tarin.py:make_run": "bisect-nan train.py:make_run",
    "bisect-nan train.py:make_rnu": "bisect-nan train.py:make_run",
    "bisect-nan ok.py:make_run --checkpoint rnus": "bisect-nan ok.py:make_run --checkpoint runs",
    # an option or its value is wrong
    "profile train.py:make_run --step=5": "profile train.py:make_run --steps=5",
    "scan model.pt --json": "scan model.pt --format json",
    "scan model.pt --format yaml": "scan model.pt --format json",
    "scan model.pt --format=sarfi": "scan model.pt --format=sarif",
    "scan model.pt --fail-on info": "scan model.pt --fail-on warning",
    "scan model.pt --color yes": "scan model.pt --color always",
    "bisect-nan train.py:make_run --precision float16": "bisect-nan train.py:make_run --precision fp16",
    "scan model.pt --fail warning": "scan model.pt --fail-on warning",
    "bisect-nan ok.py:nope": "bisect-nan ok.py:make_run",
}


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """What `profile --save` writes."""
    path = tmp_path_factory.mktemp("measured") / "run.ampprofile"
    net = torch.nn.Linear(1, 1)
    run = TrainingRun(model=net, batches=[torch.ones(1, 1)], loss=lambda model, x: model(x).sum())
    measured(ReplayRequest(factory=lambda: run), save=str(path))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, profile):
    """Where somebody works: two factories, a checkpoint, and a folder of checkpoints."""
    (tmp_path / "train.py").write_text(RUN)
    (tmp_path / "ok.py").write_text(
        "import torch\nfrom ampdoctor import TrainingRun\n\ndef make_run(lr=1e-3, L=1):\n"
        "    batches = [torch.ones(1, 1)] * L\n"
        "    return TrainingRun(model=torch.nn.Linear(1, 1), batches=batches, loss=lambda net, x: net(x).sum())\n"
    )
    (tmp_path / "r.json").write_text("{}")
    shutil.copy(profile, tmp_path / "run.ampprofile")
    (tmp_path / "damaged.ampprofile").write_bytes(profile.read_bytes()[:-1])
    checkpoint = ROOT / "fixtures" / "checkpoints" / "torch_zip" / "step4.pt"
    shutil.copy(checkpoint, tmp_path / "model.pt")
    for step in (2, 4, 10):
        (tmp_path / "runs" / f"checkpoint-{step}").mkdir(parents=True)
        shutil.copy(checkpoint, tmp_path / "runs" / f"checkpoint-{step}" / "model.pt")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("train", "ok"):  # tests after it have factories of such names, too
        sys.modules.pop(name, None)


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_invocation_is_told_what_to_type(typed, folder, capsys):
    assert main(shlex.split(typed)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "internal error" not in captured.err
    first, *rest = captured.err.splitlines()
    assert first.startswith("ampdoctor: error: ")
    assert f"Type: ampdoctor {WRONG[typed]}" in rest


@pytest.mark.parametrize(
    "typed",
    sorted(
        {
            right
            for right in WRONG.values()
            if not {"train.py:make_run", "--checkpoint", "PATH", "FACTORY", "TARGET"} & set(right.split())
        }
    ),
)
def test_what_one_is_told_to_type_is_right(typed, folder, capsys):
    assert main(shlex.split(typed)) in (0, 1)


@pytest.mark.parametrize(
    "typed",
    [
        "frobnicate",
        "scan nothing-like-it.pt",
        "scan nowhere/model.pt",
        "rule 999",
        "rule amp2",
        "scan nofile.pt",
        "scan model.pt -z out.json",
        "scan model.pt --nope",
        "scan model.pt -o out.json --nope",
        "merge nothere.json",
        "bisect-nan train.py:make_run --arg 1x",
        "bisect-nan ok.py:make_run --arg unknown=1",
        "bisect-nan train.py:make_run",
        "scan model.pt extra.pt --nope",
        "rule AMP101 AMP102",
        "recommend ok.py:make_run r.json",
        "scan model.pt --output no/such/folder/r.txt",
        "scan model.pt --report json=model.pt",
        "recommend damaged.ampprofile",
        "recommend r.json",
    ],
)
def test_where_nobody_can_know_nothing_is_guessed(typed, folder, capsys):
    assert main(shlex.split(typed)) == 2
    assert "Type:" not in capsys.readouterr().err


def test_a_name_with_spaces_can_be_typed(folder, capsys):
    (folder / "my model.pt").write_bytes((folder / "model.pt").read_bytes())
    assert main(["my model.pt"]) == 2
    assert "Type: ampdoctor scan 'my model.pt'" in capsys.readouterr().err


def test_a_file_that_is_no_python_is_not_looked_into(folder, capsys):
    (folder / "broken.py").write_text("def make_run(:\n")
    assert main(["broken.py"]) == 2
    assert "Type: ampdoctor bisect-nan broken.py\n" in capsys.readouterr().err


def test_a_guess_that_fails_costs_nothing(folder, capsys, monkeypatch):
    import ampdoctor.cli.suggest

    def fail(arguments, error, commands):
        raise AttributeError("another Typer")

    monkeypatch.setattr(ampdoctor.cli.suggest, "instead", fail)
    assert main(["model.pt"]) == 2
    said = capsys.readouterr().err
    assert said == "ampdoctor: error: No such command 'model.pt'.\nTry 'ampdoctor --help' for help.\n"


@pytest.mark.parametrize(("typed", "possible"), [("--steps", ""), ("--jbos", " (Possible options: --jobs)")])
def test_only_options_that_are_alike_are_called_possible(typed, possible, folder, capsys):
    assert main(["scan", "model.pt", typed, "3"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"ampdoctor: error: No such option: {typed}{possible}"
