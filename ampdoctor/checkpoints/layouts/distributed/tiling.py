"""Checks that the pieces of a tensor fill it, without overlap or hole."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ampdoctor.errors import LimitExceededError

MAX_COMPARISONS = 6_000_000
"""Maximum number of compared coordinates for one checkpoint, a second or two: a million pieces that are cut in one
dimension, or 250,000 in three."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element in each dimension, and sizes."""


@dataclass(slots=True)
class TilingBudget:
    """How much may still be compared for a checkpoint: a kilobyte can describe a few pieces of many dimensions.

    Attributes:
        left: Number of coordinates.
    """

    left: int = MAX_COMPARISONS

    def spend(self, coordinates: int, name: str) -> None:
        """Spend coordinates.

        Raises:
            LimitExceededError: Not that many are left.
        """
        if coordinates > self.left:
            used = MAX_COMPARISONS - self.left
            raise LimitExceededError(f"{name}: comparisons of pieces", MAX_COMPARISONS, used + coordinates)
        self.left -= coordinates


def misfit(shape: tuple[int, ...], boxes: Sequence[Box], name: str, budget: TilingBudget) -> str | None:
    """Returns what is wrong with pieces that should fill a tensor, in words; None if they fill it exactly.

    Pieces fill a tensor if they lie inside, have its volume together, and do not overlap. A few pieces are compared in
    pairs. For many: the boxes' indicator functions sum to that of the whole exactly if their signed corners do (a
    corner's sign is the parity of its upper sides: differences in every dimension, which can be summed up again). That
    takes n steps for n pieces, instead of n^2 for pairs.

    Args:
        shape: Sizes of the whole tensor.
        boxes: The pieces; those without elements are ignored.
        name: The tensor's name in a limit's error.
        budget: What the checkpoint may still cost.

    Raises:
        LimitExceededError: The budget is used up.
    """
    if any(not _inside(shape, box) for box in boxes):
        return "a piece lies outside it"
    solid = [box for box in boxes if 0 not in box[1]]
    covered = sum(math.prod(sizes) for _, sizes in solid)
    whole = math.prod(shape)
    if covered != whole:
        return "its pieces leave a hole" if covered < whole else "its pieces overlap"
    cut = [d for d, size in enumerate(shape) if any(sizes[d] != size for _, sizes in solid)]
    corners_cost = len(solid) * len(cut) << len(cut)
    pairs_cost = len(solid) * (len(solid) - 1) // 2 * len(cut)
    budget.spend(min(corners_cost, pairs_cost), name)
    if pairs_cost <= corners_cost:
        pairs = itertools.combinations(solid, 2)
        return "its pieces overlap and leave a hole" if any(_overlap(a, b, cut) for a, b in pairs) else None
    corners: Counter[tuple[int, ...]] = Counter()
    for at, sizes in [*solid, ((0,) * len(shape), shape)] if cut else []:
        sign = -1 if sizes == shape else 1
        for upper in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(at[d] + up * sizes[d] for d, up in zip(cut, upper, strict=True))
            corners[corner] += -sign if sum(upper) % 2 else sign
    return "its pieces overlap and leave a hole" if any(corners.values()) else None


def _overlap(one: Box, other: Box, cut: Sequence[int]) -> bool:
    """Do two boxes share an element? Outside the dimensions `cut`, both are as long as the whole."""
    return all(one[0][d] < other[0][d] + other[1][d] and other[0][d] < one[0][d] + one[1][d] for d in cut)


def _inside(shape: tuple[int, ...], box: Box) -> bool:
    at, sizes = box
    return len(at) == len(sizes) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(at, sizes, shape, strict=True)
    )
