"""Is anything non-finite? A flag for the cost of one reduction, exact counts, and a closer look."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampdoctor.numerics.elements import E2M1_PAIRS, dense_elements, in_memory_order
from ampdoctor.numerics.unseen import Unseen, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable

_BLOCK = 1 << 16
"""Elements that are counted at a time: with their masks they stay in a processor's cache."""
_NATIVE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


def nonfinite_flag(tensor: Tensor) -> Tensor:
    """Return a 0-dim tensor on the tensor's device that is non-finite if and only if some element is.

    It takes one reduction per tensor (`aminmax` propagates NaN, while `isfinite().all()` writes a mask first) and does
    not wait for the device: collect the flags and read them together. It is hidden from autocast, autograd and every
    trace. A sum would not do: finite values can add up to infinity (a mask of `finfo.min`, fp16 activations).

    Args:
        tensor: Any shape, dtype, layout and device. Integers, booleans, empty and meta tensors are finite. Of a sparse,
            nested, complex, quantised or distributed tensor, the elements that `dense_elements` names are examined.

    Returns:
        float32 (float64 for float64). If finite, the largest element, or 0 if there is none; do not rely on that.
    """
    low, high = extremes(tensor)
    with Unseen(low):
        # high + 0 * low: an infinite low becomes NaN, a finite one leaves high as it is, and nothing can overflow.
        flag = torch.add(high, low, alpha=0)
        return flag if flag.dtype in {torch.float32, torch.float64} else flag.to(torch.float32)


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element as 0-dim tensors on the tensor's device.

    `nonfinite_flag` is made of them, at the same cost and under the same conditions. An element is non-finite if and
    only if one of the two is, and a NaN makes both NaN. They also show the distance to the format's limit.

    Args:
        tensor: As for `nonfinite_flag`.

    Returns:
        In the tensor's own dtype if that has reductions, else in one that holds its elements; both 0 if no element
        could be non-finite.
    """
    with Unseen(tensor):
        return _extremes_of(tensor) if is_plain(tensor) and _is_simple(tensor) else _extremes_of_any(tensor)


def extremes_of_each(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the `extremes` of each tensor, in their order; hiding many small tensors at once halves the time."""
    each = [(tensor, is_plain(tensor)) for tensor in tensors]
    plain = [tensor for tensor, is_one in each if is_one]
    with Unseen(plain[0]) if plain else nullcontext():
        found = iter([_extremes_of(tensor) if _is_simple(tensor) else _extremes_of_any(tensor) for tensor in plain])
    return [next(found) if is_one else extremes(tensor) for tensor, is_one in each]


def _is_simple(tensor: Tensor) -> bool:
    """Whether a plain tensor can be reduced as it is."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg() or tensor.is_meta:
        return False
    return tensor.dtype in _NATIVE and tensor.numel() > 0


def _extremes_of(part: Tensor) -> tuple[Tensor, Tensor]:
    # A reduction over a transposed tensor was 10 times slower than over the same elements as they lie in memory.
    low, high = torch.aminmax(in_memory_order(part))
    return low, high


def _extremes_of_any(tensor: Tensor) -> tuple[Tensor, Tensor]:
    part = tensor if tensor.is_meta else dense_elements(tensor)
    if part.is_meta or not part.is_floating_point() or part.dtype in E2M1_PAIRS or part.numel() == 0:
        none = torch.zeros((), dtype=torch.float32, device="cpu" if part.is_meta else part.device)
        return none, none
    return _extremes_of(_native(part))


def _native(part: Tensor) -> Tensor:
    """Cast float8, which has no reductions, to bfloat16: that holds each value, at half the scratch of float32."""
    return part.to(torch.bfloat16) if part.is_floating_point() and part.dtype not in _NATIVE else part


def nonfinite_counts(tensor: Tensor) -> tuple[int, int, int]:
    """Return the exact numbers of NaN, +Inf and -Inf elements; waits for the device.

    Args:
        tensor: As for `nonfinite_flag`.
    """
    stats = describe(tensor)
    return stats.nans, stats.pos_infs, stats.neg_infs


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """A tensor's statistics as plain values.

    Attributes:
        shape: Its shape; of a nested tensor with ragged dimensions, the shape of its values.
        dtype: Its dtype as torch names it, without "torch.".
        nans: NaN elements.
        pos_infs: +Inf elements.
        neg_infs: -Inf elements.
        finite_min: Smallest finite value, None if nothing is finite. -0.0 and 0.0 are not distinguished.
        finite_max: Largest finite value, None if nothing is finite.
    """

    shape: tuple[int, ...]
    dtype: str
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    finite_min: float | None = None
    finite_max: float | None = None

    @property
    def finite_amax(self) -> float | None:
        """Largest finite magnitude, None if nothing is finite."""
        if self.finite_min is None or self.finite_max is None:
            return None
        return max(abs(self.finite_min), abs(self.finite_max))

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nans + self.pos_infs + self.neg_infs


def describe(tensor: Tensor) -> TensorStats:
    """Return what a trace records about a tensor; waits for the device.

    A finite tensor costs the one reduction of `nonfinite_flag`; only a non-finite one is counted.

    Args:
        tensor: As for `nonfinite_flag`; integers and booleans have a range too. A meta tensor only has a shape.
    """
    with Unseen(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            return TensorStats(shape=tuple(tensor.shape), dtype=dtype)
        part = dense_elements(tensor)
        shape = tuple(part.shape) if tensor.is_nested else tuple(tensor.shape)
        if part.dtype in E2M1_PAIRS or part.numel() == 0:
            return TensorStats(shape=shape, dtype=dtype)
        values = in_memory_order(_native(part))
        low, high = (float(v) for v in torch.aminmax(values))
        if math.isfinite(low) and math.isfinite(high):
            return TensorStats(shape=shape, dtype=dtype, finite_min=low, finite_max=high)
        return _counted(values, shape, dtype)


def _counted(values: Tensor, shape: tuple[int, ...], dtype: str) -> TensorStats:
    """Counts what is not finite, block by block, so that the masks stay in the cache; on a GPU in one piece."""
    counts = [0, 0, 0]
    lows, highs = [], []
    flat = values.reshape(-1)
    for block in flat.split(_BLOCK if flat.device.type == "cpu" else len(flat)):
        wrong = int(torch.count_nonzero(block.isfinite().logical_not_()))
        if wrong:
            above, below = (int(torch.count_nonzero(block == end)) for end in (math.inf, -math.inf))
            counts = [sum(pair) for pair in zip(counts, (wrong - above - below, above, below), strict=True)]
        finite = block[block.isfinite()] if wrong else block
        if finite.numel():
            low, high = torch.aminmax(finite)
            lows.append(float(low))
            highs.append(float(high))
    return TensorStats(
        shape=shape,
        dtype=dtype,
        nans=counts[0],
        pos_infs=counts[1],
        neg_infs=counts[2],
        finite_min=min(lows, default=None),
        finite_max=max(highs, default=None),
    )
