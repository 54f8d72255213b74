"""Two stored tensors of one shape, element by element, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampdoctor.checkpoints.stored import ShardedTensor, StoredTensor, StridedTensor
from ampdoctor.errors import LimitExceededError

MAX_LOADED_BYTES = 256 * 1024 * 1024
"""Tensors whose elements lie in another order (pieces of a distributed checkpoint beside a whole tensor) are loaded to
be compared; beyond this many bytes they are not."""


@dataclass(slots=True)
class Difference:
    """What the elements of a newer and an older tensor come to.

    Attributes:
        elements: Pairs that were compared.
        unchanged: Pairs of equal values; NaN counts as equal to NaN.
        squared_change, squared_old: Sums of squares of new - old and of old, over pairs of finite values.
        amax, old_amax: Largest finite magnitudes.
        nonfinite, old_nonfinite: NaNs and infinities.
    """

    elements: int = 0
    unchanged: int = 0
    squared_change: float = 0.0
    squared_old: float = 0.0
    amax: float = 0.0
    old_amax: float = 0.0
    nonfinite: int = 0
    old_nonfinite: int = 0


def difference(new: StoredTensor, old: StoredTensor) -> Difference:
    """Compare two tensors of one shape; values are widened exactly first.

    Raises:
        CheckpointError: Bytes cannot be read.
        LimitExceededError: Their elements lie in different orders, and they are too large to be loaded.
    """
    found = Difference()
    for newer, older in side_by_side(new, old):
        _add(found, newer, older)
    return found


def side_by_side(*tensors: StoredTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of several tensors of one shape, as 1-D tensors of the stored dtypes.

    Each tuple is overwritten by the next.

    Raises:
        CheckpointError: Bytes cannot be read.
        LimitExceededError: As for `difference`.
    """
    first, *others = tensors
    if all(_aligned(first, other) for other in others):
        yield from zip(*(tensor.chunks() for tensor in tensors), strict=True)
        return
    for tensor in tensors:
        if tensor.numel * tensor.dtype.itemsize > MAX_LOADED_BYTES:
            size = tensor.numel * tensor.dtype.itemsize
            raise LimitExceededError("bytes of tensors whose elements lie in different orders", MAX_LOADED_BYTES, size)
    yield tuple(tensor.load().flatten() for tensor in tensors)


def widened(values: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor in a format that arithmetic knows and that holds its values exactly: float32 or float64."""
    if values.dtype.is_complex:
        values = torch.view_as_real(values).flatten()
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _aligned(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether both are streamed in one and the same order of elements."""
    if isinstance(one, StridedTensor) and isinstance(other, StridedTensor):
        return _order(one) == _order(other) is not None
    if isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor) and len(one.shards) == len(other.shards):
        return all(
            a.at == b.at and a.stored.shape == b.stored.shape and _aligned(a.stored, b.stored)
            for a, b in zip(one.shards, other.shards, strict=True)
        )
    return False


def _order(tensor: StridedTensor) -> tuple[tuple[int, int], ...] | None:
    """Sizes and strides that matter; None for a view with holes, which is not streamed in pieces."""
    distinct = math.prod(size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step)
    if tensor.numel and distinct * tensor.dtype.itemsize < tensor.nbytes:
        return None
    return tuple((size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size != 1)


def _add(found: Difference, new: torch.Tensor, old: torch.Tensor) -> None:
    newer, older = widened(new), widened(old)
    if newer.dtype != older.dtype:
        newer, older = newer.to(torch.float64), older.to(torch.float64)
    found.elements += newer.numel()
    found.unchanged += int(torch.count_nonzero(newer == older))
    if not newer.numel():
        return
    if not (_finite(newer) and _finite(older)):
        bad, was_bad = ~newer.isfinite(), ~older.isfinite()
        found.nonfinite += int(torch.count_nonzero(bad))
        found.old_nonfinite += int(torch.count_nonzero(was_bad))
        found.unchanged += int(torch.count_nonzero(newer.isnan() & older.isnan()))
        found.amax = max(found.amax, _amax(newer[~bad]))
        found.old_amax = max(found.old_amax, _amax(older[~was_bad]))
        newer, older = newer[~(bad | was_bad)], older[~(bad | was_bad)]
    else:
        found.amax = max(found.amax, _amax(newer))
        found.old_amax = max(found.old_amax, _amax(older))
    found.squared_change += _squares(newer.to(torch.float64) - older)
    found.squared_old += _squares(older.to(torch.float64))


def _finite(values: torch.Tensor) -> bool:
    least, most = values.aminmax()
    return math.isfinite(least) and math.isfinite(most)


def _amax(values: torch.Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0


def _squares(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))
