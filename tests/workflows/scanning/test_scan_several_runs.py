"""Nothing in a folder goes unread and unsaid: one series is judged, several are listed, what lies beside is read."""

from __future__ import annotations

import json
import math
import os
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints import files as listing_module
from ampdoctor.checkpoints.found import find
from ampdoctor.cli.main import main
from ampdoctor.errors import CheckpointError
from ampdoctor.workflows.scan import scan, scan_several

FIXTURE = Path(__file__).parents[3] / "fixtures" / "public" / "two_runs_in_a_folder" / "make.py"


def save(path, *, sick=False, **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = torch.ones(4, 4)
    weight[0, 0] = math.nan if sick else 1.0
    torch.save({"model": {"a.weight": weight}, **extra}, path)


def save_model(path, *, sick=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": torch.full((4, 4), math.nan if sick else 1.0)}, path)


def typed(error):
    """The paths of the command that an error says to type."""
    return shlex.split(str(error).partition("Type: ampdoctor scan ")[2])


def test_two_runs_in_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FIXTURE))
    assert main(["scan", "."]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ckpt (4 checkpoints, step0000.pt to step0150.pt); ckpt2 (4 checkpoints, step0000.pt to" in captured.err
    assert captured.err.rstrip().endswith("Type: ampdoctor scan ./ckpt ./ckpt2")
    assert main(["scan", "./ckpt", "./ckpt2"]) == 1
    assert main(["scan", ".", "--list"]) == 2
    assert main(["scan", "ckpt2"]) == 0


@pytest.mark.parametrize(
    "names", [["ckpt1", "ckpt2"], ["version_0/checkpoints", "version_1/checkpoints"], ["a/b/c", "d"]]
)
@pytest.mark.parametrize("at", [0, -1])
def test_several_runs_are_listed_whichever_is_sick(tmp_path, names, at):
    for name in names:
        for step in (50, 100):
            save(tmp_path / name / f"step{step:04d}.pt", sick=name == names[at] and step == 50)
    with pytest.raises(CheckpointError, match=rf"holds {len(names)} runs or checkpoints, and no one series") as refused:
        scan(tmp_path)
    assert typed(refused.value) == [str(tmp_path / name) for name in sorted(names)]
    assert scan_several(typed(refused.value)).verdict == "sick"


@pytest.mark.parametrize("names", [["ckpt1", "ckpt2"], ["ckpt", "ckpt2"]])
@pytest.mark.parametrize("at", [0, 1, None])
def test_numbered_folders_that_are_checkpoints_are_one_series(tmp_path, names, at):
    for index, name in enumerate(names):
        save_model(tmp_path / name / "model.safetensors", sick=index == at)
    report = scan(tmp_path, every_member=True)
    assert report.verdict == ("healthy" if at is None else "sick")
    assert {member["name"] for member in report.target["members"]} == set(names)


def beside(tmp_path, *, sick):
    """A series, and a checkpoint in a folder beside it."""
    for step in (1, 2, 3):
        save_model(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    save_model(tmp_path / "merged" / "deep" / "model.safetensors", sick=sick)


@pytest.mark.parametrize("sick", [True, False])
def test_a_checkpoint_in_a_folder_beside_a_series_is_judged_with_it(tmp_path, sick):
    beside(tmp_path, sick=sick)
    report = scan(tmp_path)
    assert report.verdict == ("sick" if sick else "healthy")
    assert [(m.name, m.placed) for m in find(tmp_path).members][-1] == ("merged/deep", False)


@pytest.mark.parametrize("sick", [True, False])
def test_files_in_folders_of_a_checkpoint_are_read_with_it(tmp_path, sick):
    save_model(tmp_path / "model.safetensors")
    save_model(tmp_path / "2_Dense" / "model.safetensors", sick=sick)
    save_model(tmp_path / "unet" / "ema" / "model.safetensors")
    report = scan(tmp_path)
    assert report.verdict == ("sick" if sick else "healthy")
    assert {file["path"] for file in report.target["files"]} == {
        "model.safetensors",
        "2_Dense/model.safetensors",
        "unet/ema/model.safetensors",
    }


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_loose_files_beside_the_folder_of_a_series_are_listed_with_it(tmp_path):
    save(tmp_path / "model_final.pt")
    for step in (1, 2):
        save(tmp_path / "checkpoints" / f"step_{step}.pt", sick=step == 2)
    with pytest.raises(CheckpointError, match=r"model_final\.pt; checkpoints \(2 checkpoints") as refused:
        scan(tmp_path)
    assert typed(refused.value) == [str(tmp_path / "model_final.pt"), str(tmp_path / "checkpoints")]


def test_a_series_inside_a_series_is_listed_after_the_outer(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step}.pt")
        save(tmp_path / "old" / f"step_{step}.pt", sick=True)
    with pytest.raises(CheckpointError, match=r"step_1\.pt to step_3\.pt; old \(3 checkpoints") as refused:
        scan(tmp_path)
    assert typed(refused.value) == [*(str(tmp_path / f"step_{step}.pt") for step in (1, 2, 3)), str(tmp_path / "old")]


def test_the_only_checkpoint_below_is_the_folders(tmp_path):
    save_model(tmp_path / "out" / "model" / "model.safetensors", sick=True)
    assert scan(tmp_path).verdict == "sick"


def test_links_lead_to_what_is_read_once(tmp_path):
    for step in (1, 2):
        save(tmp_path / "run" / f"step_{step}.pt")
    (tmp_path / "latest").symlink_to("run", target_is_directory=True)
    (tmp_path / "run" / "again").symlink_to("..", target_is_directory=True)
    report = scan(tmp_path)
    assert (report.verdict, report.target["count"]) == ("healthy", 2)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    save(outside / "step_1.pt", sick=True)
    save(outside / "step_2.pt")
    (tmp_path / "other").symlink_to(outside, target_is_directory=True)
    with pytest.raises(CheckpointError, match="holds 2 runs or checkpoints"):
        scan(tmp_path)


def test_a_folder_below_that_cannot_be_listed_leaves_the_verdict_open(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path / f"step_{step}.pt")
    (tmp_path / "secret").mkdir()
    real = os.scandir

    def scandir(path):
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(listing_module.os, "scandir", scandir)
    report = scan(tmp_path)
    assert (report.verdict, report.complete) == ("inconclusive", False)
    assert [note.what for note in report.errors] == ["secret"]


def test_folders_that_hold_nothing_of_a_run_change_nothing(tmp_path):
    for step in (1, 2):
        save_model(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (_made(tmp_path / "runs" / "Nov01") / "events.out.tfevents.1.host").write_bytes(b"")
    (_made(tmp_path / "code") / "train.py").write_text("")
    (_made(tmp_path / ".cache" / "old") / "model.pt").write_bytes(b"")
    bundle = _made(tmp_path / "ampdoctor-health" / "20261101-train" / "bundle-12")
    (bundle / "manifest.json").write_text("{}")
    save_model(bundle / "calls.safetensors", sick=True)
    report = scan(tmp_path)
    assert (report.verdict, report.target["count"]) == ("healthy", 2)
    assert [(one.what, one.reason) for one in report.skipped] == [
        ("ampdoctor-health/20261101-train/bundle-12", "a recorded step, which bisect-nan replays")
    ]


def test_a_folder_with_very_many_folders_is_said_not_to_be_looked_through(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"step_{step}.pt")
    for number in range(120):
        _made(tmp_path / "data" / f"class_{number:03}")
    report = scan(tmp_path)
    assert report.verdict == "healthy"
    assert [(one.what, one.reason) for one in report.skipped] == [
        ("data", "120 folders in it, which were not looked through for checkpoints")
    ]


def spreading(folder, *, from_step=200, bias=False):
    """A series whose sickness spreads: two sick tensors, then all, and one more where `bias` is set."""
    folder.mkdir(exist_ok=True)
    for step in (100, 200, 300, 400, 500, 600, 700, 800):
        weights = {f"l{i}.weight": torch.ones(4, 4) for i in range(12)} | {"l0.bias": torch.ones(4)}
        for i in range(0 if step < from_step else 2 if step < 400 else 12):
            weights[f"l{i}.weight"][0, 0] = math.nan
        if bias and step >= 700:
            weights["l0.bias"][0] = math.nan
        torch.save({"model": weights, "step": step}, folder / f"step{step:04d}.pt")


def baseline_of(report_file):
    return json.loads(report_file.read_text())["baseline"]


def test_a_baseline_of_a_folder_knows_each_of_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spreading(tmp_path / "run")
    assert main(["scan", "run", "--write-baseline", "b.json", "-q", "--output", "w.txt"]) == 0
    for more in ([], ["--all"]):
        assert (
            main(["scan", "run", "--baseline", "b.json", "--report", "json=r.json", "-q", "--output", "w.txt", *more])
            == 0
        )
        section = baseline_of(tmp_path / "r.json")
        assert (section["new"], section["fixed"]) == (0, [])
    spreading(tmp_path / "run", bias=True)
    assert main(["scan", "run", "--baseline", "b.json", "--report", "json=r.json", "-q", "--output", "w.txt"]) == 1
    assert baseline_of(tmp_path / "r.json")["new"] == 1
    spreading(tmp_path / "run", from_step=10_000)
    assert (
        main(["scan", "run", "--baseline", "b.json", "--report", "json=r.json", "-q", "--output", "w.txt", "--all"])
        == 0
    )
    assert len(baseline_of(tmp_path / "r.json")["fixed"]) == 12


def test_what_was_not_read_is_not_called_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spreading(tmp_path / "run")
    assert main(["scan", "run", "--write-baseline", "b.json", "-q", "--output", "w.txt"]) == 0
    spreading(tmp_path / "run", from_step=10_000)
    assert main(["scan", "run", "--baseline", "b.json", "--report", "json=r.json", "-q", "--output", "w.txt"]) == 0
    assert baseline_of(tmp_path / "r.json")["fixed"] == []


def test_healthy_ones_after_the_first_sick_one_are_not_denied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3):
        save(tmp_path / "run" / f"step_{step}.pt", sick=step == 1)
    assert main(["scan", "run", "--all"]) == 1
    said = capsys.readouterr().out
    assert "no earlier one is healthy" not in said
    assert "resume from step_3.pt, which is healthy; none before the first sick one is" in said
    for step in (2, 3):
        save(tmp_path / "run" / f"step_{step}.pt", sick=True)
    assert main(["scan", "run", "--all"]) == 1
    assert "no earlier one is healthy" in capsys.readouterr().out
