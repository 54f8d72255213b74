"""Jobs of several processes, bare and watched, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess

import torch


def torchrun(python, world, *command, folder, launched=()):
    """Return the process that torchrun was, with what it has printed.

    Args:
        python: Of the launcher, and so of the job's processes.
        world: Number of processes.
        command: What each of them runs.
        folder: Where.
        launched: Further options of torchrun's.
    """
    # with a port that is told beforehand a restart meets the addresses of the first attempt in its store
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.run(
        [python, *launcher, *launched, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def both(python, script, kind, folder, world=2, *, options=(), launched=()):
    """Run `SCRIPT KIND OUT` bare and watched, and return both ends; OUT is `bare` or `run`, the log is in `health`."""
    (folder / "bare").mkdir()
    (folder / "run").mkdir()
    bare = torchrun(python, world, str(script), kind, str(folder / "bare"), folder=folder, launched=launched)
    watched = ["-m", "ampdoctor", "run", "--health", "health", *options, str(script), kind, str(folder / "run")]
    return bare, torchrun(python, world, *watched, folder=folder, launched=launched)


def logged(folder, rank, kind, attempt=None):
    """Return the lines of a kind from a rank's log; of an earlier attempt, from 1, where the job was started anew."""
    name = ".".join(["log", *([f"rank{rank}"] if rank else []), *([str(attempt)] if attempt else []), "jsonl"])
    lines = [json.loads(line) for line in (folder / "health" / name).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def looks(folder, rank):
    return logged(folder, rank, "look")


def assert_same(folder, world=2):
    """The weights are bit for bit those of the bare job, and as many collectives were run."""
    for rank in range(world):
        bare, run = (torch.load(folder / name / f"{rank}.pt") for name in ("bare", "run"))
        assert bare["collectives"] == run["collectives"] > 0
        for mine, other in zip(bare["weights"], run["weights"], strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
