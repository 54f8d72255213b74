from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.reports.to_json import render_json
from ampdoctor.workflows.scan import scan
from ampdoctor.workflows.scan_several import scan_several

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


def test_where_nothing_can_be_read_the_verdict_is_inconclusive(files):
    report = scan_several(["gone.pt", "lost.pt"])
    assert (report.verdict, report.complete, len(report.errors)) == ("inconclusive", False, 2)


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


def test_pointers_inside_a_folder_are_left_out_too(files):
    save_file({"fc.weight": torch.ones(4, 4)}, files / "runs" / "sick.safetensors")
    (files / "runs" / "optimizer.pt").write_bytes(POINTER)
    assert scan_several(["runs"]).verdict == "inconclusive"
    report = scan_several(["runs"], skip_lfs_pointers=True)
    assert (report.verdict, report.complete) == ("healthy", True)
    assert "optimizer.pt" in [one.what for one in report.skipped]
    together = scan_several(["runs", "healthy.safetensors"], skip_lfs_pointers=True)
    assert "runs/optimizer.pt" in [one.what for one in together.skipped]


def test_a_folder_of_nothing_but_pointers_is_left_out(files):
    (files / "lfs").mkdir()
    (files / "lfs" / "model.safetensors").write_bytes(POINTER)
    report = scan_several(["lfs", "healthy.safetensors"], skip_lfs_pointers=True)
    assert [one.what for one in report.skipped] == ["lfs"]
    with pytest.raises(CheckpointError, match="git-LFS"):
        scan_several(["lfs"])


@pytest.mark.parametrize("path", ["healthy.safetensors", "runs/sick.safetensors", "runs"])
def test_one_path_gives_the_report_of_a_scan(files, path):
    assert render_json(scan_several([path])) == render_json(scan(path))
    assert render_json(scan_several([path, path], skip_lfs_pointers=True)) == render_json(scan(path))


def test_findings_of_a_folder_name_the_folder_and_the_file(files):
    report = scan_several(["runs", "healthy.safetensors"])
    assert [f.where.file for f in report.findings] == ["runs/sick.safetensors"]


def test_absolute_paths_are_shown_without_the_root(files, monkeypatch):
    monkeypatch.chdir("/")
    outside = scan_several(
        [str(files / "healthy.safetensors"), str(files / "runs" / "sick.safetensors"), "gone.pt"][:2]
    )
    monkeypatch.chdir(files.parent)
    below = scan_several([os.fspath(files / "healthy.safetensors"), files / "runs" / "sick.safetensors"])
    assert below.target["paths"] == [f"{files.name}/healthy.safetensors", f"{files.name}/runs/sick.safetensors"]
    assert not any(path.startswith("/") for path in outside.target["paths"])


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
def test_options_of_one_path_refuse_several_and_pointers_left_out(files, option, run_cli):
    several = run_cli("scan", "healthy.safetensors", "runs", *option, cwd=files)
    assert (several.returncode, several.stdout) == (2, "")
    assert f"{option[0]} takes one PATH, and 2 were given" in several.stderr
    pointers = run_cli("scan", "runs", "--skip-lfs-pointers", *option, cwd=files)
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
def test_the_exit_code_is_that_of_the_whole(files, arguments, code, run_cli):
    assert run_cli("scan", *arguments, cwd=files).returncode == code
