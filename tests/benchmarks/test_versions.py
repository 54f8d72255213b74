"""The script behind `make versions`: what it compares, counts and writes; no environment is made here."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import versions

ROW = {
    "torch": "2.10.0+cu128",
    "python": "3.11.7",
    "date": "2026-11-22",
    "shims": [],
    "help": "ok",
    "scan": "ok",
    "bisect-nan": "ok",
    "recommend": "ok, 2 numbers differ",
    "corpus": {"passed": 74, "skipped": 1, "failed": []},
    "tests": {"passed": 10, "skipped": 2, "failed": []},
}


@pytest.mark.parametrize(
    ("report", "other", "differing"),
    [
        ({"a": 1.00001, "b": [1, "x"]}, {"a": 1.0, "b": [1, "x"]}, 0),
        ({"a": 1.001, "torch": "2.6"}, {"a": 1.0, "torch": "2.13"}, 1),
        ({"a": "NaN", "torch_shims": ["x"]}, {"a": "NaN"}, 0),
        ({"a": [1, 2]}, {"a": [1]}, 1),
        ({"a": 1}, {}, 1),
    ],
)
def test_reports_are_compared_in_four_digits(report, other, differing):
    assert versions.differences(report, other) == differing


def test_the_table_is_by_version_and_says_what_was_skipped():
    crashed = {**copy.deepcopy(ROW), "torch": "2.6.0", "scan": "crash"}
    crashed["tests"] = {"passed": 9, "skipped": 0, "failed": ["a::b"]}
    assert versions.table({"2.10.0": ROW, "2.6.0": crashed}).splitlines()[2:] == [
        "| 2.6.0 | ok | crash | ok | ok, 2 numbers differ | 74/74 | 9/10 |",
        "| 2.10.0+cu128 | ok | ok | ok | ok, 2 numbers differ | 74/74 | 10/10, 2 skipped |",
    ]
    assert versions.healthy(ROW)
    assert not versions.healthy(crashed)


def test_only_what_stands_between_the_marks_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "README", tmp_path / "README.md")
    monkeypatch.setattr(versions, "FIGURES", tmp_path / "versions.json")
    versions.README.write_text(f"before\n{versions.BEGIN}old\n{versions.END}\nafter\n")
    versions.write({"2.10.0": ROW})
    text = versions.README.read_text()
    assert text.startswith(f"before\n{versions.BEGIN}| torch |")
    assert text.endswith(f"{versions.END}\nafter\n")
    assert "old" not in text
    assert json.loads(versions.FIGURES.read_text()) == {"2.10.0": ROW}


@pytest.mark.slow
def test_passed_skipped_and_failed_are_counted(tmp_path):
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    counted = versions.tested(Path(sys.executable), tmp_path, str(tests))
    assert (counted["passed"], counted["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in counted["failed"]] == ["test_b"]


def test_the_benchmarks_page_shows_what_was_measured_last():
    figures = json.loads(versions.FIGURES.read_text())
    assert versions.table(figures) in versions.README.read_text(encoding="utf-8")


def test_the_workflow_runs_the_same_versions():
    workflow = yaml.safe_load((versions.ROOT / ".github/workflows/versions.yml").read_text())
    matrix = workflow["jobs"]["torch"]["strategy"]["matrix"]
    assert tuple(matrix["torch"]) == versions.VERSIONS
    pythons = [*matrix["python"], *(one["python"] for one in matrix["include"])]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
