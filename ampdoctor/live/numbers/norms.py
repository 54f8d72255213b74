"""L2 norms of many tensors in a few kernels, which stay on their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampdoctor.numerics.tensors import Unseen, dense_elements, is_plain

_REDUCED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
"""Dtypes that torch reduces; others (float8) are widened first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """L2 norms of tensors on one device.

    Attributes:
        names: Of the tensors, in the vector's order.
        vector: float32 of shape (n,), on the device; float64 where one of the tensors is.
        off: By how much `torch._foreach_norm` and `torch.linalg.vector_norm` differ at most, relative: 0-dim, on the
            device; None where that was not asked.
    """

    names: tuple[str, ...]
    vector: Tensor
    off: Tensor | None = None


def local(tensor: Tensor) -> Tensor:
    """Returns what this process and device can tell of a tensor without communication and without waiting.

    Of a distributed tensor that is this process's shard. Of a sparse tensor on a device whose rows may occur twice, it
    is the rows as they are: to add them up would wait.

    Args:
        tensor: Floating-point or complex (real and imaginary parts are elements), of any layout, not meta.

    Returns:
        The stored elements, plain, strided and real, of any shape; a view wherever that is possible.
    """
    if is_plain(tensor) and tensor.layout is torch.strided and tensor.dtype in _REDUCED and not tensor.is_neg():
        return tensor
    with Unseen(tensor):
        to_local = getattr(tensor.detach(), "to_local", tensor.detach)
        own: Tensor = to_local()
    with Unseen(own):
        twice = own.layout is torch.sparse_coo and not own.is_coalesced() and own.device.type != "cpu"
        elements = dense_elements(own._values() if twice else own)
        return elements if elements.dtype in _REDUCED else elements.to(torch.float32)


def norms_of(named: Iterable[tuple[str, Tensor]], *, fused: bool = True, check: bool = False) -> list[Norms]:
    """Returns the norms of tensors, by device, without waiting for any device.

    Squares are summed in float32 (float64 for float64), so that a norm above 1.8e19 is inf and elements below 2.6e-23
    do not count, as in `clip_grad_norm_`; an fp16 tensor's norm does not overflow. A NaN makes its tensor's norm NaN. A
    shard's norm is that of the shard; that of an uncoalesced sparse tensor on a device takes repeated rows apart.

    Args:
        named: Name and tensor, as for `local`; empty tensors have norm 0.
        fused: By `torch._foreach_norm`, which is one kernel for many tensors; else one by one.
        check: Also compute them the other way (a torch of 2024 gave wrong norms of long lists, pytorch#140066).
    """
    groups: dict[torch.device, dict[torch.dtype, tuple[list[str], list[Tensor]]]] = {}
    for name, tensor in named:
        elements = local(tensor)
        names, tensors = groups.setdefault(elements.device, {}).setdefault(elements.dtype, ([], []))
        names.append(name)
        tensors.append(elements)
    found = []
    for by_dtype in groups.values():
        names = [name for part, _ in by_dtype.values() for name in part]
        lists = [tensors for _, tensors in by_dtype.values()]
        with Unseen(lists[0][0]):
            vector = _vector(lists, fused=fused)
            off = _apart(vector, _vector(lists, fused=not fused)) if check else None
        found.append(Norms(names=tuple(names), vector=vector, off=off))
    return found


def total(vector: Tensor) -> Tensor:
    """Returns the norm of all elements, 0-dim and on the device, from the norms of the tensors."""
    with Unseen(vector):
        norm: Tensor = torch.linalg.vector_norm(vector)
    return norm


def _vector(lists: Sequence[list[Tensor]], *, fused: bool) -> Tensor:
    """Returns the norms of lists of tensors, of one dtype each and of one device."""
    parts = []
    for tensors in lists:
        wide = None if tensors[0].dtype == torch.float64 else torch.float32
        if fused:
            norms = list(torch._foreach_norm(tensors, 2.0, dtype=wide))
        else:
            norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
        parts.append(torch.stack(norms))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest relative difference; norms that are both not finite do not differ."""
    largest = torch.maximum(one.abs(), other.abs())
    apart = (one - other).abs() / largest.clamp(min=torch.finfo(one.dtype).tiny)
    same = one.isfinite().logical_not_() & other.isfinite().logical_not_()
    return torch.where(same | (one == other), torch.zeros_like(apart), apart).amax()
