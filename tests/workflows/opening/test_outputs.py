"""Files that appear whole or not at all, whoever else writes beside them."""

from __future__ import annotations

import os
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampdoctor.errors import OutputError
from ampdoctor.workflows.output_files import write_whole


@pytest.fixture
def umask():
    """Return a function that sets the umask; it is put back afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_of_two_writers_of_one_number_each_writes_its_own_file(tmp_path):
    def write(name):
        for turn in range(200):
            write_whole(str(tmp_path / f"{name}.{turn}"), name.encode() * 4096)

    with ThreadPoolExecutor() as pool:  # of one process, as the first ones of two containers are of one number
        list(pool.map(write, "abcd"))
    assert {file.name[0].encode() * 4096 == file.read_bytes() for file in tmp_path.iterdir()} == {True}
    assert len(list(tmp_path.iterdir())) == 800


@pytest.mark.parametrize("there", [False, True])
def test_a_link_that_is_laid_where_the_file_is_prepared_leads_nowhere(there, tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda count: "guessed")
    victim, report = tmp_path / "victim", tmp_path / "out" / "report"
    report.parent.mkdir()
    if there:
        victim.write_text("precious")
    (report.parent / ".ampdoctor-guessed.tmp").symlink_to(victim)
    with pytest.raises(OutputError, match=r"cannot write .*report: File exists"):
        write_whole(str(report), b"report")
    assert victim.exists() is there
    assert not there or victim.read_text() == "precious"
    assert not os.path.lexists(report)


def test_a_link_stays_one_and_what_it_names_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "report").symlink_to("there/report")
    for text in (b"first", b"second"):
        write_whole(str(tmp_path / "report"), text)
        assert (tmp_path / "report").is_symlink()
        assert (tmp_path / "there" / "report").read_bytes() == text
    assert not (tmp_path / "there" / "report").is_symlink()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_is_readable_to_whom_the_umask_lets_it_be(mask, mode, tmp_path, umask):
    umask(mask)
    write_whole(str(tmp_path / "report"), b"")
    assert stat.S_IMODE((tmp_path / "report").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_that_is_replaced_stays_readable_to_the_same(mode, tmp_path, umask):
    report = tmp_path / "report"
    report.write_text("before")
    report.chmod(mode)
    umask(0o027)
    write_whole(str(report), b"after")
    assert (report.read_text(), stat.S_IMODE(report.stat().st_mode)) == ("after", mode)


@pytest.mark.parametrize("name", ["fchmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_and_ctrl_c_leave_what_was_there_and_nothing_else(name, error, tmp_path, monkeypatch):
    report = tmp_path / "report"
    report.write_text("before")

    def fail(*_):
        raise error

    monkeypatch.setattr(*((os, name) if name == "fchmod" else (Path, name)), fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutputError):
        write_whole(str(report), b"after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report", "before")]
