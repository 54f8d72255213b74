"""Many histograms at many loss scales at once: the cost of rounding to a format at each power of two.

A power of two moves a histogram by whole binades, so one table of costs per bin and one matrix product answer for all.
Values are taken as those of a float32 source that lie densely in their bin (see `estimates`).
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics.estimates import bin_costs
from ampdoctor.numerics.formats import FloatFormat, as_format
from ampdoctor.numerics.tally import BINS, EDGES

Counts = NDArray[np.int64]
Array = NDArray[np.float64]

_BINS_PER_BINADE = 8


def flushed_counts(counts: Counts, fmt: FloatFormat | str, exponents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how many elements become zero at each scale 2^e; exact.

    Args:
        counts: int64 of shape (n, 2048): elements per bin (`Histogram.counts`, flat).
        fmt: The format.
        exponents: int64 of shape (k,), such that the threshold is at least 2^-129, where bins still end at each power.

    Returns:
        int64 of shape (n, k).
    """
    fmt = as_format(fmt)
    below = np.searchsorted(EDGES, np.ldexp(fmt.flush_at, -exponents), side="left")  # bins up to that upper edge
    cumulative = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), counts.cumsum(axis=1)], axis=1)
    result: NDArray[np.int64] = cumulative[:, below]
    return result


def squared_errors(counts: Counts, fmt: FloatFormat | str, exponents: NDArray[np.int64]) -> Array:
    """Returns the sum of the squared rounding errors at each scale 2^e, in units of the unscaled values.

    An overflow counts as clipped; whether there is one depends on the exact maximum.

    Args:
        counts: int64 of shape (n, 2048).
        fmt: The format.
        exponents: int64 of shape (k,).

    Returns:
        float64 of shape (n, k).
    """
    table = _error_table(as_format(fmt), tuple(int(e) for e in exponents))
    first, last = _occupied(counts)
    result: Array = counts[:, first:last].astype(np.float64) @ table[first:last]
    return result


def powers(counts: Counts) -> Array:
    """Returns the sum of the squares of the values, float64 of shape (n,).

    Args:
        counts: int64 of shape (n, 2048).
    """
    first, last = _occupied(counts)
    result: Array = counts[:, first:last].astype(np.float64) @ _mean_squares()[first:last]
    return result


def scaled_to_fit(counts: Counts, amax: Array, fmt: FloatFormat | str) -> Array:
    """Returns an 8-bit format's cost if each tensor is scaled by the largest power of two that keeps it below `max`.

    This is per-tensor scaling by the present maximum. Recipes that scale by max / amax are less than a binade higher.

    Args:
        counts: int64 of shape (n, 2048).
        amax: float64 of shape (n,): largest finite magnitude; 0 if there is none.
        fmt: The format.

    Returns:
        float64 of shape (n, 3): elements that become zero, elements that are subnormal, and the sum of the squared
        errors in units of the unscaled values.
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
    """Returns the bins outside which every row is empty: tensors fill some 40 of 256 binades."""
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
