"""A look at one rank's step runs no collective: the job is the bare job, bit for bit, whoever goes bad."""

import re
from pathlib import Path

import pytest

from tests.live.distributed.jobs import assert_same, both, logged, looks

SCRIPT = Path(__file__).with_name("training.py")


def said(process):
    """What a job prints, without its numbers: two processes print in any order, and torchrun prints times."""
    lines = (process.stdout + process.stderr).splitlines()
    return sorted(re.sub("[0-9]+", "#", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("scaler+bad7", 2), ("bad7", 4), ("gated+scaler+bad6", 2)])
def test_a_nan_in_one_ranks_batch_is_found_there_and_the_job_goes_on(python, tmp_path, kind, world):
    bare, run = both(python, SCRIPT, kind, tmp_path, world)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path, world)
    guilty = looks(tmp_path, world - 1)
    assert [one["code"] for look in guilty for one in look["findings"]] == ["AMP204"]
    for rank in range(world - 1):
        assert [look.get("findings", []) for look in looks(tmp_path, rank)] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nosync", "compiled", "powersgd", "gan", "hooked", "reduced"])
def test_other_ways_to_train_in_several_processes_are_not_harmed_either(python, tmp_path, kind):
    bare, run = both(python, SCRIPT, f"{kind}+scaler+bad7", tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert len(looks(tmp_path, 1)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("fsdp2+bad7", 2), ("fsdp1+bad7", 2), ("tp+bad7", 2)])
def test_a_model_that_lies_in_parts_is_not_run_in_place(python, tmp_path, kind, world):
    bare, run = both(python, SCRIPT, kind, tmp_path, world)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path, world)
    assert "lie in parts" in run.stderr
    assert not any(look.get("findings") for rank in range(world) for look in looks(tmp_path, rank))


@pytest.mark.slow
def test_what_a_rank_adds_to_its_gradients_is_blamed_on_nobody_else(python, tmp_path):
    bare, run = both(python, SCRIPT, "scaler+edit+bad7", tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert not any(look.get("findings") for look in looks(tmp_path, 0))


@pytest.mark.slow
def test_a_rank_that_raises_has_the_job_started_anew_once_and_both_attempts_are_logged(python, tmp_path):
    bare, run = both(python, SCRIPT, "scaler+raises+bad7", tmp_path, launched=["--max-restarts", "2"])
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    for process in (bare, run):
        assert process.stderr.count("RuntimeError: no more of this") == 1
    for rank in (0, 1):
        assert [line.get("restarts", 0) for line in logged(tmp_path, rank, "run")] == [1]
        assert [line["step"] for line in logged(tmp_path, rank, "step")] == list(range(11))
        assert [line["exit_code"] for line in logged(tmp_path, rank, "end")] == [0]
        assert len(logged(tmp_path, rank, "step", attempt=1)) >= 7
    (end,) = logged(tmp_path, 1, "end", attempt=1)
    assert (end["exit_code"], end["reason"]) == (1, "RuntimeError")
    assert [one["code"] for look in looks(tmp_path, 1) for one in look["findings"]] == ["AMP204"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "compiled", "gated", "fsdp2", "tp", "powersgd+scaler", "gan"])
def test_a_healthy_job_is_the_bare_job_and_nothing_is_said(python, tmp_path, kind):
    bare, run = both(python, SCRIPT, kind, tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert looks(tmp_path, 0) == looks(tmp_path, 1) == []
    ours = [line for line in said(run) if line.startswith("ampdoctor: watching ") or " steps watched, " in line]
    assert len(ours) == 2
    assert sorted([*said(bare), *ours]) == said(run)
