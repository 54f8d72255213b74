"""The plain strided real tensor that holds a tensor's stored elements, whatever its layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampdoctor.numerics.unseen import is_plain

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
    """Return the stored elements as one plain strided real tensor, if possible without a copy.

    - complex: the real and imaginary parts are separate elements;
    - sparse COO: the values, duplicates added up; compressed sparse: the values; unstored elements are left out;
    - nested: the values of all constituents;
    - quantised: the numbers that the integers represent, in float32;
    - a distributed tensor: this process's shard, without communication;
    - a tensor subclass with ops of its own (torchao's): what it dequantises to, else the tensors that it consists of.

    A meta tensor has no values and must not be passed.
    """
    stored = _stored(tensor)
    if stored is not tensor:
        return dense_elements(stored)
    return tensor.resolve_neg()


def _stored(tensor: Tensor) -> Tensor:
    """Take one step from a tensor to the tensor that holds its elements; itself if there is no further step."""
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
    elif not is_plain(tensor) and not hasattr(tensor, "fake_mode"):
        result = _meant_by(tensor)
    elif tensor.is_complex():
        result = torch.view_as_real(tensor.resolve_conj())
    return result


_WIDE = ("dequantize", "to_original_precision", "to_dense")
"""Methods by which tensor subclasses give the numbers that they stand for; torchao's have one of the first two."""


def _meant_by(tensor: Tensor) -> Tensor:
    """Returns the numbers that a subclass with ops of its own stands for, as a plain tensor.

    Raises:
        TypeError: It gives neither these nor the tensors that it consists of.
    """
    for name in _WIDE:
        try:
            wide = getattr(tensor.detach(), name)()
        except Exception:  # noqa: BLE001, S112 - a subclass raises what it likes for an op that it does not know
            continue
        if isinstance(wide, Tensor) and type(wide) is not type(tensor):
            return wide
    parts = [dense_elements(part).reshape(-1) for part in parts_of(tensor) if part.is_floating_point()]
    if parts:
        return torch.cat([part.to(torch.float64) for part in parts])
    raise TypeError(f"a {type(tensor).__name__} gives no numbers")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a subclass consists of; [tensor] for a plain one, [] for one that hides them."""
    if is_plain(tensor):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be had: those of a subclass with ops of its own only if it gives them."""
    if is_plain(tensor) or tensor.is_meta or hasattr(tensor, "fake_mode"):
        return True
    try:
        dense_elements(tensor)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a strided tensor with its dimensions in the order of memory: contiguous if it is dense."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True)
    return tensor.permute(order)


def flat(tensor: Tensor) -> Tensor:
    """Return a strided tensor's elements in one dimension, in memory order if that avoids a copy."""
    return in_memory_order(tensor).reshape(-1)
