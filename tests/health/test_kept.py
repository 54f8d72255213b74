"""What is kept of a look, and what is not taken for it."""

from __future__ import annotations

import json
import math
import os

import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.evidence.log_records import EndLine, StepLine
from ampdoctor.health import summary
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.health import health
from tests.health.logs import HEADER, detail, steps, write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ampdoctor" / "health"


def losses(path):
    (run,) = health([path]).health.runs
    return run.curves[0].high


def test_a_log_that_was_edited_under_its_old_times_is_read_again(tmp_path, cache):
    path = write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 3)])
    was = path.stat()
    assert losses(tmp_path / "run") == (2.0, 2.0, 2.0)
    path.write_text(path.read_text().replace('"loss":2.0', '"loss":7.0'))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert losses(tmp_path / "run") == (7.0, 7.0, 7.0)


def test_what_is_no_look_in_its_place_is_passed_by(tmp_path, cache):
    write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 3)])
    assert losses(tmp_path / "run") == (2.0, 2.0, 2.0)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "runs": []}))
    assert losses(tmp_path / "run") == (2.0, 2.0, 2.0)
    file.unlink()
    os.mkfifo(file)
    assert losses(tmp_path / "run") == (2.0, 2.0, 2.0)


def test_without_a_folder_of_its_own_the_log_is_read(tmp_path, cache, monkeypatch):
    write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 3)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").write_text("a file")
    for name in (str(tmp_path / "cache"), "relative", "~nobody-is-here/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        assert losses("run") == (2.0, 2.0, 2.0)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "cache"}


def test_a_second_look_begins_with_what_the_first_has_shown(tmp_path, cache, monkeypatch):
    lost = StepLine(step=40, loss=math.nan, skipped=False)
    lines = [HEADER, *steps(0, 40), lost, detail(0, 0.1, 2.0), EndLine(exit_code=1)]
    path = write(tmp_path / "run" / "log.jsonl", lines)
    first = health([tmp_path / "run"])

    def refuse(*_):
        raise AssertionError("the log was read again")

    with monkeypatch.context() as patch:
        patch.setattr(summary, "look", refuse)
        assert render_json(health([tmp_path / "run"])) == render_json(first)
        with pytest.raises(AssertionError, match="read again"):
            health([tmp_path / "run"], thresholds=thresholds_from({"AMP720": {"deviations": 100}}))
    more = path.read_text().splitlines()[1].replace('"step":0', '"step":41')
    with path.open("a") as stream:
        stream.write(more + "\n")
    assert health([tmp_path / "run"]).health.runs[0].steps == 42
