"""A few thousand elements of each tensor, always the same ones, in one buffer on the tensors' device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampdoctor.live.numbers.norms import local
from ampdoctor.numerics.tensors import Unseen, flat

MOST = 4096
"""Elements of a tensor: a share is known within 1.5 percentage points at 95 % (1.96 * sqrt(1/4 / 4096))."""
MOST_TOGETHER = 1 << 22
"""Elements of all tensors of a step: 16 MiB in float32, which a bus carries in a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What stands in a buffer for a tensor.

    Attributes:
        name: Of the tensor.
        dtype: Of its elements; the buffer's is wider.
        elements: Number of its elements: of a shard, of this process's; of a sparse tensor, of the stored ones.
        count: Number of those in the buffer.
    """

    name: str
    dtype: torch.dtype
    elements: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of tensors that are on one device.

    Attributes:
        plan: The tensors, in the buffer's order.
        buffer: One-dimensional, float32, or float64 where one of the tensors is; on the device. A copy.
    """

    plan: tuple[Sampled, ...]
    buffer: Tensor


def sample(named: Sequence[tuple[str, Tensor]]) -> list[Samples]:
    """Returns samples of tensors, by device, without waiting for any device.

    Args:
        named: Name and tensor, as for `norms.local`. The same shapes and strides give the same elements each time.
    """
    most = min(MOST, max(MOST_TOGETHER // max(len(named), 1), 1))
    by_device: dict[torch.device, list[tuple[Sampled, Tensor]]] = {}
    for name, tensor in named:
        elements = local(tensor)
        with Unseen(elements):
            drawn = strided(elements, most)
        row = Sampled(name=name, dtype=elements.dtype, elements=elements.numel(), count=drawn.numel())
        by_device.setdefault(elements.device, []).append((row, drawn))
    return [_joined(rows) for rows in by_device.values()]


def strided(elements: Tensor, most: int) -> Tensor:
    """Returns at most `most` elements, evenly over memory, as a view if the tensor is dense; one-dimensional.

    Args:
        elements: Plain and strided.
        most: At least 1.
    """
    line = flat(elements)
    stride = stride_of(line.numel(), most)
    if stride == 1:
        return line
    return line.as_strided((-(-line.numel() // stride),), (line.stride(0) * stride,), line.storage_offset())


def stride_of(elements: int, most: int) -> int:
    """Returns the least stride that leaves at most `most` of so many elements and has no factor with their number.

    A stride that divides the length of a row would look at a few columns of the matrix alone.
    """
    stride = max(-(-elements // most), 1)
    while math.gcd(stride, elements) > 1:
        stride += 1
    return stride


def cut(plan: Iterable[Sampled], buffer: Tensor) -> list[Tensor]:
    """Returns each tensor's part of a buffer, as views."""
    return list(buffer.split([row.count for row in plan]))


def _joined(rows: Sequence[tuple[Sampled, Tensor]]) -> Samples:
    wide = torch.float64 if any(row.dtype == torch.float64 for row, _ in rows) else torch.float32
    with Unseen(rows[0][1]):
        buffer = torch.cat([drawn.to(wide) for _, drawn in rows])
    return Samples(plan=tuple(row for row, _ in rows), buffer=buffer)
