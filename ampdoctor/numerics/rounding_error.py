"""The bins of a histogram, and what rounding to a format costs in each."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics.formats import FloatFormat, as_format, round_to, spacing

ROWS, COLUMNS = 256, 8  # exponent field and first three mantissa bits of the magnitude's float32 pattern
BINS = ROWS * COLUMNS
PATTERN_SHIFT = 20  # float32 magnitude pattern to bin: subtract one, then shift right by this
BEYOND_FP32 = 2040  # bin of finite float64 above 2^128; float32 patterns there are NaN, which is counted separately


def _edges() -> NDArray[np.float64]:
    patterns = (np.arange(BEYOND_FP32, dtype=np.uint32) << PATTERN_SHIFT).view(np.float32)
    edges = np.append(patterns.astype(np.float64), [2.0**128, math.inf])
    edges.setflags(write=False)
    return edges


EDGES = _edges()  # bin i holds the magnitudes in (EDGES[i], EDGES[i + 1]]; float64 of shape (2042,)


def bin_of(magnitudes: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the bin of each positive finite float64 magnitude, exactly; magnitudes below 2^-149 are in bin 0."""
    return np.searchsorted(EDGES[1:], magnitudes, side="left")


# -- what rounding costs, in one bin: values are assumed to lie evenly on the source dtype's own grid --
#
# That is exact for a dtype of up to four significand bits, and an estimate for others.

Array = NDArray[np.float64]
_FP32_BITS = 24
FIRST_BITS = 4  # significand bits that the bin itself fixes: the hidden one and three of the mantissa


@dataclass(frozen=True, slots=True)
class Grid:
    """The occupied bins, without the two extreme elements."""

    low: Array  # lower edge of each bin, excluded
    step: Array  # distance of the source dtype's values in the bin
    first: Array  # steps from `low` to the first value that can be there
    last: Array  # steps from `low` to the last one
    count: Array  # elements
    points: Array  # the smallest and largest magnitude (one element each), or the only magnitude, or none
    weights: Array  # elements at each of `points`


def bin_costs(fmt: FloatFormat, scale: float) -> tuple[Array, Array]:
    """Mean squared error of rounding, and mean square, of one value of each bin, both of x * scale; float64 (2048,).

    The values are those of a float32 source, dense in the bin; both are zero in bins beyond float32. `scale` is a power
    of two.
    """
    low, high = EDGES[:BEYOND_FP32], EDGES[1 : BEYOND_FP32 + 1]
    steps = 2.0 ** (_FP32_BITS - FIRST_BITS)
    one = np.ones(BEYOND_FP32)
    grid = Grid(low, (high - low) / steps, one, one * steps, one, np.empty(0), np.empty(0))
    error, power = np.zeros(BINS), np.zeros(BINS)
    error[:BEYOND_FP32], power[:BEYOND_FP32] = mean_by_integral(grid, fmt, scale, 1.0)
    return error, power


def mean_by_value(grid: Grid, fmt: FloatFormat, scale: float, unit: float) -> tuple[Array, Array]:
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


def mean_by_integral(grid: Grid, fmt: FloatFormat, scale: float, unit: float) -> tuple[Array, Array]:
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
        over_a, over_b = np.maximum(a - fmt.max, 0.0) / unit, np.maximum(b - fmt.max, 0.0) / unit
        total += np.where(clipped, (over_b**3 - over_a**3) / 3.0, _rounding_integral(a, b, step, unit))
    mean = total / ((end - start) / unit)
    if math.frexp(scale)[0] == 0.5:  # a power of two maps the source's grid onto itself: a finer target loses nothing
        target = np.where(end > fmt.max, math.inf, spacing(0.5 * (start + end), fmt))
        mean[target <= grid.step * scale] = 0.0
    a, b = start / unit, end / unit
    return mean, (a * a + a * b + b * b) / 3.0


def _rounding_integral(a: Array, b: Array, step: Array, unit: float) -> Array:
    at_a, at_b = np.rint(a / step), np.rint(b / step)
    off_a, off_b, step = (a - at_a * step) / unit, (b - at_b * step) / unit, step / unit
    result: Array = (at_b - at_a) * step**3 / 12.0 + (off_b**3 - off_a**3) / 3.0
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
