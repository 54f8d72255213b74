"""How a tensor's elements are counted: in place per chunk on the CPU, and without a host sync on a device.

A magnitude's bin is `(pattern - 1) >> 20` of its float32 pattern: the subtraction makes the bins (lo, hi], so that a
magnitude that ties with a power-of-two threshold falls on the same side as the tie does under round-to-even, and it
sends zero (-1) out of the way by itself.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ampdoctor.errors import UsageError
from ampdoctor.numerics.elements import E2M1_PAIRS, E8M0, flat
from ampdoctor.numerics.tally import BEYOND_FP32, BINS, COLUMNS, PATTERN_SHIFT, Tally, bin_of
from ampdoctor.numerics.workers import map_on_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 19
"""Elements per pass on the CPU: the scratch stays in the cache, and bincount's own 4096 counters are paid rarely."""
MIN_CHUNK = 1 << 16
"""Elements that are worth a thread of their own."""
DEVICE_CHUNK = 1 << 24
"""Elements per pass on a device: bounds the scratch at about a quarter of a gigabyte."""

_SMALL_FOR_A_TABLE = 1 << 18
"""16-bit tensors below this are counted as float32: a table of 32768 counts is read in the time that this many take
(measured: bf16 and fp16 cross between 2^17 and 2^18)."""

_INF32 = 0x7F800000
_INF64 = 0x7FF0000000000000
_SHIFT64 = 52 - 3


@dataclass(frozen=True, slots=True)
class _Wide:
    """How a dtype with too many patterns for a table is counted."""

    integer: torch.dtype
    magnitude: int
    infinity: int
    shift: int
    raw_bins: int


_WIDE = {
    torch.float32: _Wide(torch.int32, 0x7FFFFFFF, _INF32, PATTERN_SHIFT, 4096),
    torch.float64: _Wide(torch.int64, 0x7FFFFFFFFFFFFFFF, _INF64, _SHIFT64, 32768),
}

_PRECISION: dict[torch.dtype, tuple[int, float]] = {
    torch.float64: (53, 2.0**-1074),
    torch.float32: (24, 2.0**-149),
    torch.bfloat16: (8, 2.0**-133),
    torch.float16: (11, 2.0**-24),
    torch.float8_e4m3fn: (4, 2.0**-9),
    torch.float8_e5m2: (3, 2.0**-16),
    torch.float8_e4m3fnuz: (4, 2.0**-10),
    torch.float8_e5m2fnuz: (3, 2.0**-17),
    **dict.fromkeys(E8M0, (1, 2.0**-127)),
    **dict.fromkeys(E2M1_PAIRS, (2, 0.5)),
}
"""Significand bits (hidden one included) and smallest spacing of what can be counted."""


def check_countable(dtype: torch.dtype) -> None:
    """Raise unless tensors of this dtype can be counted.

    Raises:
        UsageError: The dtype is no floating-point format that is known here.
    """
    if dtype not in _PRECISION:
        raise UsageError(f"a histogram needs floating-point elements, not {dtype}")


def _pieces(elements: Tensor, size: int) -> list[Tensor]:
    """Cut a one-dimensional tensor into views of at most `size` elements; always at least one."""
    total = elements.numel()
    return [elements.narrow(0, start, min(size, total - start)) for start in range(0, max(total, 1), size)]


def host_tally(part: Tensor) -> Tally:
    """Count the elements of one plain strided CPU tensor.

    Args:
        part: Any shape, a dtype that `check_countable` accepts.
    """
    elements = flat(part)
    if part.dtype.itemsize == 2 and elements.numel() < _SMALL_FOR_A_TABLE:
        elements = elements.to(torch.float32)
    threads = torch.get_num_threads()
    pieces = _pieces(elements, min(CHUNK, max(MIN_CHUNK, -(-elements.numel() // threads))))
    work = functools.partial(_host_wide if elements.dtype in _WIDE else _host_table, precision=_PRECISION[part.dtype])
    if threads == 1 or len(pieces) == 1:
        return work(pieces)
    shares = [pieces[i::threads] for i in range(threads) if i < len(pieces)]
    return functools.reduce(Tally.__add__, map_on_workers(work, shares, threads))


def _host_wide(pieces: list[Tensor], precision: tuple[int, float]) -> Tally:
    dtype = pieces[0].dtype
    wide = _WIDE[dtype]
    scratch = torch.empty(max((p.numel() for p in pieces), default=0), dtype=wide.integer)
    raw = torch.zeros(wide.raw_bins, dtype=torch.int64)
    low, high = wide.magnitude, -1  # of the magnitude patterns, less one
    pos_infs = neg_infs = 0
    for piece in pieces:
        if piece.numel() == 0:
            continue
        shifted = torch.bitwise_and(piece.view(wide.integer), wide.magnitude, out=scratch[: piece.numel()])
        shifted -= 1
        least, most = (int(v) for v in torch.aminmax(shifted))
        if least < 0:  # zeros are -1: look past them
            least = int((shifted & wide.magnitude).amin())
        if most >= wide.infinity - 1:
            pos_infs += int((piece == math.inf).sum())
            neg_infs += int((piece == -math.inf).sum())
            most = int(torch.where(shifted < wide.infinity - 1, shifted, -1).amax())
        low, high = min(low, least), max(high, most)
        shifted >>= wide.shift
        shifted &= wide.raw_bins - 1
        raw += torch.bincount(shifted, minlength=wide.raw_bins)
    extremes = (_magnitude(low + 1, dtype), _magnitude(high + 1, dtype)) if high >= 0 else (None, None)
    return _from_raw(raw.numpy(), dtype, precision, (pos_infs, neg_infs), extremes)


def _magnitude(pattern: int, dtype: torch.dtype) -> float:
    return float(torch.tensor(pattern, dtype=_WIDE[dtype].integer).view(dtype))


def _bins_of_raw64(device: torch.device) -> Tensor:
    """Bin of each raw float64 bin. The float32 bins are unions of them, so no value crosses an edge by rounding.

    Raw bins hold three mantissa bits of float64, also where float32 is subnormal and its own bins are as wide as
    2^-129 throughout. Computed where it is used: a table would have to be sent to the device.
    """
    raw = torch.arange(_INF64 >> _SHIFT64, dtype=torch.int64, device=device)
    upper = ((raw + 1) << _SHIFT64).view(torch.float64)
    of_subnormal = (upper * 2.0**129).ceil().sub_(1).clamp_(0, COLUMNS).to(torch.int64)
    of_normal = (raw - (1023 - 127) * COLUMNS).clamp_(max=BEYOND_FP32)
    return torch.where(upper <= 2.0**-126, of_subnormal, of_normal)


@functools.cache
def _host_bins_of_raw64() -> NDArray[np.int64]:
    bins: NDArray[np.int64] = _bins_of_raw64(torch.device("cpu")).numpy()
    return bins


def _from_raw(
    raw: NDArray[np.int64],
    dtype: torch.dtype,
    precision: tuple[int, float],
    infs: tuple[int, int],
    extremes: tuple[float | None, float | None],
) -> Tally:
    wide = _WIDE[dtype]
    finite_bins = wide.infinity >> wide.shift
    counts = np.zeros(BINS, dtype=np.int64)
    if dtype == torch.float64:
        raw[finite_bins - 1] -= sum(infs)  # Inf, less one, is the largest pattern of the top finite bin
        occupied = np.flatnonzero(raw[:finite_bins])
        np.add.at(counts, _host_bins_of_raw64()[occupied], raw[occupied])
    else:
        counts[:BEYOND_FP32] = raw[:finite_bins]
        counts[BEYOND_FP32 - 1] -= sum(infs)
    bits, spacing = precision
    return Tally(
        counts=counts,
        zeros=int(raw[-1]),
        nans=int(raw[finite_bins:-1].sum()),
        pos_infs=infs[0],
        neg_infs=infs[1],
        amin=extremes[0],
        amax=extremes[1],
        significand_bits=bits,
        min_spacing=spacing,
    )


@functools.cache
def _values_of_codes(dtype: torch.dtype) -> NDArray[np.float64]:
    """The value of every bit pattern of a dtype of at most 16 bits, as torch itself reads it."""
    if dtype in E2M1_PAIRS:
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        return np.array(magnitudes + [-m for m in magnitudes])
    bits = 8 * dtype.itemsize
    integer = torch.uint8 if bits == 8 else torch.int16
    codes = torch.arange(1 << bits, dtype=torch.int32).to(integer)
    return codes.view(dtype).to(torch.float64).numpy()


def _host_table(pieces: list[Tensor], precision: tuple[int, float]) -> Tally:
    dtype = pieces[0].dtype
    narrow = dtype.itemsize == 1
    # bincount takes no negative number, so 16-bit patterns drop their sign; it matters for Inf alone.
    size = 256 if narrow else 32768
    raw = torch.zeros(size, dtype=torch.int64)
    for piece in pieces:
        codes = piece.view(torch.uint8) if narrow else piece.view(torch.int16) & 0x7FFF
        raw += torch.bincount(codes, minlength=size)
    by_code = raw.numpy()
    if dtype in E2M1_PAIRS:
        pairs = by_code.reshape(16, 16)
        by_code = pairs.sum(axis=0) + pairs.sum(axis=1)
    values = _values_of_codes(dtype)[: by_code.size]
    pos_infs = int(by_code[values == math.inf].sum())
    neg_infs = int(by_code[values == -math.inf].sum())
    if pos_infs and not narrow:
        neg_infs = sum(int((piece == -math.inf).sum()) for piece in pieces)
        pos_infs -= neg_infs
    present = np.isfinite(values) & (values != 0.0) & (by_code > 0)
    magnitudes = np.abs(values[present])
    counts = np.zeros(BINS, dtype=np.int64)
    np.add.at(counts, bin_of(magnitudes), by_code[present])
    bits, spacing = precision
    return Tally(
        counts=counts,
        zeros=int(by_code[values == 0.0].sum()),
        nans=int(by_code[np.isnan(values)].sum()),
        pos_infs=pos_infs,
        neg_infs=neg_infs,
        amin=float(magnitudes.min()) if magnitudes.size else None,
        amax=float(magnitudes.max()) if magnitudes.size else None,
        significand_bits=bits,
        min_spacing=spacing,
    )


_SUMS = BINS + 4
"""Entries of a packed device tally that add: the bins, then zeros, NaN, +Inf, -Inf. Then come two float64 patterns:
the largest magnitude (0 where there is none) and the smallest (the largest int64 where there is none)."""
_NONE64 = 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class DeviceTally:
    """Counts that are still on their device.

    Attributes:
        packed: int64 of shape (2054,): 2048 bins, zeros, NaN, +Inf, -Inf, and the patterns of amax and amin.
        significand_bits: As in `Tally`.
        min_spacing: As in `Tally`.
    """

    packed: Tensor
    significand_bits: int
    min_spacing: float

    def __add__(self, other: DeviceTally) -> DeviceTally:
        mine, theirs = self.packed, other.packed
        packed = torch.cat(
            [
                mine.narrow(0, 0, _SUMS) + theirs.narrow(0, 0, _SUMS),
                torch.maximum(mine.narrow(0, _SUMS, 1), theirs.narrow(0, _SUMS, 1)),
                torch.minimum(mine.narrow(0, _SUMS + 1, 1), theirs.narrow(0, _SUMS + 1, 1)),
            ]
        )
        return DeviceTally(
            packed,
            max(self.significand_bits, other.significand_bits),
            min(self.min_spacing, other.min_spacing),
        )

    def fetch(self) -> Tally:
        """Copy the counts to the host: the one place where a device is waited for."""
        packed = self.packed.cpu().numpy()
        zeros, nans, pos_infs, neg_infs = (int(v) for v in packed[BINS:_SUMS])
        amax, amin = (float(v) for v in packed[_SUMS:].view(np.float64))
        present = int(packed[_SUMS]) > 0
        return Tally(
            counts=packed[:BINS].copy(),
            zeros=zeros,
            nans=nans,
            pos_infs=pos_infs,
            neg_infs=neg_infs,
            amax=amax if present else None,
            amin=amin if present else None,
            significand_bits=self.significand_bits,
            min_spacing=self.min_spacing,
        )


def device_tally(part: Tensor) -> DeviceTally:
    """Count the elements of one plain strided tensor on its own device, without waiting for the device.

    `torch.bincount` reads its maximum on the host, so `index_add_` counts here. Works on any device.

    Args:
        part: Any shape, a dtype that `check_countable` accepts.
    """
    bits, spacing = _PRECISION[part.dtype]
    if part.dtype in E2M1_PAIRS:
        part = _unpack_e2m1(part)
    elements = flat(part)
    tallies = (DeviceTally(_device_piece(piece), bits, spacing) for piece in _pieces(elements, DEVICE_CHUNK))
    return functools.reduce(DeviceTally.__add__, tallies)


def _unpack_e2m1(part: Tensor) -> Tensor:
    codes = part.view(torch.uint8)
    codes = torch.stack([codes & 0xF, codes >> 4], dim=-1)
    exponent, mantissa = ((codes >> 1) & 3).to(torch.float32), (codes & 1).to(torch.float32)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, (2.0 + mantissa) * torch.exp2(exponent - 2.0))
    return torch.where(codes >= 8, -magnitude, magnitude)


def _device_piece(piece: Tensor) -> Tensor:
    if piece.dtype not in _WIDE:
        piece = piece.to(torch.float32)  # exact for every format of at most 16 bits
    wide = _WIDE[piece.dtype]
    patterns = piece.view(wide.integer)
    shifted = (patterns & wide.magnitude) - 1
    # The sign bit alone turns +Inf into -Inf; as a signed integer that is the infinity less the smallest integer.
    pos_infs = (patterns == wide.infinity).sum()
    neg_infs = (patterns == wide.infinity - wide.magnitude - 1).sum()
    raw_index = (shifted >> wide.shift) & (wide.raw_bins - 1)
    raw = torch.zeros(wide.raw_bins, dtype=torch.int64, device=piece.device)
    one = torch.ones((), dtype=torch.int64, device=piece.device).expand(piece.numel())
    raw.index_add_(0, raw_index.to(torch.int32), one)
    finite_bins = wide.infinity >> wide.shift
    raw.select(0, finite_bins - 1).sub_(pos_infs + neg_infs)
    of_finite = raw.narrow(0, 0, finite_bins)
    if piece.dtype == torch.float64:
        counts = torch.zeros(BINS, dtype=torch.int64, device=piece.device)
        counts.index_add_(0, _bins_of_raw64(piece.device), of_finite)
    else:
        counts = torch.cat([of_finite, torch.zeros(BINS - finite_bins, dtype=torch.int64, device=piece.device)])
    finite = (shifted >= 0) & (shifted < wide.infinity - 1)
    # A last element that is neither: an empty or wholly non-finite tensor has extremes too.
    nothing = torch.full((1,), -1, dtype=wide.integer, device=piece.device)
    most = torch.cat([torch.where(finite, shifted, -1), nothing]).amax()
    least = torch.cat([torch.where(finite, shifted, wide.magnitude - 1), nothing + wide.magnitude]).amin()
    zeros = raw.select(0, wide.raw_bins - 1)
    nans = raw.narrow(0, finite_bins, wide.raw_bins - 1 - finite_bins).sum()
    amax = (most + 1).view(piece.dtype).to(torch.float64).view(torch.int64)
    amin = torch.where(
        most < 0, torch.full_like(amax, _NONE64), (least + 1).view(piece.dtype).to(torch.float64).view(torch.int64)
    )
    return torch.cat([counts, torch.stack([zeros, nans, pos_infs, neg_infs, amax, amin])])
