"""Tensors of every kind lie in the file, and come back as they were; what cannot lie there is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.replay.bundles.entries import stored_tensor, tensor_of, write_safetensors

SEVEN = torch.arange(7.0)
KINDS = {
    "half": SEVEN.half(),
    "fp8": SEVEN.to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "a number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with holes": torch.randn(6, 6)[::2, ::3],
    "expanded": torch.randn(1, 4).expand(1000, 4),
    "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=list(KINDS))
def test_it_comes_back(tensor, tmp_path):
    entry, stored = stored_tensor("given/0", tensor)
    write_safetensors(tmp_path / "t.safetensors", {"given/0": stored})
    with RegularFile(tmp_path / "t.safetensors", "t") as file:
        again = tensor_of(entry, read_safetensors(file).tensors["given/0"].load(), "t")
    assert (again.dtype, again.shape, again.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    if tensor.dtype is torch.float8_e4m3fn:
        again, tensor = again.float(), tensor.float()
    torch.testing.assert_close(again.detach(), tensor.detach(), rtol=0, atol=0, equal_nan=True)
    if not tensor.is_conj() and tensor.is_contiguous(memory_format=torch.channels_last):
        assert again.stride() == tensor.stride()


def test_a_repeated_view_is_stored_once():
    assert stored_tensor("x", torch.zeros(1, 4).expand(1000, 4))[1].nbytes == 16


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "has no values"),
        (lambda: torch.eye(3).to_sparse(), "has the layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(SEVEN, 0.1, 0, torch.qint8), "has no values"),
    ],
    ids=["meta", "sparse", "quantised"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_lie_there_is_said(make, why):
    assert why in stored_tensor("x", make())
