"""Random states are kept without beginning CUDA, and put back where it has begun since."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ampdoctor.hooks.process_state import RandomState


def test_a_machine_s_gpu_is_not_begun_for_a_loop_that_does_not_use_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("CUDA was begun"))
    before = RandomState.capture()
    drawn = torch.rand(3)
    before.restore()
    assert before.torch_cuda == ()
    assert torch.equal(torch.rand(3), drawn)


def test_where_cuda_has_begun_since_it_is_as_it_begins(monkeypatch):
    seeds = []
    torch.manual_seed(23)
    before = RandomState.capture()
    torch.manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before.restore()
    assert seeds == [23]


def test_the_second_number_of_a_pair_that_numpy_keeps_is_part_of_the_state():
    np.random.seed(0)  # noqa: NPY002 - what loops use
    for _ in range(4):
        before, drawn = RandomState.capture(), np.random.randn()  # noqa: NPY002
        after, following = RandomState.capture(), np.random.randn()  # noqa: NPY002
        before.restore()
        assert np.random.randn() == drawn  # noqa: NPY002
        after.restore()
        assert np.random.randn() == following  # noqa: NPY002
        after.restore()
