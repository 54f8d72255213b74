"""How far a tensor is from a reference: sums of squares and counts, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements at a time: with intermediate results they stay in the cache."""
EXACT_ENOUGH = (2.0**-90, 2.0**120)
"""A sum of a block's fp32 squares between these has lost nothing to speak of: no square overflowed, and those below
2^-126, which may count as 0, are together at most 2^-110, a millionth of it."""


@dataclass(slots=True)
class Distance:
    """Sums over all pairs of elements that were added.

    Attributes:
        least: Below which magnitude of the reference a flushed element counts as `below`.
        error: Of the squares of got - reference.
        norm: Of the squares of what was got.
        reference: Of the squares of the reference.
        flushed_error: Of the squares of the reference's elements that are not zero where what was got is zero.
        flushed: How many those are.
        below: How many of those are smaller than `least`.
        nonzero: How many elements of the reference are not zero.
    """

    least: float = 0.0
    error: float = 0.0
    norm: float = 0.0
    reference: float = 0.0
    flushed_error: float = 0.0
    flushed: int = 0
    below: int = 0
    nonzero: int = 0

    @property
    def relative(self) -> float:
        """L2 norm of the difference over the reference's; inf where one is not finite, or only the reference is 0."""
        if self.reference == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = math.sqrt(self.error / self.reference) if self.error >= 0.0 else math.inf
        return ratio if math.isfinite(ratio) else math.inf

    def add(self, got: Tensor | None, reference: Tensor, *, scale: float = 1.0) -> None:
        """Add the elements of two dense tensors of one shape; None is a tensor of zeros.

        Args:
            got: Any floating dtype.
            reference: float32, or float64, in which the sums are then made.
            scale: What was got is divided by it, in the reference's format.
        """
        if got is None:
            for block in blocks(reference):
                self._add_missing(block)
            return
        for one, other in zip(blocks(got), blocks(reference), strict=True):
            self._add(one, other, scale)

    def _add(self, got: Tensor, reference: Tensor, scale: float) -> None:
        present = int(torch.count_nonzero(reference))
        zero = got == 0
        if present and bool(zero.any()):
            lost = reference.masked_fill(~zero, 0.0)
            flushed = int(torch.count_nonzero(lost))
            self.flushed += flushed
            self.flushed_error += squares(lost) if flushed else 0.0
            if flushed and self.least:
                self.below += int(torch.count_nonzero(lost.abs() < self.least)) - (lost.numel() - flushed)
        self.nonzero += present
        if scale != 1.0:
            got = got.to(reference.dtype) / scale
        self.error += squares(got - reference)
        self.norm += squares(got)
        self.reference += squares(reference)

    def _add_missing(self, reference: Tensor) -> None:
        present, size = int(torch.count_nonzero(reference)), squares(reference)
        self.flushed += present
        self.nonzero += present
        self.flushed_error += size
        self.error += size
        self.reference += size


def together(distances: Iterable[Distance]) -> Distance:
    """Returns the distance of all tensors from all references."""
    total = Distance()
    for one in distances:
        total.error += one.error
        total.norm += one.norm
        total.reference += one.reference
        total.flushed_error += one.flushed_error
        total.flushed += one.flushed
        total.below += one.below
        total.nonzero += one.nonzero
    return total


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor's elements, `BLOCK` at a time.

    On another device than the CPU each number that is read waits for it: large blocks.
    """
    flat = tensor.detach().reshape(-1)
    return iter(flat.split(BLOCK if tensor.device.type == "cpu" else BLOCK << 10))


def squares(values: Tensor) -> float:
    """Returns the sum of the squares of a block's elements; not finite where one is not."""
    if values.dtype is torch.float32:
        total = float(torch.dot(values, values))
        if EXACT_ENOUGH[0] <= total <= EXACT_ENOUGH[1]:
            return total
    return float(values.double().square_().sum())
