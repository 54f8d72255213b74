from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.gates.findings import Ignore, apply_ignores
from ampdoctor.reports.github import render_github
from ampdoctor.reports.human import plain_text
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.sarif import render_sarif
from ampdoctor.workflows.scan import scan, scan_several

CHECKPOINTS = Path(__file__).parents[3] / "fixtures" / "checkpoints"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    sick = torch.ones(4, 4)
    sick[1, 2] = torch.nan
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "healthy.safetensors")
    save_file({"fc.weight": sick}, tmp_path / "runs" / "sick.safetensors")
    (tmp_path / "pointer.pt").write_bytes(POINTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_findings_say_which_path_they_are_of(files, check_report):
    report = scan_several(["healthy.safetensors", "runs/sick.safetensors"])
    assert report.verdict == "sick"
    assert report.complete
    assert [(f.code, f.where.file) for f in report.findings] == [("AMP101", "runs/sick.safetensors")]
    assert report.target["paths"] == ["healthy.safetensors", "runs/sick.safetensors"]
    assert {check.name.partition(": ")[0] for check in report.checks} == set(report.target["paths"])
    check_report(render_json(report))


def test_a_path_that_cannot_be_read_is_an_error_and_the_others_are_examined(files):
    report = scan_several(["gone.pt", "runs/sick.safetensors", "pointer.pt"])
    assert [(note.what, note.kind) for note in report.errors] == [
        ("gone.pt", "unreadable"),
        ("pointer.pt", "unreadable"),
    ]
    assert not report.complete
    assert report.verdict == "sick"


def test_pointers_are_left_out_with_a_reason_where_that_is_asked(files):
    report = scan_several(["pointer.pt", "healthy.safetensors"], skip_lfs_pointers=True)
    assert (report.verdict, report.complete, report.errors) == ("healthy", True, ())
    assert [(one.what, "Git LFS" in one.reason) for one in report.skipped] == [("pointer.pt", True)]


@pytest.mark.parametrize("paths", [["pointer.pt"], ["pointer.pt", "other.pt"]])
def test_nothing_but_pointers_is_not_judged(files, paths, check_report):
    (files / "other.pt").write_bytes(POINTER)
    report = scan_several(paths, skip_lfs_pointers=True)
    assert (report.verdict, report.complete, len(report.skipped)) == ("not_judged", True, len(paths))
    check_report(render_json(report))
    said = plain_text(report)
    assert "listed" not in said
    assert "git lfs pull" in said


@pytest.mark.parametrize("writer", ["hf_trainer_fp16", "accelerate_bin"])
def test_files_beside_a_checkpoint_are_left_out_as_in_its_folder(writer):
    inside = [
        file for file in (CHECKPOINTS / writer).rglob("*") if file.suffix in {".safetensors", ".bin", ".pt", ".pth"}
    ]
    report = scan_several(inside)
    assert (report.verdict, report.complete, report.errors) == ("healthy", True, ())
    reasons = {one.reason for one in report.skipped}
    assert "learning-rate schedule" in reasons
    whole = scan(max(file.parent for file in inside))
    assert {one.reason for one in whole.skipped} & reasons == reasons


def test_a_file_beside_checkpoints_alone_is_not_judged_where_files_are_left_out_and_else_is_refused(files, run_here):
    torch.save({"last_epoch": 3}, "scheduler.pt")
    asked = scan_several(["scheduler.pt"], skip_lfs_pointers=True)
    assert (asked.verdict, [one.what for one in asked.skipped]) == ("not_judged", ["scheduler.pt"])
    assert run_here("scan", "scheduler.pt", "--skip-lfs-pointers", cwd=files).returncode == 0
    with pytest.raises(CheckpointError, match="nothing to examine"):
        scan_several(["scheduler.pt"])


def test_a_pointer_inside_a_folder_is_an_error(files):
    (files / "runs" / "optimizer.pt").write_bytes(POINTER)
    report = scan_several(["runs", "healthy.safetensors"], skip_lfs_pointers=True)
    assert (report.complete, [note.what for note in report.errors]) == (False, ["runs/optimizer.pt"])


@pytest.mark.parametrize("path", ["healthy.safetensors", "runs/sick.safetensors", "runs"])
def test_one_path_gives_the_report_of_a_scan(files, path):
    assert render_json(scan_several([path])) == render_json(scan(path))
    assert render_json(scan_several([path, path], skip_lfs_pointers=True)) == render_json(scan(path))


def test_each_path_is_shown_relative_to_the_working_directory_where_it_lies_below_it(files, monkeypatch):
    monkeypatch.chdir(files / "runs")
    report = scan_several(["../healthy.safetensors", files / "runs" / "sick.safetensors", "sick.safetensors"])
    healthy = (files / "healthy.safetensors").as_posix()
    assert report.target["paths"] == [healthy, "sick.safetensors"]
    assert [finding.where.file for finding in report.findings] == ["sick.safetensors"]
    assert {file["path"] for file in report.target["files"]} == {healthy, "sick.safetensors"}


def _annotated(report):
    (result,) = json.loads(render_sarif(report))["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]
    return place["uriBaseId"], place["uri"], render_github(report).partition("file=")[2].partition(",")[0]


@pytest.mark.parametrize(
    "paths",
    [
        ["runs/sick.safetensors"],
        ["runs"],
        ["runs/sick.safetensors", "healthy.safetensors"],
        ["runs", "../outside.safetensors"],
    ],
)
def test_annotations_and_ignores_name_a_file_in_the_same_way_whatever_is_scanned_with_it(files, monkeypatch, paths):
    save_file({"fc.weight": torch.ones(4, 4)}, files / "outside.safetensors")
    (files / "work").mkdir()
    for name in ("runs", "healthy.safetensors"):
        (files / name).rename(files / "work" / name)
    monkeypatch.chdir(files / "work")
    report = scan_several(paths)
    assert _annotated(report) == ("%SRCROOT%", "runs/sick.safetensors", "runs/sick.safetensors")
    for pattern, fits in (("runs/sick.safetensors", True), ("sick.safetensors", False)):
        ignore = Ignore(rule="AMP101", reason="known", file=pattern)
        assert (len(apply_ignores(report, [ignore], date(2026, 1, 1)).suppressed) == 1) is fits


def test_a_file_outside_the_working_directory_is_named_from_the_root(files, monkeypatch):
    (files / "work").mkdir()
    monkeypatch.chdir(files / "work")
    outside = (files / "runs" / "sick.safetensors").as_posix()
    for paths in (["../runs/sick.safetensors"], ["../runs"], ["../runs/sick.safetensors", "../healthy.safetensors"]):
        assert _annotated(scan_several(paths)) == ("ROOT", outside.removeprefix("/"), outside)


def test_progress_says_which_path_is_being_read(files):
    told = []
    scan_several(
        ["healthy.safetensors", "runs/sick.safetensors"],
        progress=lambda what, done, total, *, unit="": told.append(what.partition(":")[0]),
    )
    assert list(dict.fromkeys(told)) == ["healthy.safetensors", "runs/sick.safetensors"]


def test_the_only_path_that_cannot_be_read_raises(files):
    with pytest.raises(CheckpointError, match="does not exist"):
        scan_several(["gone.pt"])
    with pytest.raises(UsageError, match="no path"):
        scan_several([])


@pytest.mark.parametrize("option", [["--list"], ["--all"], ["--against", "healthy.safetensors"]])
def test_options_of_one_path_refuse_several_and_pointers_left_out(files, option, run_here):
    several = run_here("scan", "healthy.safetensors", "runs", *option, cwd=files)
    assert (several.returncode, several.stdout) == (2, "")
    assert f"{option[0]} takes one PATH, and 2 were given" in several.stderr
    pointers = run_here("scan", "runs", "--skip-lfs-pointers", *option, cwd=files)
    assert (pointers.returncode, pointers.stdout) == (2, "")
    assert f"--skip-lfs-pointers does not go with {option[0]}" in pointers.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["healthy.safetensors", "runs/sick.safetensors"], 1),
        (["healthy.safetensors", "healthy.safetensors"], 0),
        (["healthy.safetensors", "pointer.pt"], 2),
        (["healthy.safetensors", "pointer.pt", "--skip-lfs-pointers"], 0),
        (["pointer.pt", "--skip-lfs-pointers"], 0),
        (["pointer.pt"], 2),
        (["healthy.safetensors", ""], 2),
    ],
)
def test_the_exit_code_is_that_of_the_whole(files, arguments, code, run_here):
    assert run_here("scan", *arguments, cwd=files).returncode == code
