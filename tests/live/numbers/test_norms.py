from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ampdoctor.live.numbers.norms_and_samples import local, norms_of


def by_name(found):
    return {name: float(n) for norms in found for name, n in zip(norms.names, norms.vector, strict=True)}


def awkward():
    torch.manual_seed(0)
    rows = torch.tensor([[1, 4, 1]])
    return {
        "matrix": torch.randn(7, 5),
        "transposed": torch.randn(7, 5).t(),
        "number": torch.tensor(-3.0),
        "nothing": torch.empty(0, 4),
        "half": torch.full((8,), 60000.0, dtype=torch.float16),
        "bf16": torch.randn(9).bfloat16(),
        "double": torch.full((4,), 1e200, dtype=torch.float64),
        "complex": torch.tensor([3 + 4j, 0]),
        "conjugate": torch.tensor([3 + 4j, 0]).conj(),
        "sparse": torch.sparse_coo_tensor(rows, torch.tensor([3.0, 1.0, 1.0]), (6,), check_invariants=True),
        "inf_in_weights": torch.tensor([1.0, math.nan]),
        "infinite": torch.tensor([1.0, -math.inf]),
    }


def test_norms_of_every_kind_of_tensor():
    found = by_name(norms_of(awkward().items()))
    expected = {name: float(t.to_dense().to(torch.complex128).norm()) for name, t in awkward().items()}
    assert found.keys() == expected.keys()
    assert found["sparse"] == pytest.approx(math.sqrt(16 + 1))  # repeated rows are added up
    assert found["complex"] == found["conjugate"] == 5.0
    assert found["nothing"] == 0.0
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_a_distributed_gradient_is_this_process_s_shard():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        assert isinstance(whole, DTensor)
        assert local(whole).shape == (4,)
        assert by_name(norms_of([("w", whole)]))["w"] == pytest.approx(float(whole.to_local().norm()))
    finally:
        torch.distributed.destroy_process_group()
