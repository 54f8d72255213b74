"""The host side of a histogram: exact counts, the layout of the bins, and estimates of rounding errors."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.numerics.formats import FloatFormat, as_format, round_to, spacing

ROWS, COLUMNS = 256, 8  # exponent field and first three mantissa bits of the magnitude's float32 pattern
BINS = ROWS * COLUMNS
PATTERN_SHIFT = 20  # float32 magnitude pattern to bin: subtract one, then shift right by this
BEYOND_FP32 = 2040  # bin of finite float64 above 2^128; float32 patterns there are NaN, which is counted separately
SERIAL_VERSION = 1


def _edges() -> NDArray[np.float64]:
    patterns = (np.arange(BEYOND_FP32, dtype=np.uint32) << PATTERN_SHIFT).view(np.float32)
    edges = np.append(patterns.astype(np.float64), [2.0**128, math.inf])
    edges.setflags(write=False)
    return edges


EDGES = _edges()  # bin i holds the magnitudes in (EDGES[i], EDGES[i + 1]]; float64 of shape (2042,)


def bin_of(magnitudes: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the bin of each positive finite float64 magnitude, exactly; magnitudes below 2^-149 are in bin 0."""
    return np.searchsorted(EDGES[1:], magnitudes, side="left")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """Exact counts of one or more tensors, on the host.

    `counts` are the nonzero finite elements per bin, int64 of shape (2048,), read-only. `amax` and `amin` are the
    largest and smallest nonzero finite magnitude, exact; None if there is none. If several dtypes were merged,
    `significand_bits` is the largest and `min_spacing` the smallest.
    """

    counts: NDArray[np.int64]
    zeros: int = 0  # of either sign
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    amax: float | None = None
    amin: float | None = None
    significand_bits: int = 0  # of the source dtype, hidden bit included (24 for float32); 0 for nothing
    min_spacing: float = math.inf  # between two values of the source dtype (2^-24 for float16); inf for nothing

    def __post_init__(self) -> None:
        self.counts.setflags(write=False)

    @property
    def finite_nonzero(self) -> int:
        """Number of elements in the bins."""
        return int(self.counts.sum())

    @property
    def numel(self) -> int:
        """Number of all counted elements."""
        return self.finite_nonzero + self.zeros + self.nans + self.pos_infs + self.neg_infs

    def __add__(self, other: Tally) -> Tally:
        return Tally(
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

    def repeated(self, times: int) -> Tally:
        """Return the tally of the same elements, each `times` times."""
        return replace(
            self,
            counts=self.counts * times,
            zeros=self.zeros * times,
            nans=self.nans * times,
            pos_infs=self.pos_infs * times,
            neg_infs=self.neg_infs * times,
        )

    def scaled(self, factor: float) -> Tally:
        """Return the tally of the same elements times a positive factor: exact in its bins for a power of two.

        With another factor a bin extends over two, and moves to that of its largest value. What leaves double precision
        at either end stays in the outermost bin.
        """
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tally) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` turns into an equal tally; floats are hex strings, so none is rounded."""
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
    def from_dict(cls, data: Mapping[str, Any]) -> Tally:
        """Return the tally that `to_dict` wrote; raises UsageError for another version, or contradictory data."""
        version = data.get("version")
        if version != SERIAL_VERSION:
            raise UsageError(f"histogram data have version {version!r}; this ampdoctor reads version {SERIAL_VERSION}")
        counts = _read_counts(data.get("bins"), data.get("counts"))
        tally = cls(
            counts=counts,
            zeros=_read_count(data, "zeros"),
            nans=_read_count(data, "nans"),
            pos_infs=_read_count(data, "pos_infs"),
            neg_infs=_read_count(data, "neg_infs"),
            amax=_read_magnitude(data, "amax"),
            amin=_read_magnitude(data, "amin"),
            significand_bits=_read_count(data, "significand_bits"),
            min_spacing=_read_hex(data, "min_spacing"),
        )
        tally.check()
        return tally

    def check(self) -> None:
        """Raise UsageError for a tally that no tensor has: the extremes must be in the outermost occupied bins."""
        occupied = np.flatnonzero(self.counts)
        expected: list[int] = [] if occupied.size == 0 else [int(occupied[0]), int(occupied[-1])]
        extremes = [v for v in (self.amin, self.amax) if v is not None]
        if bin_of(np.array(extremes)).tolist() != expected or extremes != sorted(extremes):
            raise UsageError("histogram data contradict themselves: the extremes do not lie in the outermost bins")
        if self.finite_nonzero == 1 and self.amin != self.amax:
            raise UsageError("histogram data contradict themselves: one element with two magnitudes")


_LARGEST_COUNT = 2**53  # no real tensor has as many elements, and sums of two stay far below int64's limit


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT


def _read_count(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not _is_count(value):
        raise UsageError(f"histogram data: {key} is {value!r}, not a count")
    return int(value)  # type: ignore[arg-type]  # checked above


def _read_counts(bins: object, counts: object) -> NDArray[np.int64]:
    if not isinstance(bins, Sequence) or not isinstance(counts, Sequence) or len(bins) != len(counts):
        raise UsageError("histogram data: bins and counts are not two lists of one length")
    inside = all(_is_count(b) and b <= BEYOND_FP32 for b in bins) and list(bins) == sorted(set(bins))
    if not inside or not all(_is_count(c) and c > 0 for c in counts):
        raise UsageError("histogram data: bins must ascend from 0 to 2040, each with a positive count")
    result = np.zeros(BINS, dtype=np.int64)
    result[np.array(bins, dtype=np.intp)] = np.array(counts, dtype=np.int64)
    return result


def _read_hex(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    try:
        number = float.fromhex(value)  # type: ignore[arg-type]  # a wrong type is caught below
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise UsageError(f"histogram data: {key} is {value!r}, not a positive number in hexadecimal")
    return number


def _read_magnitude(data: Mapping[str, Any], key: str) -> float | None:
    if data.get(key, "") is None:
        return None
    number = _read_hex(data, key)
    if math.isinf(number):
        raise UsageError(f"histogram data: {key} is not finite")
    return number


# -- estimates from a tally, for any format at any scale: shares below a threshold, and the error of rounding --
#
# Inside a bin, values are assumed to lie evenly on the source dtype's own grid. That is exact for a dtype of up to four
# significand bits, and an estimate for others. The largest and the smallest magnitude are used exactly.

Array = NDArray[np.float64]
_ENUMERABLE_BITS = 11  # up to it (float16, TF32) a bin's at most 128 values are rounded one by one; above, by integral
_ALL_LOST = 2.0**60  # a saturated value that exceeds max by this factor has its own size as error, in float64
_FP32_BITS = 24
_FIRST_BITS = 4  # significand bits that the bin itself fixes: the hidden one and three of the mantissa


@dataclass(frozen=True, slots=True)
class _Grid:
    """The occupied bins, without the two extreme elements."""

    low: Array  # lower edge of each bin, excluded
    step: Array  # distance of the source dtype's values in the bin
    first: Array  # steps from `low` to the first value that can be there
    last: Array  # steps from `low` to the last one
    count: Array  # elements
    points: Array  # the smallest and largest magnitude (one element each), or the only magnitude, or none
    weights: Array  # elements at each of `points`


def _grid(tally: Tally) -> _Grid:
    counts = tally.counts.astype(np.float64)
    points, weights = _points(tally)
    np.subtract.at(counts, bin_of(points), weights)
    bins = np.flatnonzero(counts > 0)
    low, high = EDGES[bins], EDGES[bins + 1].copy()
    high[bins == BEYOND_FP32] = max(points.max(initial=0.0), 2.0**129)
    width = high - low
    step = np.maximum(np.ldexp(width, -max(tally.significand_bits - _FIRST_BITS, 0)), tally.min_spacing)
    step = np.minimum(step, width)  # a coarser grid only meets the bin at its upper edge
    least, most = points.min(initial=math.inf), points.max(initial=0.0)
    first = np.maximum(np.ceil((np.maximum(low, least) - low) / step), 1.0)
    last = np.maximum(np.floor((np.minimum(high, most) - low) / step), first)
    return _Grid(low, step, first, last, counts[bins], points, weights)


def _points(tally: Tally) -> tuple[Array, Array]:
    if tally.amin is None or tally.amax is None:
        return np.empty(0), np.empty(0)
    if tally.amin == tally.amax:
        return np.array([tally.amin]), np.array([float(tally.finite_nonzero)])
    return np.array([tally.amin, tally.amax]), np.ones(2)


def share_at_most(tally: Tally, threshold: float) -> float:
    """Return the share (0 to 1) of nonzero finite magnitudes that are <= threshold; exact if that is a bin's edge."""
    return _share(tally, threshold, inclusive=True)


def share_below(tally: Tally, threshold: float) -> float:
    """Return the share (0 to 1) of nonzero finite magnitudes that are < threshold."""
    return _share(tally, threshold, inclusive=False)


def _share(tally: Tally, threshold: float, *, inclusive: bool) -> float:
    total = tally.finite_nonzero
    if total == 0:
        return 0.0
    grid = _grid(tally)
    position = (threshold - grid.low) / grid.step
    reached = np.floor(position) if inclusive else np.ceil(position) - 1.0
    covered = np.clip(reached - grid.first + 1.0, 0.0, grid.last - grid.first + 1.0) / (grid.last - grid.first + 1.0)
    under = grid.points <= threshold if inclusive else grid.points < threshold
    return float(((grid.count * covered).sum() + grid.weights[under].sum()) / total)


def quantile(tally: Tally, q: float) -> float | None:
    """Return the magnitude that a share `q` of the nonzero finite ones does not exceed; None if there are none."""
    if tally.amin is None or tally.amax is None:
        return None
    if q <= 0.0 or q >= 1.0:
        return tally.amin if q <= 0.0 else tally.amax
    cumulative = np.cumsum(tally.counts)
    wanted = q * cumulative[-1]
    bin_ = int(np.searchsorted(cumulative, wanted, side="left"))
    low = max(EDGES[bin_], tally.amin)
    high = min(EDGES[bin_ + 1], tally.amax)
    before = cumulative[bin_ - 1] if bin_ else 0
    return float(low + (high - low) * (wanted - before) / tally.counts[bin_])


def relative_error(tally: Tally, fmt: FloatFormat, scale: float) -> float:
    """Return the relative L2 error that one rounding of `x * scale` to a format makes; see `Histogram`."""
    if tally.amax is None or tally.amin is None:
        return 0.0
    if tally.amax * scale >= fmt.overflow_at and fmt.overflow_result != "saturate":
        return math.inf
    if (fmt.has_zero and tally.amax * scale <= fmt.flush_at) or tally.amax * scale > fmt.max * _ALL_LOST:
        return 1.0  # everything becomes zero, or max is negligible against the values
    grid = _grid(tally)
    # Squares of values far from 1 leave float64's range, so this power of two is the unit. The bound keeps E8M0's
    # smallest code, which replaces float64 values hundreds of binades below it, inside that range.
    unit = max(math.ldexp(1.0, math.frexp(tally.amax * scale)[1]), fmt.min_subnormal * 2.0**-150)
    points = grid.points * scale
    error = grid.weights @ ((round_to(points, fmt) - points) / unit) ** 2
    power = grid.weights @ (points / unit) ** 2
    measure = _by_value if tally.significand_bits <= _ENUMERABLE_BITS else _by_integral
    bin_error, bin_power = measure(grid, fmt, scale, unit)
    power += grid.count @ bin_power
    return math.sqrt((error + grid.count @ bin_error) / power) if power > 0.0 else math.inf


def bin_costs(fmt: FloatFormat, scale: float) -> tuple[Array, Array]:
    """Mean squared error of rounding, and mean square, of one value of each bin, both of x * scale; float64 (2048,).

    The values are those of a float32 source, dense in the bin; both are zero in bins beyond float32. `scale` is a power
    of two.
    """
    low, high = EDGES[:BEYOND_FP32], EDGES[1 : BEYOND_FP32 + 1]
    steps = 2.0 ** (_FP32_BITS - _FIRST_BITS)
    one = np.ones(BEYOND_FP32)
    grid = _Grid(low, (high - low) / steps, one, one * steps, one, np.empty(0), np.empty(0))
    error, power = np.zeros(BINS), np.zeros(BINS)
    error[:BEYOND_FP32], power[:BEYOND_FP32] = _by_integral(grid, fmt, scale, 1.0)
    return error, power


def _by_value(grid: _Grid, fmt: FloatFormat, scale: float, unit: float) -> tuple[Array, Array]:
    """Mean squared error and mean square per bin, in `unit` squared, by rounding each value of the source."""
    if grid.count.size == 0:
        return np.empty(0), np.empty(0)
    number = grid.first[:, None] + np.arange(int((grid.last - grid.first).max()) + 1)
    inside = number <= grid.last[:, None]
    values = (grid.low[:, None] + number * grid.step[:, None]) * scale
    # points outside the bin may overflow to inf in `fmt`: 0 * inf would be NaN
    errors = np.where(inside, (round_to(values, fmt) - values) / unit, 0.0)
    share = inside / inside.sum(axis=1, keepdims=True)
    return (share * errors**2).sum(axis=1), (share * (values / unit) ** 2).sum(axis=1)


def _by_integral(grid: _Grid, fmt: FloatFormat, scale: float, unit: float) -> tuple[Array, Array]:
    """The same for dense values: the integral of the squared distance to the target's grid.

    Over a whole number of target steps t it is t^2 / 12 per element, the closed form for quantisation noise. In the
    coarse bins near zero, which are a fraction of a step, the antiderivative is taken at the bin's own ends.
    """
    start = (grid.low + (grid.first - 1.0) * grid.step) * scale
    end = (grid.low + grid.last * grid.step) * scale
    binade = np.ldexp(1.0, np.frexp(end)[1] - 1)
    # The target's step changes at a power of two, and rounding turns into clipping at max: at most three parts.
    cuts = [np.clip(binade, start, end), np.clip(np.full_like(end, fmt.max), start, end)]
    ends = np.sort(np.stack([start, *cuts, end]), axis=0)
    total = np.zeros_like(end)
    for a, b in itertools.pairwise(ends):
        step = spacing(0.5 * (a + b), fmt)
        clipped = 0.5 * (a + b) > fmt.max
        total += np.where(clipped, _clipping_integral(a, b, fmt.max, unit), _rounding_integral(a, b, step, fmt, unit))
    mean = total / ((end - start) / unit)
    if math.frexp(scale)[0] == 0.5:  # a power of two maps the source's grid onto itself: a finer target loses nothing
        target = np.where(end > fmt.max, math.inf, spacing(0.5 * (start + end), fmt))
        mean[(target <= grid.step * scale) & (start >= (0.0 if fmt.has_zero else fmt.min_normal))] = 0.0
    a, b = start / unit, end / unit
    return mean, (a * a + a * b + b * b) / 3.0


def _rounding_integral(a: Array, b: Array, step: Array, fmt: FloatFormat, unit: float) -> Array:
    least = 0.0 if fmt.has_zero else 1.0  # without a zero, everything small is rounded up to the first step
    at_a, at_b = np.maximum(np.rint(a / step), least), np.maximum(np.rint(b / step), least)
    off_a, off_b, step = (a - at_a * step) / unit, (b - at_b * step) / unit, step / unit
    result: Array = (at_b - at_a) * step**3 / 12.0 + (off_b**3 - off_a**3) / 3.0
    return result


def _clipping_integral(a: Array, b: Array, limit: float, unit: float) -> Array:
    over_a, over_b = np.maximum(a - limit, 0.0) / unit, np.maximum(b - limit, 0.0) / unit
    result: Array = (over_b**3 - over_a**3) / 3.0
    return result


# -- many histograms at many loss scales: the cost of rounding to a format at each power of two --
#
# A power of two moves a histogram by whole binades, so one table of costs per bin and one matrix product give all
# results. Values count as those of a float32 source, dense in their bin (see the estimates above). `counts` are int64
# of shape (n, 2048), elements per bin (`Histogram.counts`, flat); `exponents` are int64 of shape (k,).

Counts = NDArray[np.int64]
_BINS_PER_BINADE = 8


def flushed_counts(counts: Counts, fmt: FloatFormat | str, exponents: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many elements become zero at each scale 2^e, int64 (n, k); exact for thresholds from 2^-129 on."""
    fmt = as_format(fmt)
    below = np.searchsorted(EDGES, np.ldexp(fmt.flush_at, -exponents), side="left")  # bins up to that upper edge
    cumulative = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), counts.cumsum(axis=1)], axis=1)
    result: NDArray[np.int64] = cumulative[:, below]
    return result


def squared_errors(counts: Counts, fmt: FloatFormat | str, exponents: NDArray[np.int64]) -> Array:
    """The sum of the squared rounding errors at each scale 2^e, in units of the unscaled values; float64 (n, k).

    An overflow counts as clipped; whether there is one depends on the exact maximum.
    """
    table = _error_table(as_format(fmt), tuple(int(e) for e in exponents))
    first, last = _occupied(counts)
    result: Array = counts[:, first:last].astype(np.float64) @ table[first:last]
    return result


def powers(counts: Counts) -> Array:
    """The sum of the squares of the values, float64 of shape (n,)."""
    first, last = _occupied(counts)
    result: Array = counts[:, first:last].astype(np.float64) @ _mean_squares()[first:last]
    return result


def scaled_to_fit(counts: Counts, amax: Array, fmt: FloatFormat | str) -> Array:
    """An 8-bit format's cost if each tensor is scaled by the largest power of two that keeps it below `max`.

    This is per-tensor scaling by the present maximum; recipes that scale by max / amax are less than a binade higher.
    `amax`, float64 (n,), is the largest finite magnitude, 0 if there is none. Returns float64 (n, 3): elements that
    become zero, elements that are subnormal, and the sum of the squared errors in units of the unscaled values.
    """
    fmt = as_format(fmt)
    flushed, subnormal, error = _fit_tables(fmt)
    seen = amax > 0.0
    shift = np.zeros(len(amax), dtype=np.int64)
    # frexp gives m in [0.5, 1): the exponent k with amax 2^k <= max is that of the quotient minus one
    shift[seen] = np.frexp(fmt.max / amax[seen])[1] - 1
    first, last = _occupied(counts)
    bins = np.arange(first, last)[None, :] + _BINS_PER_BINADE * shift[:, None]
    inside = np.clip(bins, 0, len(flushed) - 1)  # a row that is empty there may be shifted past the last bin
    part = counts[:, first:last].astype(np.float64)
    result: Array = np.stack(
        [
            (part * flushed[inside]).sum(axis=1),
            (part * subnormal[inside]).sum(axis=1),
            (part * error[inside]).sum(axis=1) * np.ldexp(1.0, -2 * shift),
        ],
        axis=1,
    )
    return result


def _occupied(counts: Counts) -> tuple[int, int]:
    """The bins outside which every row is empty: tensors fill some 40 of 256 binades."""
    columns = np.flatnonzero(counts.any(axis=0))
    return (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 0)


@functools.cache
def _error_table(fmt: FloatFormat, exponents: tuple[int, ...]) -> Array:
    return np.stack([np.ldexp(bin_costs(fmt, 2.0**e)[0], -2 * e) for e in exponents], axis=1)


@functools.cache
def _mean_squares() -> Array:
    return bin_costs(as_format("fp32"), 1.0)[1]


@functools.cache
def _fit_tables(fmt: FloatFormat) -> tuple[Array, Array, Array]:
    upper = EDGES[1 : BINS + 1]
    flushed = (upper <= fmt.flush_at).astype(np.float64)
    subnormal = (upper <= fmt.min_normal).astype(np.float64) - flushed
    return flushed, subnormal, bin_costs(fmt, 1.0)[0]
