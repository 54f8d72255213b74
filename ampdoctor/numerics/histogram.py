"""A mergeable histogram of magnitudes, the source of every numeric figure."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.numerics.formats import FloatFormat, as_format, round_to
from ampdoctor.numerics.rounding_error import (
    BEYOND_FP32,
    BINS,
    EDGES,
    FIRST_BITS,
    Array,
    Grid,
    bin_of,
    mean_by_integral,
    mean_by_value,
)

SERIAL_VERSION = 1
_ENUMERABLE_BITS = 11  # up to it (float16) a bin's at most 128 values are rounded one by one; above, by integral
_ALL_LOST = 2.0**60  # a saturated value that exceeds max by this factor has its own size as error, in float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Histogram:
    """Counts of magnitudes over 8 exponent bits and 3 mantissa bits, with exact extremes and exact special values.

    Make one with `counting.count` and merge with `+` (the result is that of the concatenated tensors). It gives figures
    for any format and any loss scale afterwards. Bins are (lo, hi]. If several dtypes were merged, `significand_bits`
    is the largest and `min_spacing` the smallest.

    Fractions refer to the nonzero finite elements, and are 0.0 if there are none. `scale` is any positive number;
    figures are those of `x * scale` computed without error, then rounded once to the format, to nearest, ties to even.

    Accuracy: the counts of special values, the extremes, `headroom`, and whether `flushed` and `overflowed` are zero
    are always exact. `flushed` is exact with a power-of-two scale (except for thresholds below 2^-129, which only bf16
    and fp32 reach; bins are that wide there). The others assume that values are spread evenly inside a bin: on
    smooth data they are within 4 % of the true figure in the normal range, and within 10 % if a threshold or the
    subnormal zone cuts through a bin.
    """

    counts: NDArray[np.int64]  # nonzero finite elements per bin, of shape (2048,), read-only
    zeros: int = 0  # of either sign
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    amax: float | None = None  # largest finite magnitude, exact; None without a nonzero finite element
    amin: float | None = None  # smallest nonzero finite magnitude, likewise
    significand_bits: int = 0  # of the source dtype, hidden bit included (24 for float32); 0 for nothing
    min_spacing: float = math.inf  # between two values of the source dtype (2^-24 for float16); inf for nothing

    def __post_init__(self) -> None:
        self.counts.setflags(write=False)

    @classmethod
    def empty(cls, *, zeros: int = 0) -> Histogram:
        """Return the histogram of nothing but zeros; without any, the neutral element of `+`."""
        return cls(counts=np.zeros(BINS, dtype=np.int64), zeros=zeros)

    @property
    def finite_nonzero(self) -> int:
        """Number of elements in the bins."""
        return int(self.counts.sum())

    @property
    def numel(self) -> int:
        """Number of all counted elements, special values included."""
        return self.finite_nonzero + self.zeros + self.nans + self.pos_infs + self.neg_infs

    def __add__(self, other: Histogram) -> Histogram:
        if not isinstance(other, Histogram):
            return NotImplemented
        return Histogram(
            counts=self.counts + other.counts,
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            pos_infs=self.pos_infs + other.pos_infs,
            neg_infs=self.neg_infs + other.neg_infs,
            amax=max((v for v in (self.amax, other.amax) if v is not None), default=None),
            amin=min((v for v in (self.amin, other.amin) if v is not None), default=None),
            significand_bits=max(self.significand_bits, other.significand_bits),
            min_spacing=min(self.min_spacing, other.min_spacing),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def repeated(self, times: int) -> Histogram:
        """Return the histogram of the same elements, each `times` times (at least 1), which a sample represents."""
        if times < 1:
            raise UsageError(f"elements are repeated at least once, not {times} times")
        return replace(
            self,
            counts=self.counts * times,
            zeros=self.zeros * times,
            nans=self.nans * times,
            pos_infs=self.pos_infs * times,
            neg_infs=self.neg_infs * times,
        )

    def scaled(self, factor: float) -> Histogram:
        """Return the histogram times a positive finite factor: exact for a power of two, else within a bin.

        With another factor a bin extends over two, and moves to that of its largest value. What leaves double precision
        at either end stays in the outermost bin.
        """
        factor = _positive(factor)
        if factor == 1.0 or self.amin is None or self.amax is None:
            return self
        lowest, highest = (min(max(v * factor, 5e-324), sys.float_info.max) for v in (self.amin, self.amax))
        occupied = np.flatnonzero(self.counts)
        with np.errstate(over="ignore"):
            largest = np.clip(EDGES[occupied + 1] * factor, lowest, highest)
        largest[0], largest[-1] = lowest, highest
        counts = np.zeros_like(self.counts)
        np.add.at(counts, bin_of(largest), self.counts[occupied])
        if self.finite_nonzero > 1 and len(occupied) == 1:  # one bin became two: both ends are occupied
            ends = bin_of(np.array([lowest, highest]))
            counts[:] = 0
            counts[ends[0]] += 1
            counts[ends[1]] += self.finite_nonzero - 1
        return replace(
            self, counts=counts, amin=lowest, amax=highest, min_spacing=max(self.min_spacing * factor, 5e-324)
        )

    def flushed(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction that becomes zero."""
        return self._share(as_format(fmt).flush_at / _positive(scale), inclusive=True)

    def subnormal(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction between the flush threshold and the smallest normal value: kept with fewer bits.

        Elements that equal the smallest normal value share their bin with the largest subnormal ones.
        """
        fmt, scale = as_format(fmt), _positive(scale)
        return max(self._share(fmt.min_normal / scale) - self.flushed(fmt, scale), 0.0)

    def overflowed(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the fraction that the format cannot represent: it becomes Inf or NaN, or is clipped to `max`."""
        fmt, scale = as_format(fmt), _positive(scale)
        if self.amax is None or self.amax * scale < fmt.overflow_at:
            return 0.0
        at_least = 1.0 - self._share(fmt.overflow_at / scale)
        return max(at_least, 1.0 / self.finite_nonzero)  # the largest element is known to overflow

    def relative_error(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return the relative L2 error of rounding the nonzero finite elements to a format.

        sqrt(sum (round(x s) - x s)^2 / sum (x s)^2). A target step t costs t^2/12 per element if values lie densely
        (the usual model of quantisation noise; measured 0.96 to 1.02 of direct rounding), x^2 if they flush, and
        nothing if the target is at least as fine as the source dtype: a bf16 weight loses nothing in fp16's normal
        range. Sources of up to 11 bits are rounded value by value. One overflow makes it inf, except in a saturating
        format, where it costs (x - max)^2.
        """
        fmt, scale = as_format(fmt), _positive(scale)
        if self.amax is None or self.amin is None:
            return 0.0
        if self.amax * scale >= fmt.overflow_at and fmt.overflow_result != "saturate":
            return math.inf
        if self.amax * scale <= fmt.flush_at or self.amax * scale > fmt.max * _ALL_LOST:
            return 1.0  # everything becomes zero, or max is negligible against the values
        grid = self._grid()
        # Squares of values far from 1 leave float64's range, so this power of two is the unit.
        unit = math.ldexp(1.0, math.frexp(self.amax * scale)[1])
        points = grid.points * scale
        error = grid.weights @ ((round_to(points, fmt) - points) / unit) ** 2
        power = grid.weights @ (points / unit) ** 2
        mean = mean_by_value if self.significand_bits <= _ENUMERABLE_BITS else mean_by_integral
        bin_error, bin_power = mean(grid, fmt, scale, unit)
        power += grid.count @ bin_power
        return math.sqrt((error + grid.count @ bin_error) / power) if power > 0.0 else math.inf

    def quantile(self, q: float) -> float | None:
        """Return the magnitude not exceeded by a share `q` (0 to 1) of the nonzero finite elements; None without any.

        The error is below one bin (1/8 binade); 0 and 1 give the exact extremes. Raises UsageError for another `q`.
        """
        if not 0.0 <= q <= 1.0:
            raise UsageError(f"a quantile lies between 0 and 1, not at {q}")
        if self.amin is None or self.amax is None:
            return None
        if q in (0.0, 1.0):
            return self.amax if q else self.amin
        cumulative = np.cumsum(self.counts)
        wanted = q * cumulative[-1]
        bin_ = int(np.searchsorted(cumulative, wanted, side="left"))
        low = max(EDGES[bin_], self.amin)
        high = min(EDGES[bin_ + 1], self.amax)
        before = cumulative[bin_ - 1] if bin_ else 0
        return float(low + (high - low) * (wanted - before) / self.counts[bin_])

    def headroom(self, fmt: FloatFormat | str, scale: float = 1.0) -> float:
        """Return log2(max / (largest magnitude * scale)), exact; negative beyond max, inf without nonzero elements."""
        fmt, scale = as_format(fmt), _positive(scale)
        return math.inf if self.amax is None else math.log2(fmt.max) - math.log2(self.amax) - math.log2(scale)

    def _share(self, threshold: float, *, inclusive: bool = False) -> float:
        """The fraction of magnitudes that are < threshold, or <= threshold; exact if that is a bin's edge."""
        total = self.finite_nonzero
        if total == 0:
            return 0.0
        grid = self._grid()
        position = (threshold - grid.low) / grid.step
        reached = np.floor(position) if inclusive else np.ceil(position) - 1.0
        possible = grid.last - grid.first + 1.0
        covered = np.clip(reached - grid.first + 1.0, 0.0, possible) / possible
        under = grid.points <= threshold if inclusive else grid.points < threshold
        return float(((grid.count * covered).sum() + grid.weights[under].sum()) / total)

    def _grid(self) -> Grid:
        counts = self.counts.astype(np.float64)
        points, weights = self._points()
        np.subtract.at(counts, bin_of(points), weights)
        bins = np.flatnonzero(counts > 0)
        low, high = EDGES[bins], EDGES[bins + 1].copy()
        high[bins == BEYOND_FP32] = max(points.max(initial=0.0), 2.0**129)
        width = high - low
        step = np.maximum(np.ldexp(width, -max(self.significand_bits - FIRST_BITS, 0)), self.min_spacing)
        step = np.minimum(step, width)  # a coarser grid only meets the bin at its upper edge
        least, most = points.min(initial=math.inf), points.max(initial=0.0)
        first = np.maximum(np.ceil((np.maximum(low, least) - low) / step), 1.0)
        last = np.maximum(np.floor((np.minimum(high, most) - low) / step), first)
        return Grid(low, step, first, last, counts[bins], points, weights)

    def _points(self) -> tuple[Array, Array]:
        """Return the exact magnitudes, and how many elements each counts for."""
        if self.amin is None or self.amax is None:
            return np.empty(0), np.empty(0)
        if self.amin == self.amax:
            return np.array([self.amin]), np.array([float(self.finite_nonzero)])
        return np.array([self.amin, self.amax]), np.ones(2)

    def to_dict(self) -> dict[str, Any]:
        """Return the compact JSON form, which `from_dict` restores; floats are hex strings, so none is rounded."""
        occupied = np.flatnonzero(self.counts)
        return {
            "version": SERIAL_VERSION,
            "zeros": self.zeros,
            "nans": self.nans,
            "pos_infs": self.pos_infs,
            "neg_infs": self.neg_infs,
            "amax": None if self.amax is None else self.amax.hex(),
            "amin": None if self.amin is None else self.amin.hex(),
            "significand_bits": self.significand_bits,
            "min_spacing": self.min_spacing.hex(),
            "bins": occupied.tolist(),
            "counts": self.counts[occupied].tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """Return the histogram that `to_dict` wrote; raises UsageError for another version, or invalid data."""
        version = data.get("version")
        if version != SERIAL_VERSION:
            raise UsageError(f"histogram data have version {version!r}; this ampdoctor reads version {SERIAL_VERSION}")
        bins: Any = data.get("bins")
        amounts: Any = data.get("counts")
        inside = _are_counts(bins) and list(bins) == sorted(set(bins)) and max(bins, default=0) <= BEYOND_FP32
        if not (inside and _are_counts(amounts) and len(bins) == len(amounts) and 0 not in amounts):
            raise UsageError("histogram data: bins must ascend from 0 to 2040, each with a positive count")
        whole: Any = {key: data.get(key) for key in ("zeros", "nans", "pos_infs", "neg_infs", "significand_bits")}
        if not _are_counts([*whole.values()]):
            raise UsageError(f"histogram data: {whole} are not counts")
        counts = np.zeros(BINS, dtype=np.int64)
        counts[np.array(bins, dtype=np.intp)] = amounts
        amax, amin = (None if data.get(key, "") is None else _read_hex(data, key) for key in ("amax", "amin"))
        made = cls(counts=counts, amax=amax, amin=amin, min_spacing=_read_hex(data, "min_spacing"), **whole)
        occupied = np.flatnonzero(made.counts)
        expected: list[int] = [] if occupied.size == 0 else [int(occupied[0]), int(occupied[-1])]
        extremes = [v for v in (made.amin, made.amax) if v is not None]
        in_order = extremes == sorted(extremes) and math.inf not in extremes
        if bin_of(np.array(extremes)).tolist() != expected or not in_order:
            raise UsageError("histogram data contradict themselves: the extremes do not lie in the outermost bins")
        if made.finite_nonzero == 1 and made.amin != made.amax:
            raise UsageError("histogram data contradict themselves: one element with two magnitudes")
        return made


_LARGEST_COUNT = 2**53  # no real tensor has as many elements, and sums of two stay far below int64's limit


def _positive(scale: float) -> float:
    if not (scale > 0.0 and math.isfinite(scale)):
        raise UsageError(f"a scale is a positive finite number, not {scale}")
    return float(scale)


def _are_counts(values: Any) -> bool:
    whole = isinstance(values, list | tuple) and all(type(value) is int for value in values)
    return whole and all(0 <= value <= _LARGEST_COUNT for value in values)


def _read_hex(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    try:
        number = float.fromhex(value)  # type: ignore[arg-type]  # a wrong type is caught below
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise UsageError(f"histogram data: {key} is {value!r}, not a positive number in hexadecimal")
    return number
