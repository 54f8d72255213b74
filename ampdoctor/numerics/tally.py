"""The host side of a histogram: exact counts, and the layout of the bins."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ampdoctor.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, COLUMNS = 256, 8
"""Exponent field and first three mantissa bits of the magnitude's float32 pattern."""
BINS = ROWS * COLUMNS
PATTERN_SHIFT = 20
"""float32 magnitude pattern to bin: subtract one, then shift right by this."""
BEYOND_FP32 = 2040
"""The bin of finite float64 magnitudes above 2^128; float32 patterns there are NaN, which are counted separately."""

SERIAL_VERSION = 1


def _edges() -> NDArray[np.float64]:
    patterns = (np.arange(BEYOND_FP32, dtype=np.uint32) << PATTERN_SHIFT).view(np.float32)
    edges = np.append(patterns.astype(np.float64), [2.0**128, math.inf])
    edges.setflags(write=False)
    return edges


EDGES = _edges()
"""Bin i holds the magnitudes in (EDGES[i], EDGES[i + 1]]; float64 of shape (2042,)."""


def bin_of(magnitudes: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the bin of each positive finite float64 magnitude, exactly; magnitudes below 2^-149 are in bin 0."""
    return np.searchsorted(EDGES[1:], magnitudes, side="left")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """Exact counts of one or more tensors, on the host.

    Attributes:
        counts: int64 of shape (2048,), read-only: nonzero finite elements per bin.
        zeros: Elements equal to zero, of either sign.
        nans: NaN elements.
        pos_infs: Elements equal to +Inf.
        neg_infs: Elements equal to -Inf.
        amax: Largest nonzero finite magnitude, exact; None if there is none.
        amin: Smallest nonzero finite magnitude, exact; None if there is none.
        significand_bits: Precision of the source dtype, hidden bit included (24 for float32); the largest if several
            dtypes were merged, 0 if none was.
        min_spacing: Smallest distance between two values of the source dtype (2^-24 for float16); inf for nothing.
    """

    counts: NDArray[np.int64]
    zeros: int = 0
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    amax: float | None = None
    amin: float | None = None
    significand_bits: int = 0
    min_spacing: float = math.inf

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

        By another factor a bin lies across two, and goes where its largest value does. What leaves double precision at
        either end stays in the outermost bin.
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
        if self.finite_nonzero > 1 and len(occupied) == 1:  # one bin became two: its ends are known to be occupied
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
        """Return the tally that `to_dict` wrote.

        Raises:
            UsageError: The data are of another version, or contradict themselves.
        """
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
        """Refuse a tally that no tensor has.

        Raises:
            UsageError: The extremes are not in the outermost occupied bins.
        """
        occupied = np.flatnonzero(self.counts)
        expected: list[int] = [] if occupied.size == 0 else [int(occupied[0]), int(occupied[-1])]
        extremes = [v for v in (self.amin, self.amax) if v is not None]
        if bin_of(np.array(extremes)).tolist() != expected or extremes != sorted(extremes):
            raise UsageError("histogram data contradict themselves: the extremes do not lie in the outermost bins")
        if self.finite_nonzero == 1 and self.amin != self.amax:
            raise UsageError("histogram data contradict themselves: one element with two magnitudes")


_LARGEST_COUNT = 2**53
"""No real tensor comes near this, and sums of two stay far from int64's end."""


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
