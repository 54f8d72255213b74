"""Inside `refused` this thread starts no collective, by whatever way; other threads do what they do."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable
from torch.nn.parallel import DistributedDataParallel

from ampdoctor.errors import CollectiveError
from ampdoctor.hooks.process_state import are_several, refused

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def through_ddp():
    DistributedDataParallel(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()


@torch.library.custom_op("ampdoctor_tests::summed", mutates_args=())
def summed(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result


@torch.library.custom_op("ampdoctor_tests::summed_in", mutates_args=())
def summed_in(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD))


@torch.library.custom_op("ampdoctor_tests::doubled", mutates_args=())
def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


WAYS = {
    "all_reduce": dist.all_reduce,
    "asynchronous": lambda t: dist.all_reduce(t, async_op=True),
    "of objects": lambda t: dist.all_gather_object([None], "x"),
    "barrier": lambda t: dist.barrier(),
    "monitored barrier": lambda t: dist.monitored_barrier(),
    "functional": lambda t: functional.wait_tensor(functional.all_reduce(t, "sum", dist.group.WORLD)),
    "differentiable": differentiable.all_reduce,
    "group": lambda t: dist.group.WORLD.allreduce([t]),
    "backend": lambda t: backend().allreduce([t]),
    "backend's barrier": lambda t: backend().barrier(),
    "new group": lambda t: dist.new_group([0]),
    "DDP": lambda t: through_ddp(),
    "an op written in Python": summed,
    "an op that is told its group": lambda t: summed_in(t, dist.group.WORLD.group_name),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_collective_is_refused_before_it_is_launched(way):
    tensor, before = torch.ones(2), dist.group.WORLD._get_sequence_number_for_group()
    with refused(), pytest.raises(CollectiveError, match="one rank must not run alone"):
        WAYS[way](tensor)
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    WAYS[way](tensor)  # and afterwards it is what it was


def test_what_communicates_with_nobody_goes_on():
    with refused():
        assert not are_several()
        assert dist.get_rank() == 0
        work = torch.nn.Linear(2, 1)(torch.ones(1, 2))
        work.sum().backward()
        assert backend().size() == 1
        assert doubled(torch.ones(2)).sum() == 4


@pytest.mark.parametrize("way", ["all_reduce", "backend", "new group"])
def test_another_thread_is_not_held_back(way):
    done = []

    def other():
        WAYS[way](torch.ones(2))
        done.append(way)

    with refused():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert done == [way]


def test_the_classes_of_torch_are_as_they_were():
    from torch._C import _distributed_c10d as in_c

    before = [dict(vars(owner)) for owner in (in_c.Backend, in_c.ProcessGroup)]
    with refused():
        pass
    assert [dict(vars(owner)) for owner in (in_c.Backend, in_c.ProcessGroup)] == before
