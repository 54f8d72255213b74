"""A distributed training's habits, in one process."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampdoctor.errors import ReplayError
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda
from ampdoctor.precision.fake_gpu.processes import lasting_emulation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing is emulated")


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_what_torchrun_sets_is_there_for_code_that_needs_it():
    with emulate_cuda():
        assert int(os.environ["LOCAL_RANK"]) == 0
        assert "LOCAL_RANK" not in os.environ  # so asks a script that can do without
        assert int(os.environ.get("RANK", "-1")) == -1
        assert os.getenv("WORLD_SIZE") is None
        with pytest.raises(KeyError):
            os.environ["SLURM_PROCID"]
    with pytest.raises(KeyError):
        os.environ["LOCAL_RANK"]


@pytest.mark.parametrize("arguments", [{}, {"backend": "nccl"}, {"backend": "cpu:gloo,cuda:nccl", "world_size": 1}])
def test_one_process_joins_a_group_and_leaves_it(arguments):
    made = []
    with lasting_emulation():
        for _ in range(2):  # a factory is called again and again
            with emulate_cuda():
                dist.init_process_group(**arguments)
                assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
                model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
                model = nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
                made.append(model)
                model(torch.ones(2, 1, 2, 2)).sum().backward()
                dist.barrier(device_ids=[0])
                dist.destroy_process_group()
            with emulate_cuda():
                model(torch.ones(2, 1, 2, 2)).sum().backward()  # steps are run again after the script's last line
    assert not dist.is_initialized()
    time.sleep(0.1)  # gloo's thread needs the interpreter to let go of its last work, and torch waits for it without


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with emulate_cuda(), pytest.raises(ReplayError, match="a group of 8 processes"):
        dist.init_process_group("nccl")
    assert not dist.is_initialized()


def test_a_group_that_was_there_before_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with emulate_cuda(), pytest.raises(ValueError, match="twice"):
            dist.init_process_group("nccl")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
