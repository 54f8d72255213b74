"""Compares two stored tensors of one shape, element by element, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampdoctor.checkpoints.stored_tensor import JoinedTensor, LiveTensor, StoredTensor, StridedTensor
from ampdoctor.errors import LimitExceededError

MAX_LOADED_BYTES = 256 * 1024 * 1024
"""Tensors with different orders of elements (pieces beside a whole) are loaded to be compared up to this size."""


PAIRED_ELEMENTS = 1 << 17
"""Elements of each tensor that are compared at a time: with intermediate results they still fit the cache."""


@dataclass(slots=True)
class Difference:
    """The comparison of a newer and an older tensor's elements."""

    elements: int = 0  # pairs
    unchanged: int = 0  # pairs of equal values; NaN equals NaN
    squared_change: float = 0.0  # sum of (new - old)^2 over pairs of finite values
    squared_old: float = 0.0  # sum of old^2 over the same pairs
    amax: float = 0.0  # largest finite magnitude
    old_amax: float = 0.0
    nonfinite: int = 0  # NaNs and infinities
    old_nonfinite: int = 0


def difference(new: StoredTensor, old: StoredTensor) -> Difference:
    """Compare two tensors of one shape, widened exactly; raises LimitExceededError as `side_by_side`."""
    found = Difference()
    for newer, older in side_by_side(new, old):
        _add(found, newer, older)
    return found


def side_by_side(*tensors: StoredTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same elements of several tensors, 1-D; raises LimitExceededError if they are too large to reorder."""
    first, *others = tensors
    if all(_aligned(first, other) for other in others):
        yield from zip(*(tensor.chunks(PAIRED_ELEMENTS) for tensor in tensors), strict=True)
        return
    for tensor in tensors:
        if tensor.numel * tensor.dtype.itemsize > MAX_LOADED_BYTES:
            size = tensor.numel * tensor.dtype.itemsize
            raise LimitExceededError("bytes of tensors whose elements lie in different orders", MAX_LOADED_BYTES, size)
    yield tuple(tensor.load().flatten() for tensor in tensors)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D tensor in a dtype that supports arithmetic and holds the values exactly: float32 or float64."""
    if values.dtype.is_complex:
        values = torch.view_as_real(values).flatten()
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _aligned(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether both are streamed in the same order of elements."""
    if isinstance(one, LiveTensor) and isinstance(other, LiveTensor):
        return True
    if isinstance(one, StridedTensor) and isinstance(other, StridedTensor):
        return _order(one) == _order(other) is not None
    if isinstance(one, JoinedTensor) and isinstance(other, JoinedTensor) and len(one.shards) == len(other.shards):
        return all(
            a.at == b.at and a.stored.shape == b.stored.shape and _aligned(a.stored, b.stored)
            for a, b in zip(one.shards, other.shards, strict=True)
        )
    return False


def _order(tensor: StridedTensor) -> tuple[tuple[int, int], ...] | None:
    """Returns the sizes and strides that matter; None for a view with holes, which is not streamed in pieces."""
    distinct = math.prod(size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step)
    if tensor.numel and distinct * tensor.dtype.itemsize < tensor.nbytes:
        return None
    return tuple((size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size != 1)


def _add(found: Difference, new: torch.Tensor, old: torch.Tensor) -> None:
    newer, older = widened(new).to(torch.float64), widened(old).to(torch.float64)
    finite, was_finite = newer.isfinite(), older.isfinite()
    both = finite & was_finite
    unchanged = (newer == older) | (newer.isnan() & older.isnan())
    moved, before = (newer - older)[both], older[both]
    found.elements += newer.numel()
    found.unchanged += int(torch.count_nonzero(unchanged))
    found.squared_change += float(torch.dot(moved, moved))
    found.squared_old += float(torch.dot(before, before))
    found.amax = max(found.amax, _amax(newer[finite]))
    found.old_amax = max(found.old_amax, _amax(older[was_finite]))
    found.nonfinite += newer.numel() - int(torch.count_nonzero(finite))
    found.old_nonfinite += older.numel() - int(torch.count_nonzero(was_finite))


def _amax(values: torch.Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0
