"""The plain strided real tensor that holds a tensor's stored elements, whatever its layout."""

from __future__ import annotations

import torch
from torch import Tensor

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
SPARSE_LAYOUTS = _COMPRESSED | {torch.sparse_coo}
"""Layouts that store fewer elements than `numel()` says."""

E8M0: tuple[torch.dtype, ...] = tuple(dtype for dtype in [getattr(torch, "float8_e8m0fnu", None)] if dtype is not None)
"""The dtype of MX scales, which torch has from 2.7 on; else none."""
E2M1_PAIRS: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in [getattr(torch, "float4_e2m1fn_x2", None)] if dtype is not None
)
"""The dtype of two FP4 numbers in a byte, which torch has from 2.8 on; else none."""


def dense_elements(tensor: Tensor) -> Tensor:
    """Return the stored elements as one plain strided real tensor, without a copy where that is possible.

    - complex: the real and imaginary parts are elements of their own;
    - sparse COO: the values, duplicates added up; compressed sparse: the values; unstored elements are not here;
    - nested: the values of all constituents;
    - quantised: the numbers that the integers stand for, in float32;
    - a distributed tensor: this process's shard, without communication.

    A meta tensor has no values and must not come here.
    """
    stored = _stored(tensor)
    if stored is not tensor:
        return dense_elements(stored)
    return tensor.resolve_neg()


def _stored(tensor: Tensor) -> Tensor:
    """One step from a tensor to what holds its elements; itself where there is no further step."""
    result = tensor
    local = getattr(tensor, "to_local", None)
    if local is not None:
        result = local()
    elif tensor.is_nested or tensor.layout in _COMPRESSED:
        result = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        result = tensor.coalesce().values()
    elif tensor.is_mkldnn:
        result = tensor.to_dense()
    elif tensor.is_quantized:
        result = tensor.dequantize()
    elif tensor.is_complex():
        result = torch.view_as_real(tensor.resolve_conj())
    return result


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a strided tensor with its dimensions in the order of memory: contiguous where it is dense."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True)
    return tensor.permute(order)


def flat(tensor: Tensor) -> Tensor:
    """Return a strided tensor's elements in one dimension, in memory order where that avoids a copy."""
    return in_memory_order(tensor).reshape(-1)
