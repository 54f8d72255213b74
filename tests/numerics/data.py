"""Tensors for the tests of this room, and brute-force answers about them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import strategies as st

from ampdoctor.numerics.formats import FloatFormat
from ampdoctor.numerics.rounding_error import BINS, EDGES
from ampdoctor.numerics.tensors import E8M0

WIDE = (torch.float64, torch.float32)
HALF = (torch.float16, torch.bfloat16)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, *E8M0)
DTYPES = WIDE + HALF + EIGHT
_INTEGER = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}

POWERS = tuple(range(-20, 31))


def from_patterns(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    bits = 8 * dtype.itemsize
    array = np.array(patterns, dtype=_INTEGER[bits]).view(_SIGNED[bits])
    return torch.from_numpy(array.copy()).view(dtype)


def _pattern(bits: int) -> st.SearchStrategy[int]:
    """Any bit pattern, with a liking for those beside a bin's edge and for zeros, infinities and NaN."""
    anything = st.integers(0, 2**bits - 1)
    if bits == 8:
        return anything
    step = {16: 2**4, 32: 2**20, 64: 2**49}[bits]
    edges = st.builds(
        lambda k, off, sign: (k * step + off) % 2 ** (bits - 1) + sign,
        st.integers(0, 2 ** (bits - 1) // step),
        st.integers(-1, 1),
        st.sampled_from([0, 2 ** (bits - 1)]),
    )
    return st.one_of(edges, anything)


def tensors(dtype: torch.dtype, *, max_size: int = 60) -> st.SearchStrategy[torch.Tensor]:
    """One-dimensional tensors made from bit patterns: subnormals, ties, signed zeros, Inf and NaN included."""
    return st.lists(_pattern(8 * dtype.itemsize), max_size=max_size).map(lambda p: from_patterns(p, dtype))


@st.composite
def close_tensors(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes of about as many bins as a byte tells apart, on either side of that, among what is set apart."""
    bits, step, infinity = {torch.float32: (32, 2**20, 0x7F800000), torch.float64: (64, 2**49, 0x7FF0000000000000)}[
        dtype
    ]
    low = draw(st.integers(0, infinity // step - 1))
    high = min(low + draw(st.sampled_from([0, 1, 254, 255, 256, 257, 300])), infinity // step - 1)
    bins = st.one_of(st.just(low), st.just(high), st.integers(low, high))
    inside = st.builds(lambda k, off: k * step + off, bins, st.sampled_from([1, 2, step // 2, step - 1, step]))
    others = st.sampled_from([0, infinity, infinity + 1, 2 ** (bits - 1) - step, 2 ** (bits - 1) - 1])
    allowed = draw(st.sampled_from([inside, st.one_of(inside, st.just(0)), st.one_of(inside, others)]))
    signs = st.sampled_from([0, 2 ** (bits - 1)])
    patterns = st.builds(lambda pattern, sign: pattern + sign, allowed, signs)
    return from_patterns(draw(st.lists(patterns, max_size=40)), dtype)


def finite_magnitudes(tensor: torch.Tensor) -> np.ndarray:
    """Nonzero finite magnitudes as float64, exact for every dtype."""
    values = tensor.double().abs()
    return values[values.isfinite() & (values > 0)].numpy()


def brute_counts(tensor: torch.Tensor) -> np.ndarray:
    """Counts per (lo, hi] bin by comparison with the edges alone."""
    counts = np.zeros(BINS, dtype=np.int64)
    for value in finite_magnitudes(tensor):
        bin_ = next(i for i in range(EDGES.size - 1) if value <= EDGES[i + 1])
        counts[bin_] += 1
    return counts


def brute_round(value: float, fmt: FloatFormat) -> float:
    """Round one magnitude in exact rational arithmetic, straight from the definition of a format."""
    if value >= fmt.overflow_at:
        return {"inf": math.inf, "nan": math.nan, "saturate": fmt.max}[fmt.overflow_result]
    exact = Fraction(value)
    exponent = math.frexp(value)[1] - 1 if value else -2000
    step = max(Fraction(2) ** (exponent - fmt.mantissa_bits), Fraction(fmt.min_subnormal))
    quotient, rest = divmod(exact, step)
    if rest * 2 > step or (rest * 2 == step and quotient % 2):
        quotient += 1
    return float(quotient * step)


CASTABLE = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The formats but fp32, with torch's dtype."""
