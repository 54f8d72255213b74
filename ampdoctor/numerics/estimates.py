"""Estimates from a tally, for any format at any scale: shares below a threshold, and the error of rounding.

Inside a bin, values are assumed to lie evenly on the source dtype's own grid. That is exact for a dtype of up to four
significand bits, and an estimate for others. The largest and the smallest magnitude are known exactly and enter as
they are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics.formats import FloatFormat, round_to, spacing
from ampdoctor.numerics.tally import BEYOND_FP32, BINS, EDGES, Tally, bin_of

Array = NDArray[np.float64]

_ENUMERABLE_BITS = 11
"""Up to this precision (float16, TF32) a bin's values, at most 128, are rounded one by one; above, by an integral."""
_ALL_LOST = 2.0**60
"""A saturated value that exceeds max by this factor has its own size as error, in float64."""
_FP32_BITS = 24
_FIRST_BITS = 4
"""Significand bits that the bin itself fixes: the hidden one and three of the mantissa."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """The occupied bins, without the two extreme elements.

    Attributes:
        low: Lower edge of each bin, excluded.
        step: Distance of the source dtype's values in the bin.
        first: Number of steps from `low` to the first value that can be there.
        last: Number of steps from `low` to the last one.
        count: Number of elements.
        points: The smallest and largest magnitude (one element each), or the only magnitude, or none.
        weights: Elements at each of `points`.
    """

    low: Array
    step: Array
    first: Array
    last: Array
    count: Array
    points: Array
    weights: Array


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
        return 1.0  # everything becomes zero, or max is negligible beside it
    grid = _grid(tally)
    # Squares of values far from 1 leave float64's range, so all is measured in this power of two. The bound keeps
    # E8M0's smallest code, which replaces float64 values hundreds of binades below it, inside that range.
    unit = max(math.ldexp(1.0, math.frexp(tally.amax * scale)[1]), fmt.min_subnormal * 2.0**-150)
    points = grid.points * scale
    error = grid.weights @ ((round_to(points, fmt) - points) / unit) ** 2
    power = grid.weights @ (points / unit) ** 2
    measure = _by_value if tally.significand_bits <= _ENUMERABLE_BITS else _by_integral
    bin_error, bin_power = measure(grid, fmt, scale, unit)
    power += grid.count @ bin_power
    return math.sqrt((error + grid.count @ bin_error) / power) if power > 0.0 else math.inf


def bin_costs(fmt: FloatFormat, scale: float) -> tuple[Array, Array]:
    """Returns mean squared error and mean square of one value of each bin, both of x * scale; float64 of shape (2048,).

    The values are those of a float32 source, dense in the bin; both are zero in bins that float32 does not reach.

    Args:
        fmt: The format that x * scale is rounded to.
        scale: A power of two.
    """
    low, high = EDGES[:BEYOND_FP32], EDGES[1 : BEYOND_FP32 + 1]
    steps = 2.0 ** (_FP32_BITS - _FIRST_BITS)
    one = np.ones(BEYOND_FP32)
    grid = _Grid(low, (high - low) / steps, one, one * steps, one, np.empty(0), np.empty(0))
    error, power = np.zeros(BINS), np.zeros(BINS)
    error[:BEYOND_FP32], power[:BEYOND_FP32] = _by_integral(grid, fmt, scale, 1.0)
    return error, power


def _by_value(grid: _Grid, fmt: FloatFormat, scale: float, unit: float) -> tuple[Array, Array]:
    """Returns mean squared error and mean square per bin, in `unit` squared, by rounding each value of the source."""
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
    """Returns the same for dense values: the integral of the squared distance to the target's grid.

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
