"""Where a training stood beside its weights: random numbers, schedules and loaders, in every library's own names."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.replay.load_checkpoint import load_schedulers, not_restored, set_generators

LOADER = {"_sampler_iter_yielded": 3, "_num_yielded": 3, "state": {"seed": torch.arange(3)}}


WEIGHTS = nn.Linear(2, 2).state_dict()


def scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return CosineAnnealingLR(optimizer, 10)


def after(steps):
    one = scheduler()
    for _ in range(steps):
        one.optimizer.step()
        one.step()
    return one


def states():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def by_hand(folder):
    python, numpy, cpu = states()
    saved = {"model": WEIGHTS, "step": 4, "scheduler": after(4).state_dict()}
    saved |= {"rng_state": cpu, "random": {"python": python, "numpy": numpy}, "dataloader_state_dict": LOADER}
    torch.save({**saved, "generator": torch.Generator().manual_seed(1).get_state()}, folder / "last.pt")
    return folder / "last.pt"


def trainer(folder):
    python, numpy, cpu = states()
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    torch.save(after(4).state_dict(), folder / "scheduler.pt")
    torch.save({"python": python, "numpy": numpy, "cpu": cpu, "cuda": [cpu[:16]]}, folder / "rng_state.pth")
    return folder


def accelerate(folder):
    python, numpy, cpu = states()
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    torch.save(after(4).state_dict(), folder / "scheduler.bin")
    torch.save(LOADER, folder / "dl_state_dict.bin")
    named = {"step": 4, "random_state": python, "numpy_random_seed": numpy, "torch_manual_seed": cpu}
    torch.save({**named, "torch_cuda_manual_seed": [cpu[:16]]}, folder / "random_states_0.pkl")
    return folder


@pytest.mark.parametrize("save", [by_hand, trainer, accelerate])
def test_every_library_is_read_and_its_random_numbers_come_again(save, tmp_path):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    path = save(tmp_path)
    expected = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002
    standing = load_state(path).standing
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    torch.manual_seed(4)
    set_generators(standing.random)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected  # noqa: NPY002
    fresh, original = scheduler(), after(4)
    assert load_schedulers([fresh], standing.schedulers) is None
    assert fresh.state_dict() == original.state_dict()
    assert standing.random.of_devices is (save is not by_hand)
    if save is not trainer:
        (loader,) = standing.loaders
        assert loader["_num_yielded"] == 3
        assert loader["state"]["seed"].tolist() == [0, 1, 2]


def test_what_is_not_there_is_said(tmp_path):
    torch.save({"model": WEIGHTS, "generator": torch.get_rng_state()}, tmp_path / "last.pt")
    standing = load_state(tmp_path / "last.pt").standing
    assert standing.random.torch is None
    assert [reason.partition(":")[0] for reason in not_restored(standing.random, "cpu")] == [
        "the file holds no random state of torch"
    ]
    assert load_schedulers([scheduler()], ()) == "holds no schedule of the learning rate: it is as the factory makes it"
    assert load_schedulers([], ()) is None


def test_a_schedule_that_does_not_fit_changes_nothing():
    class Strict(CosineAnnealingLR):
        def load_state_dict(self, state_dict):
            self.last_epoch = 99
            raise KeyError("no")

    first = scheduler()
    second = Strict(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 10)
    before = first.state_dict(), second.state_dict()
    said = load_schedulers([first, second], [after(3).state_dict()] * 2)
    assert "that Strict does not load (KeyError: 'no')" in said
    assert (first.state_dict(), second.state_dict()) == before
    assert "holds 2 schedules of the learning rate, and the run has 1" in load_schedulers([first], [{}, {}])
