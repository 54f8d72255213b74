from __future__ import annotations

import errno
import os

import pytest

from ampdoctor.cli.output import MAX_BYTES, append_summary
from ampdoctor.errors import OutputError
from ampdoctor.reports.markdown import render_markdown
from tests.samples import HEALTHY, SICK


def test_the_report_is_appended_to_the_summary_of_the_step(drive, tmp_path):
    file = tmp_path / "summary.md"
    file.write_text("# before\n")
    result = drive("sick", "scan", "x", "--github-summary", env={"GITHUB_STEP_SUMMARY": str(file)})
    assert result.returncode == 1
    assert "AMP201" in result.stdout  # the report itself goes where it went
    assert file.read_text() == f"# before\n\n{render_markdown(SICK)}"


def test_it_needs_a_step_and_says_so_before_any_work(drive):
    result = drive("crash", "scan", "x", "--github-summary", env={"GITHUB_STEP_SUMMARY": ""})
    assert (result.returncode, result.stdout) == (2, "")
    assert "GITHUB_STEP_SUMMARY is not set" in result.stderr


def test_a_summary_that_cannot_be_written_is_said_before_any_work(drive, tmp_path):
    result = drive("crash", "scan", "x", "--github-summary", env={"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert result.returncode == 2
    assert "it is a folder" in result.stderr


def test_without_the_flag_nothing_is_written(drive, tmp_path):
    file = tmp_path / "summary.md"
    drive("healthy", "scan", "x", env={"GITHUB_STEP_SUMMARY": str(file)})
    assert not file.exists()


def test_a_report_that_does_not_fit_leaves_a_line(tmp_path):
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * (MAX_BYTES - 300))
    append_summary(SICK, str(file))
    text = file.read_text().lstrip("x")
    assert text.strip() == ("ampdoctor bisect-nan: sick (1 error, 1 warning); the report does not fit in this summary")
    assert file.stat().st_size <= MAX_BYTES


def test_a_summary_that_is_full_stays_as_it_is(tmp_path, capsys):
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * (MAX_BYTES - 10))
    append_summary(HEALTHY, str(file))
    assert file.stat().st_size == MAX_BYTES - 10
    assert "the step's summary is full" in capsys.readouterr().err


def test_it_is_there_wholly_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "summary.md"
    file.write_text("before")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(OutputError, match="only 10 of"):
        append_summary(SICK, str(file))
    assert file.read_text() == "before"

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="No space left"):
        append_summary(SICK, str(file))
    assert file.read_text() == "before"
