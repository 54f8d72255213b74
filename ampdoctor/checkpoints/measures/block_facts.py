"""Facts about blocks of a tensor: extremes and non-finite values exactly, magnitudes from a sample."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ampdoctor.numerics import Histogram

FULLY_COUNTED = 1 << 20
"""Up to this many elements, each is sorted by magnitude. Beyond, a sample of at least about that many is sorted: a
share of 1 % then has a standard error of 0.01 % if the elements are independent, and the scan reads at memory speed."""
MOST_SPARSE = 16
"""At least one element in this many is counted, however large the tensor is."""
RUN = 64
"""Neighbours that are counted together: few enough that thousands of parts of a matrix of 10,000 rows are in the
sample, and enough to fill cache lines."""


@dataclass(slots=True)
class BlockFacts:
    """Facts about the blocks of one tensor so far.

    Attributes:
        histogram: Magnitudes of the counted elements.
        low, high: Smallest and largest finite element, exact.
        examined: Number of all elements.
        nans, pos_infs, neg_infs: Exact counts.
        negatives: Number of elements below zero, exact; 0 unless asked for.
        at_max: Number of elements whose magnitude is the format's largest number, exact.
    """

    histogram: Histogram = field(default_factory=Histogram.empty)
    low: float = math.inf
    high: float = -math.inf
    examined: int = 0
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    negatives: int = 0
    at_max: int = 0

    @property
    def constant(self) -> float | None:
        """The value of every element; None if they differ, are not finite, or if there is only one."""
        whole = self.examined > 1 and not (self.nans or self.pos_infs or self.neg_infs)
        return self.low if whole and self.low == self.high else None

    def merge(self, other: BlockFacts) -> None:
        """Add the facts about another block."""
        self.histogram += other.histogram
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.examined += other.examined
        self.nans += other.nans
        self.pos_infs += other.pos_infs
        self.neg_infs += other.neg_infs
        self.negatives += other.negatives
        self.at_max += other.at_max

    def with_extremes(self, dtype: torch.dtype) -> Histogram:
        """Returns the histogram with the tensor's extremes: a sample may miss the one that overflows in a cast."""
        return self.histogram + self._extremes(dtype)

    def of_all(self, dtype: torch.dtype) -> Histogram:
        """Returns the histogram as if all elements had been counted: each counted one stands for its share."""
        counted = self.histogram.numel
        every = self.histogram.repeated(round(self.examined / counted)) if counted else self.histogram
        return every + self._extremes(dtype)

    def _extremes(self, dtype: torch.dtype) -> Histogram:
        if self.low > self.high or self.histogram.numel >= self.examined:
            return Histogram.empty()
        plain = torch.view_as_real(torch.empty((), dtype=dtype)).dtype if dtype.is_complex else dtype
        return Histogram.of(torch.tensor([self.low, self.high], dtype=plain))


def one_in_of(elements: int) -> int:
    """Returns among how many elements of a tensor of this size one is counted."""
    return max(1, min(MOST_SPARSE, elements // FULLY_COUNTED))


def examine(
    blocks: Iterable[tuple[int, torch.Tensor]], one_in: int, tensor: int, *, never_negative: bool = False
) -> BlockFacts:
    """Examine blocks of one tensor.

    Args:
        blocks: Numbers of blocks in it, and their elements, 1-D, floating-point or complex; none is kept.
        one_in: One among this many elements is counted.
        tensor: The tensor's number, which chooses the sample together with the block's.
        never_negative: Count the elements below zero.
    """
    facts = BlockFacts()
    sampled: list[torch.Tensor] = []
    for number, block in blocks:
        values = torch.view_as_real(block).flatten() if block.dtype.is_complex else block
        if not values.numel():
            continue
        few = values.dtype.itemsize == 1  # values that an 8-bit format has: all elements are counted
        counted = values if few else sample(values, one_in, (tensor, number))
        if counted is values:
            facts.histogram += Histogram.of(values)
        else:
            sampled.append(counted)
        _examine_exactly(values, facts, torch.finfo(block.dtype).max, never_negative=never_negative)
    if sampled:  # counted together: a call takes longer than a block's share of a large tensor
        facts.histogram += Histogram.of(torch.cat(sampled))
    return facts


def sample(values: torch.Tensor, one_in: int, place: tuple[int, int]) -> torch.Tensor:
    """Returns one run of neighbours from each group of `one_in` runs, chosen by a fixed pseudo-random rule.

    The runs are spread over the whole block, so that no part of a tensor is left out, and their distance is not fixed,
    so that no structure (heads, experts, rows) falls into step with it. What follows the last full group is left out.
    """
    groups = values.numel() // (RUN * one_in)
    if one_in == 1 or groups == 0:
        return values
    seed = (place[0] * 0x9E3779B1 + place[1] * 0x85EBCA77) % (1 << 62)
    chosen = torch.randint(one_in, (groups,), generator=torch.Generator().manual_seed(seed))
    chosen += torch.arange(groups) * one_in
    return values[: groups * one_in * RUN].view(-1, RUN).index_select(0, chosen).flatten()


def _examine_exactly(values: torch.Tensor, facts: BlockFacts, largest: float, *, never_negative: bool) -> None:
    """Add what is exact about a block to the facts; `largest` is its format's largest number."""
    facts.examined += values.numel()
    if values.dtype.itemsize == 1:  # 8-bit formats lack reductions
        values = values.to(torch.float32)
    low, high = (float(v) for v in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        facts.nans += int(values.isnan().sum())
        facts.pos_infs += int((values == math.inf).sum())
        facts.neg_infs += int((values == -math.inf).sum())
        finite = values[values.isfinite()]
        low, high = (float(finite.amin()), float(finite.amax())) if finite.numel() else (math.inf, -math.inf)
    if largest in {high, -low}:
        facts.at_max += int((values.abs() == largest).sum())
    if never_negative and low < 0:
        facts.negatives += int(((values < 0) & (values > -math.inf)).sum())
    facts.low, facts.high = min(facts.low, low), max(facts.high, high)
