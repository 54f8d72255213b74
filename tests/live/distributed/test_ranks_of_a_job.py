"""Which of a job's processes this is."""

import os
import subprocess
import sys

import pytest

from ampdoctor.live.log.facts import exit_code_ends_others, launched

DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}  # of mpirun's: srun has started one on each node
SPAWNED = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ampdoctor


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampdoctor.watch(folder=f"{folder}/health"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, None)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 8, "torchrun")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}, (0, 1, None)),  # a batch script
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2, "srun")),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3, "mpirun")),
        ({**DAEMON, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}, (5, 8, "mpirun")),
        ({"RANK": "x", "WORLD_SIZE": "8"}, (0, 1, None)),
        ({"RANK": "1" * 5000, "WORLD_SIZE": "1" * 5001}, (0, 1, None)),
    ],
)
def test_what_a_launcher_says_is_taken(environment, place):
    found = launched(environment)
    assert (found.rank, found.world, found.launcher) == place


def test_an_exit_code_of_one_process_alone_ends_no_other(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "PMI")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    assert not exit_code_ends_others()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert exit_code_ends_others()


@pytest.mark.slow
def test_each_spawned_process_has_a_log_of_its_own_and_all_have_one_run_id(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=200)
    logs = sorted(path.name for path in (tmp_path / "health").glob("log*.jsonl"))
    assert logs == ["log.jsonl", "log.rank1.jsonl"]
    texts = [(tmp_path / "health" / name).read_text() for name in logs]
    assert [text.count('"kind":"step"') for text in texts] == [3, 3]
    ids = {line.split('"run_id":"')[1].split('"')[0] for text in texts for line in text.splitlines()}
    assert len(ids) == 1
    assert all('"world_size":2' in line for text in texts for line in text.splitlines())
