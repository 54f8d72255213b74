"""How accumulation and fp16 reductions shift the scales that serve a run, in binades (numbers of log2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ampdoctor.errors import UsageError

Division = Literal["before", "after", "split"]
"""When a reduction over n ranks divides by n: before the sum (DDP's fp16_compress_hook, prescale_gradients), after it
(DeepSpeed's default), or about sqrt(n) on each side (FSDP1, FSDP2 with reduce_dtype=fp16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """By how many binades the ends of the interval of serving scales move.

    Attributes:
        lowest: Shift of the smallest scale at which little flushes.
        highest: Shift of the largest scale at which nothing overflows.
    """

    lowest: float = 0.0
    highest: float = 0.0

    def __add__(self, other: Shift) -> Shift:
        return Shift(lowest=self.lowest + other.lowest, highest=self.highest + other.highest)


def accumulation_shift(before: int, after: int, *, loss_divided: bool = True, half_gradients: bool = False) -> Shift:
    """Returns the shift by another number of micro-batches per step.

    A loss divided by A makes every half intermediate smaller by A: both ends move by log2 of the change, and so should
    the scale. A summed loss moves nothing. The `.grad` of fp16 parameters is summed in fp16, which in the worst case
    lowers the upper end by log2 A.

    Args:
        before: Micro-batches per step when the gradients were measured.
        after: Micro-batches per step when the scale will be used.
        loss_divided: The loss is divided by their number (DeepSpeed, accelerate, Lightning).
        half_gradients: Parameters, and therefore the sums in `.grad`, are fp16.

    Raises:
        UsageError: A number below 1.
    """
    change = _log2_ratio(after, before)
    moved = change if loss_divided else 0.0
    return Shift(lowest=moved, highest=moved - (change if half_gradients else 0.0))


def reduction_shift(ranks: int, division: Division) -> Shift:
    """Returns the shift by an all-reduce in fp16; one in fp32 or bf16 moves nothing.

    What divides after the sum lets it grow by as much in the worst case; what divides before it flushes as much more.

    Args:
        ranks: n, the number of ranks over which gradients are averaged.
        division: When the reduction divides by n.

    Raises:
        UsageError: Fewer than 1 rank.
    """
    before, after = divisors(ranks, division)
    return Shift(lowest=math.log2(before), highest=0.0 - math.log2(after))


def divisors(ranks: int, division: Division) -> tuple[int, float]:
    """Returns by what a reduction divides before its sum, and after it.

    FSDP's first divisor doubles, from 1, as long as it divides n and is below what is left (torch's
    `DefaultState._get_gradient_predivide_factor`): both are about sqrt(n) for a power of two, and far from it where n
    has few factors of 2.

    Args:
        ranks: n.
        division: When.

    Raises:
        UsageError: Fewer than 1 rank.
    """
    if ranks < 1:
        raise UsageError(f"counts of ranks, micro-batches and elements start at 1, not {ranks}")
    if division == "before":
        return ranks, 1.0
    if division == "after":
        return 1, float(ranks)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


def _log2_ratio(after: int, before: int) -> float:
    if after < 1 or before < 1:
        raise UsageError(f"counts of ranks, micro-batches and elements start at 1, not {min(after, before)}")
    return math.log2(after / before)
