"""A mergeable histogram of magnitudes, the source of every numeric figure."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ampdoctor.errors import UsageError
from ampdoctor.numerics import rounding_error
from ampdoctor.numerics.formats import FloatFormat, as_format
from ampdoctor.numerics.rounding_error import BINS, COLUMNS, ROWS, Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from ampdoctor.numerics.counting import DeviceTally


def _of_tally(name: str) -> Any:
    """Returns a property: a number of the host's tally, for which a histogram on a device waits."""
    return property(attrgetter(f"_tally.{name}"))


class Histogram:
    """Counts of magnitudes over 8 exponent bits and 3 mantissa bits, with exact extremes and exact special values.

    Make one with `Histogram.of` and merge with `+` (the result is that of the concatenated tensors). It gives figures
    for any format and any loss scale afterwards. Bins are (lo, hi].

    Counts of a device tensor stay on the device until the first figure is read; `of` and `+` do not wait for it.

    Fractions refer to the nonzero finite elements, and are 0.0 if there are none. `scale` is any positive number;
    figures are those of `x * scale` computed without error, then rounded once to the format, to nearest, ties to even.

    Accuracy: the counts of special values, the extremes, `headroom`, and whether `flushed` and `overflowed` are zero
    are always exact. `flushed` is exact with a power-of-two scale (except for thresholds below 2^-129, which only bf16,
    tf32 and fp32 reach; bins are that wide there). The others assume that values are spread evenly inside a bin: on
    smooth data they are within 4 % of the true figure in the normal range, and within 10 % if a threshold or the
    subnormal zone cuts through a bin.
    """

    __slots__ = ("_device", "_host")

    def __init__(self, tally: Tally | DeviceTally) -> None:
        self._host: Tally | None = None
        self._device: DeviceTally | None = None
        if isinstance(tally, Tally):
            self._host = tally
        else:
            self._device = tally

    @classmethod
    def empty(cls) -> Histogram:
        """Return the histogram of nothing, the neutral element of `+`."""
        return cls(Tally(counts=np.zeros(BINS, dtype=np.int64)))

    @classmethod
    def of(cls, tensor: Tensor) -> Histogram:
        """Count a tensor's elements; raises UsageError for a dtype that is not floating-point, or a meta tensor.

        Any shape, layout and device; float64, float32, bfloat16, float16, a float8 or float4 dtype, or complex (real
        and imaginary parts are elements). Unstored elements of a sparse tensor count as zero.
        """
        # Imported here, so that a saved profile, a plan and a log are read without torch.
        from ampdoctor.numerics.counting import check_countable, device_tally, host_tally
        from ampdoctor.numerics.tensors import SPARSE_LAYOUTS, Unseen, dense_elements

        if tensor.is_meta:
            raise UsageError("a meta tensor has no values to count")
        with Unseen(tensor):
            part = dense_elements(tensor.detach())
            check_countable(part.dtype)
            counted = cls(host_tally(part) if part.device.type == "cpu" else device_tally(part))
            unstored = tensor.numel() - part.numel() if tensor.layout in SPARSE_LAYOUTS else 0
        return counted + cls(Tally(counts=np.zeros(BINS, dtype=np.int64), zeros=unstored)) if unstored else counted

    def __add__(self, other: Histogram) -> Histogram:
        if not isinstance(other, Histogram):
            return NotImplemented
        if self._is_nothing():
            return other
        if other._is_nothing():
            return self
        mine, theirs = self._device, other._device
        if mine is not None and theirs is not None and mine.packed.device == theirs.packed.device:
            return Histogram(mine + theirs)
        return Histogram(self._tally + other._tally)

    def _is_nothing(self) -> bool:
        return self._host is not None and self._host.numel == 0 and self._host.significand_bits == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._tally == other._tally

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def __repr__(self) -> str:
        if self._host is None:
            return "Histogram(on device)"
        return f"Histogram(numel={self.numel}, amin={self.amin}, amax={self.amax})"

    @property
    def _tally(self) -> Tally:
        if self._host is None:
            if self._device is None:
                raise AssertionError("a histogram has its counts on the host or on a device")
            self._host, self._device = self._device.fetch(), None
        return self._host

    @property
    def counts(self) -> NDArray[np.int64]:
        """Nonzero finite elements per bin: int64 of shape (256, 8), read-only; row 255 holds float64 above 2^128."""
        return self._tally.counts.reshape(ROWS, COLUMNS)

    numel: int = _of_tally("numel")  # all elements, special values included
    zeros: int = _of_tally("zeros")  # of either sign
    nans: int = _of_tally("nans")
    pos_infs: int = _of_tally("pos_infs")
    neg_infs: int = _of_tally("neg_infs")
    amax: float | None = _of_tally("amax")  # largest finite magnitude, exact; None without a nonzero finite element
    amin: float | None = _of_tally("amin")  # smallest nonzero finite magnitude, likewise
    significand_bits: int = _of_tally("significand_bits")  # of the source dtype, hidden bit included; 0 for nothing
    min_spacing: float = _of_tally("min_spacing")  # smallest distance of two values of the source dtype; or inf

    def repeated(self, times: int) -> Histogram:
        """Return the histogram of the same elements, each `times` times (at least 1), which a sample represents."""
        if times < 1:
            raise UsageError(f"elements are repeated at least once, not {times} times")
        return Histogram(self._tally.repeated(times))

    def scaled(self, factor: float) -> Histogram:
        """Return the histogram times a positive finite factor: exact for a power of two, else within a bin."""
        return Histogram(self._tally.scaled(_positive(factor)))

    def flushed(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction that becomes zero (in E8M0: the smallest code; see `FloatFormat`)."""
        fmt, scale = as_format(fmt), _positive(scale)
        return rounding_error.share_at_most(self._tally, fmt.flush_at / scale)

    def subnormal(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction between the flush threshold and the smallest normal value: kept with fewer bits.

        Elements that equal the smallest normal value share their bin with the largest subnormal ones.
        """
        fmt, scale = as_format(fmt), _positive(scale)
        if fmt.min_subnormal == fmt.min_normal:
            return 0.0
        below = rounding_error.share_below(self._tally, fmt.min_normal / scale)
        return max(below - rounding_error.share_at_most(self._tally, fmt.flush_at / scale), 0.0)

    def overflowed(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction that the format cannot represent: it becomes Inf or NaN, or is clipped to `max`."""
        fmt, scale = as_format(fmt), _positive(scale)
        tally = self._tally
        if tally.amax is None or tally.amax * scale < fmt.overflow_at:
            return 0.0
        at_least = 1.0 - rounding_error.share_below(tally, fmt.overflow_at / scale)
        return max(at_least, 1.0 / tally.finite_nonzero)  # the largest element is known to overflow

    def relative_error(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the relative L2 error of rounding the nonzero finite elements to a format.

        sqrt(sum (round(x s) - x s)^2 / sum (x s)^2). A target step t costs t^2/12 per element if values lie densely
        (the usual model of quantisation noise; measured 0.96 to 1.02 of direct rounding), x^2 if they flush, and
        nothing if the target is at least as fine as the source dtype: a bf16 weight loses nothing in fp16's normal
        range. Sources of up to 11 bits are rounded value by value. One overflow makes it inf, except in a saturating
        format, where it costs (x - max)^2.
        """
        return rounding_error.relative_error(self._tally, as_format(fmt), _positive(scale))

    def quantile(self, q: float) -> float | None:
        """Return the magnitude not exceeded by a share `q` (0 to 1) of the nonzero finite elements; None without any.

        The error is below one bin (1/8 binade); 0 and 1 give the exact extremes. Raises UsageError for another `q`.
        """
        if not 0.0 <= q <= 1.0:
            raise UsageError(f"a quantile lies between 0 and 1, not at {q}")
        return rounding_error.quantile(self._tally, q)

    def headroom(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return log2(max / (largest magnitude * scale)), exact; negative beyond max, inf without nonzero elements."""
        fmt, scale = as_format(fmt), _positive(scale)
        amax = self._tally.amax
        return math.inf if amax is None else math.log2(fmt.max) - math.log2(amax) - math.log2(scale)

    def to_dict(self) -> dict[str, Any]:
        """Return the compact JSON form: special values, extremes and the occupied bins. `from_dict` restores it."""
        return self._tally.to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """Return the histogram that `to_dict` wrote; raises UsageError for another version, or invalid data."""
        return cls(Tally.from_dict(data))


def _positive(scale: float) -> float:
    if not (scale > 0.0 and math.isfinite(scale)):
        raise UsageError(f"a scale is a positive finite number, not {scale}")
    return float(scale)
