"""Where reports go: descriptors, pipes and devices, files that are also read, and places that fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.cli.main import main
from tests.samples import SICK

DRIVER = Path(__file__).parents[1] / "drive.py"
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.fixture
def sick(stub_workflow):
    """Every scan finds the same; the list says which paths were scanned."""
    scanned = []
    stub_workflow("scan", lambda path, *, progress=None, **options: scanned.append(path) or SICK)
    return scanned


def test_stdout_holds_only_the_report(drive, check_report):
    result = drive("noise", "scan", "x", "--format", "json")
    assert check_report(result.stdout)["verdict"] == "sick"
    assert set(result.stderr.split("\n")) >= {"now", "late", "later", "at exit", "child"}


@needs_dev_full
def test_a_place_that_fails_costs_no_other_report(sick, tmp_path, capsys, check_report):
    kept = tmp_path / "kept.json"
    assert main(["scan", "x", "--report", "human=/dev/full", "--report", f"json={kept}"]) == 2
    captured = capsys.readouterr()
    assert check_report(kept.read_text())["verdict"] == "sick"
    assert "ampdoctor rule AMP201" in captured.out
    assert captured.err == "ampdoctor: error: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("name", ["/dev/stdout", "-"])
def test_stdout_has_other_names(name, drive, check_report):
    result = drive("sick", "scan", "x", "--format", "json", "--output", name)
    assert result.returncode == 1
    assert check_report(result.stdout)["verdict"] == "sick"
    twice = drive("sick", "scan", "x", "--report", f"json={name}")
    assert "two outputs for standard output" in twice.stderr


@pytest.mark.parametrize("option", ["--output={0}", "--report=json={0}"])
def test_the_checkpoint_is_not_written_over(option, sick, tmp_path, capsys):
    for target, place in ((tmp_path / "model.pt", tmp_path / "model.pt"), (tmp_path, tmp_path / "model.pt")):
        place.write_text("weights")
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(place)
        for named in (place, link):
            assert main(["scan", str(target), option.format(named)]) == 2
            assert "cannot write" in capsys.readouterr().err
        assert place.read_text() == "weights"
    assert sick == []


@pytest.mark.parametrize("option", ["--output={0}", "--report=json={0}", "--write-baseline={0}"])
def test_what_would_be_part_of_a_folder_that_is_read_is_not_written_the_first_time_either(
    option, sick, tmp_path, capsys, monkeypatch
):
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("new.pt", "deeper/new.safetensors", "trainer_state.json", "new.index.json", "new.jsonl", "latest"):
        for folder in (".", str(tmp_path)):
            assert main(["scan", folder, option.format(name)]) == 2
            assert f"cannot write {name}: the next run would read it as a part of {folder}" in capsys.readouterr().err
    assert sick == []
    assert main(["scan", "deeper", option.format("new.jsonl")]) in (0, 1)


@pytest.mark.parametrize("names", [("model.safetensors",), ("step-1.safetensors", "step-2.safetensors")])
def test_reports_lie_in_the_folder_that_is_read_and_the_next_run_says_the_same(names, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "ampdoctor.cli.run_command.time", SimpleNamespace(time=lambda: 0.0)
    )  # a page has it in its title
    monkeypatch.chdir(tmp_path)
    for name in names:
        save_file({"fc.weight": torch.ones(2, 2)}, name)
    reports = {"json": "r.json", "html": "r.html", "sarif": "r.sarif", "junit": "r.xml", "markdown": "R.md"}
    wanted = [f"--report={form}={name}" for form, name in reports.items()]
    said = []
    for _ in range(2):
        assert main(["scan", ".", "--output", "said.txt", "--write-baseline", "known.json", *wanted]) == 0
        said.append([Path(name).read_bytes() for name in ("said.txt", "known.json", *reports.values())])
    assert said[0] == said[1]
    assert "1970-01-01 00:00 UTC</title>" in Path("r.html").read_text()
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("bisect-nan", ["run.py:make"]),
        ("bisect-nan", ["pkg:make", "--checkpoint", "run.py"]),
        ("profile", ["pkg:make", "--batches", "run.py:data"]),
    ],
)
def test_what_a_replay_reads_is_not_written_over(command, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("kept")
    assert main([command, *arguments, "--output", "./run.py"]) == 2
    assert capsys.readouterr().err == "ampdoctor: error: cannot write ./run.py: it is what is to be read\n"
    assert Path("run.py").read_text() == "kept"


RUN = """
import os
import torch
from ampdoctor import TrainingRun

os.chdir("{elsewhere}")

def loss(model, batch):
    return model(batch).mean()

def make():
    os.chdir("deeper")
    return TrainingRun(model=torch.nn.Linear(4, 4), batches=[torch.ones(2, 4)], loss=loss, precision="bf16")
"""


def test_a_run_that_changes_its_folder_moves_no_report(tmp_path, run_cli, check_report):
    (tmp_path / "elsewhere" / "deeper" / "deeper").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "run.py").write_text(RUN.format(elsewhere=tmp_path / "elsewhere"))
    result = run_cli("profile", "run.py:make", "--report", "json=r.json", "--output", "r.txt", cwd=tmp_path / "here")
    assert result.returncode == 0, result.stderr
    assert check_report((tmp_path / "here" / "r.json").read_text())["target"]["factory"] == "run.py:make"
    assert sorted(p.name for p in (tmp_path / "here").iterdir() if p.is_file()) == ["r.json", "r.txt", "run.py"]
