"""Several processes of one job: rank 0 speaks, and the others keep theirs in a file."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ampdoctor.cli.main import main
from ampdoctor.cli.output import rank_of
from ampdoctor.errors import UsageError
from ampdoctor.reports.read_json import report_from_text
from tests.samples import SICK

DRIVER = Path(__file__).parents[1] / "drive.py"


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 0), ({"RANK": "3"}, 0), ({"RANK": "0", "WORLD_SIZE": "1"}, 0), ({"RANK": "3", "WORLD_SIZE": "4"}, 3)],
)
def test_the_rank_is_that_of_the_environment(environment, rank):
    assert rank_of(environment) == rank


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "two"), ("9" * 5000, "9")], ids=lambda text: text[:9]
)
def test_a_rank_that_is_none_is_refused(rank, size):
    with pytest.raises(UsageError, match=f"RANK={rank} and WORLD_SIZE={size}"):
        rank_of({"RANK": rank, "WORLD_SIZE": size})


def test_a_profile_is_saved_in_a_file_for_each_rank(tmp_path, stub_workflow, monkeypatch):
    saved = []
    stub_workflow("profile", lambda request, *, save, progress: saved.append(save) or replace(SICK, command="profile"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in "02":
        monkeypatch.setenv("RANK", rank)
        assert main(["profile", "run.py:make", "--save", "ranges.npz", "-q"]) == 1
    assert saved == ["ranges.npz", "ranges.rank2.npz"]


@pytest.fixture
def here(tmp_path, typed, behaving, monkeypatch):
    """Return a function that scans something sick in a folder of its own, as rank N of 2."""
    behaving("sick")
    monkeypatch.chdir(tmp_path)

    def run(rank, *arguments, size=2):
        return typed("scan", "x", *arguments, env={"RANK": str(rank), "WORLD_SIZE": str(size)})

    return run


def test_rank_0_writes_as_it_is_told_and_the_others_to_a_file(here, tmp_path):
    first, second = here(0, "--format", "jsonl"), here(1, "--format", "human", "--report", "json=all.json")
    assert report_from_text(first.stdout).findings[0].where.rank == 0
    assert (first.returncode, second.returncode) == (1, 1)
    assert second.stdout == ""
    assert second.stderr == "ampdoctor: rank 1: the report is in rank1.jsonl\n"
    assert [file.name for file in tmp_path.iterdir()] == ["rank1.jsonl"]
    kept = report_from_text((tmp_path / "rank1.jsonl").read_text())
    assert {finding.where.rank for finding in kept.findings} == {1}


def test_it_lies_beside_the_output_of_rank_0(here, tmp_path):
    (tmp_path / "reports").mkdir()
    for rank in (0, 1):
        assert here(rank, "--output", "reports/all.json", "--format", "json", "-q").stderr == ""
    assert sorted(file.name for file in (tmp_path / "reports").iterdir()) == ["all.json", "rank1.jsonl"]


@pytest.mark.slow
def test_the_reports_of_torchrun_become_one(tmp_path, run_cli, python):
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(DRIVER)]
    options = ["sick", "scan", "x", "--format", "jsonl", "--output", "rank0.jsonl", "--exit-zero"]
    result = run_cli(command=[*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, capture_output=False)
    assert result.returncode == 0, result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    merged = run_cli("merge", "rank0.jsonl", "rank1.jsonl", "--format", "json", cwd=tmp_path)
    assert merged.returncode == 1
    findings = report_from_text(merged.stdout).findings
    assert [finding.evidence["ranks"] for finding in findings] == [[0, 1], [0, 1]]
