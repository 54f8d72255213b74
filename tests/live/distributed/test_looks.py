"""A look at one rank's step runs no collective: the job is the bare job, bit for bit, whoever goes bad."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("training.py")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def torchrun(python, world, *command, folder):
    """Return the process that torchrun was, with its stderr."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(free_port())]
    return subprocess.run(
        [python, *launcher, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def both(python, kind, folder, world=2, *options):
    """Run the training bare and watched; return both ends, and the looks of each rank."""
    (folder / "bare").mkdir()
    (folder / "run").mkdir()
    bare = torchrun(python, world, str(SCRIPT), kind, str(folder / "bare"), folder=folder)
    watched = ["-m", "ampdoctor", "run", "--health", "health", *options, str(SCRIPT), kind, str(folder / "run")]
    run = torchrun(python, world, *watched, folder=folder)
    return bare, run


def looks(folder, rank):
    name = "log.jsonl" if rank == 0 else f"log.rank{rank}.jsonl"
    lines = [json.loads(line) for line in (folder / "health" / name).read_text().splitlines()]
    return [line for line in lines if line["kind"] == "look"]


def assert_same(folder, world=2):
    """The weights are bit for bit those of the bare job, and as many collectives were run."""
    for rank in range(world):
        bare, run = (torch.load(folder / name / f"{rank}.pt") for name in ("bare", "run"))
        assert bare["collectives"] == run["collectives"] > 0
        for mine, other in zip(bare["weights"], run["weights"], strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "kind", ["scaler+bad7", "bad7", "scaler+bad0", "static+scaler+bad0", "gated+scaler+bad6", "view+scaler+bad1"]
)
def test_a_nan_in_one_ranks_batch_is_found_there_and_the_job_goes_on(python, tmp_path, kind, world):
    bare, run = both(python, kind, tmp_path, world)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path, world)
    guilty = looks(tmp_path, world - 1)
    assert [one["code"] for look in guilty for one in look["findings"]] == ["AMP204"]
    for rank in range(world - 1):
        assert [look.get("findings", []) for look in looks(tmp_path, rank)] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["nosync", "compiled", "checkpoint", "powersgd", "gan", "tokens", "byhand", "hooked", "reduced"]
)
def test_other_ways_to_train_in_several_processes_are_not_harmed_either(python, tmp_path, kind):
    bare, run = both(python, f"{kind}+scaler+bad7", tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert len(looks(tmp_path, 1)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2+bad7", "fsdp2+edit+bad7", "tp+bad7"])
def test_a_model_that_lies_in_parts_is_not_run_in_place(python, tmp_path, kind):
    bare, run = both(python, kind, tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert "lie in parts" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["ddp", "nosync", "static", "compiled", "gated", "fsdp2", "tp", "powersgd+scaler", "gan", "reduced", "byhand"],
)
def test_a_healthy_job_is_the_bare_job_and_nothing_is_said(python, tmp_path, kind):
    bare, run = both(python, kind, tmp_path)
    assert (bare.returncode, run.returncode) == (0, 0), run.stderr
    assert_same(tmp_path)
    assert looks(tmp_path, 0) == looks(tmp_path, 1) == []
    assert "ampdoctor" not in run.stderr
