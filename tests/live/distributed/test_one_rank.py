"""One rank's model on its own: wrappers leave the other ranks out, and are afterwards as they were."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampdoctor.errors import CollectiveError
from ampdoctor.replay.recorded_step import lies_in_parts, on_its_own


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_synchronised_batch_norm_takes_the_statistics_of_this_batch():
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(16, 4)
    with on_its_own(model) as said:
        assert torch.equal(model(x), plain(x))
    assert said == ("1 (SyncBatchNorm) took the statistics of this rank's batch alone",)
    assert "forward" not in vars(model[1])
    with pytest.raises(ValueError, match="on GPU"):  # as it was: it refuses a CPU
        model(x)


def test_a_step_on_its_own_leaves_the_reducer_and_its_hooks_alone():
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    reduced = []

    def hook(state, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    before, x = dist.group.WORLD._get_sequence_number_for_group(), torch.randn(3, 4)
    with on_its_own(ddp) as said:
        ddp(x).sum().backward()
        assert ddp.module.weight.grad is not None
    assert (said, reduced) == ((), [])
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    assert ddp.module.weight.grad is None
    ddp(x).sum().backward()
    assert reduced == [0]


def test_hooks_that_may_communicate_are_not_run_and_are_named():
    model = nn.Linear(4, 2)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    model.bias.register_hook(lambda g: seen.append("before"))
    with on_its_own(model) as said:
        model(torch.randn(3, 4)).sum().backward()
    assert seen == []
    assert said == ("gradient hooks of the loop's own were not run, as they may communicate: on weight and 1 more",)
    model(torch.randn(3, 4)).sum().backward()
    assert sorted(seen) == ["after", "before"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_horovod_joins_is_not_run_by_one_rank(monkeypatch, processes):
    monkeypatch.setitem(sys.modules, "horovod.torch", SimpleNamespace(size=lambda: processes))
    with (
        pytest.raises(CollectiveError, match="joined by Horovod") if processes > 1 else nullcontext(),
        on_its_own(nn.Linear(4, 2)),
    ):
        pass


@pytest.mark.filterwarnings("ignore:FSDP is switching")  # as it is alone
def test_a_model_that_lies_whole_on_this_rank_is_told_from_one_that_lies_in_parts():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    assert lies_in_parts(DistributedDataParallel(nn.Linear(4, 2))) is None
    assert lies_in_parts(nn.Sequential(fully_shard(nn.Linear(4, 2)))) == "FSDP"
    assert lies_in_parts(FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))) == "FSDP"
    held = nn.Linear(4, 2)
    held.weight.ds_id = 3
    assert lies_in_parts(held) == "DeepSpeed's ZeRO-3"
