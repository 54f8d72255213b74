"""How far a tensor is from a reference: sums of squares and counts, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        error: Of the squares of got - reference.
        norm: Of the squares of what was got.
        reference: Of the squares of the reference.
        flushed_error: Of the squares of the reference's elements that are not zero where what was got is zero.
        flushed: How many those are.
        nonzero: How many elements of the reference are not zero.
    """

    error: float = 0.0
    norm: float = 0.0
    reference: float = 0.0
    flushed_error: float = 0.0
    flushed: int = 0
    nonzero: int = 0

    @property
    def relative(self) -> float:
        """L2 norm of the difference over the reference's; inf where one is not finite, or only the reference is 0."""
        if self.reference == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = math.sqrt(self.error / self.reference) if self.error >= 0.0 else math.inf
        return ratio if math.isfinite(ratio) else math.inf

    def add(self, got: Tensor | None, reference: Tensor) -> None:
        """Add the elements of two dense tensors of one shape; None is a tensor of zeros.

        Args:
            got: Any floating dtype.
            reference: float32, or float64, in which the sums are then made.
        """
        if got is None:
            for block in _blocks(reference):
                self._add_missing(block)
            return
        for one, other in zip(_blocks(got), _blocks(reference), strict=True):
            self._add(one, other)

    def _add(self, got: Tensor, reference: Tensor) -> None:
        present = int(torch.count_nonzero(reference))
        zero = got == 0
        if present and bool(zero.any()):
            lost = reference.masked_fill(~zero, 0.0)
            flushed = int(torch.count_nonzero(lost))
            self.flushed += flushed
            self.flushed_error += _squares(lost) if flushed else 0.0
        self.nonzero += present
        self.error += _squares(got - reference)
        self.norm += _squares(got)
        self.reference += _squares(reference)

    def _add_missing(self, reference: Tensor) -> None:
        present, size = int(torch.count_nonzero(reference)), _squares(reference)
        self.flushed += present
        self.nonzero += present
        self.flushed_error += size
        self.error += size
        self.reference += size


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """On another device than the CPU each number that is read waits for it: large blocks."""
    flat = tensor.detach().reshape(-1)
    return iter(flat.split(BLOCK if tensor.device.type == "cpu" else BLOCK << 10))


def _squares(values: Tensor) -> float:
    if values.dtype is torch.float32:
        total = float(torch.dot(values, values))
        if EXACT_ENOUGH[0] <= total <= EXACT_ENOUGH[1]:
            return total
    return float(values.double().square_().sum())
