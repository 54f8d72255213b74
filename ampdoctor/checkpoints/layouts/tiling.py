"""Whether the pieces of a tensor fill it: no overlap, no hole."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from ampdoctor.errors import LimitExceededError

MAX_CORNERS = 8_000_000
"""Corners that are counted for one tensor: a million pieces in three dimensions, some seconds."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element in each dimension, and sizes."""


def misfit(shape: tuple[int, ...], boxes: Sequence[Box], name: str) -> str | None:
    """What is wrong with pieces that should fill a tensor, in words; None where they fill it exactly.

    The indicator functions of boxes sum to that of the whole exactly if their signed corners do (a corner's sign is
    the parity of its upper sides: differences in every dimension, which can be summed up again). That takes n steps for
    n pieces where comparing pairs takes n^2.

    Args:
        shape: Sizes of the whole.
        boxes: The pieces; those without elements are ignored.
        name: How a limit names the tensor.

    Raises:
        LimitExceededError: There are more corners than `MAX_CORNERS`.
    """
    if any(not _inside(shape, box) for box in boxes):
        return "a piece lies outside it"
    solid = [box for box in boxes if 0 not in box[1]]
    covered = sum(math.prod(sizes) for _, sizes in solid)
    whole = math.prod(shape)
    if covered != whole:
        return "its pieces leave a hole" if covered < whole else "its pieces overlap"
    cut = [d for d, size in enumerate(shape) if any(sizes[d] != size for _, sizes in solid)]
    if len(cut) > 20 or len(solid) << len(cut) > MAX_CORNERS:
        raise LimitExceededError(f"{name}: corners of the pieces", MAX_CORNERS, len(solid) << min(len(cut), 63))
    corners: Counter[tuple[int, ...]] = Counter()
    for at, sizes in [*solid, ((0,) * len(shape), shape)] if cut else []:
        sign = -1 if sizes == shape else 1
        for upper in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(at[d] + up * sizes[d] for d, up in zip(cut, upper, strict=True))
            corners[corner] += -sign if sum(upper) % 2 else sign
    return "its pieces overlap and leave a hole" if any(corners.values()) else None


def _inside(shape: tuple[int, ...], box: Box) -> bool:
    at, sizes = box
    return len(at) == len(sizes) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(at, sizes, shape, strict=True)
    )
