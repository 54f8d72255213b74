"""What cannot be examined is said in a report as well, for whoever reads reports and no sentence on stderr."""

from __future__ import annotations

import os

import pytest

from ampdoctor.reports.read_json import report_from_text

FACTORY = "def make_run():\n    raise ValueError('no data')\n"
COMMANDS = {
    "scan": (["scan", "cut.pt"], "unreadable", "cut.pt is truncated"),
    "bisect-nan": (["bisect-nan", "run.py:make_run"], "raised", "ValueError: no data"),
    "profile": (["profile", "run.py:make_rum"], "factory", "has no 'make_rum'"),
    "recommend": (["recommend", "run.py:make_run", "--device", "cuda:99"], "replay", "cuda"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(FACTORY)
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    return tmp_path


def test_a_folder_that_is_gone_is_no_failure_of_ours(folder, typed):
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert typed("plan", "--global-batch", "8", "--to-gpus", "2", "--max-micro-batch", "4").returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_says_what_could_not_be_examined(command, folder, typed, check_report):
    arguments, kind, words = COMMANDS[command]
    result = typed(*arguments, "--format", "json", "--report", "jsonl=r.jsonl", "--report", "junit=r.xml")
    assert result.returncode == 2
    assert result.stderr.startswith("ampdoctor: error: ")
    document = check_report(result.stdout)
    assert (document["command"], document["complete"], document["verdict"]) == (command, False, "inconclusive")
    [error] = document["errors"]
    assert error["kind"] == kind
    assert words in error["message"]
    assert report_from_text((folder / "r.jsonl").read_text()).errors[0].message == error["message"]
    assert "<error " in (folder / "r.xml").read_text()


def test_a_place_that_cannot_be_written_does_not_hide_it(folder, typed):
    result = typed("scan", "cut.pt", "--format", "json", "--output", "/dev/full")
    assert result.returncode == 2
    assert "cut.pt is truncated" in result.stderr
