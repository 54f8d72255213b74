"""Counts a tensor's elements: in place per chunk on the CPU, and without a host sync on a device.

A magnitude's bin is `(pattern - 1) >> 20` of its float32 pattern. The subtraction makes the bins (lo, hi], so that a
magnitude that ties with a power-of-two threshold falls on the same side as under round-to-even, and zero is in no bin.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampdoctor.errors import UsageError
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.rounding_error import BEYOND_FP32, BINS, COLUMNS, PATTERN_SHIFT, bin_of
from ampdoctor.numerics.tensors import E8M0, SPARSE_LAYOUTS, Unseen, dense_elements, flat

# -- a small pool of threads, each with one torch thread, for kernels that torch itself runs on one thread --

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Workers:
    """Keeps one pool per size: if another thread shut a pool down, a thread that is about to use it would fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor | None] = {}

    def forget(self) -> None:
        """Drop the pools without touching their threads, which do not exist after a fork."""
        self._lock = threading.Lock()
        self._pools = {}

    def get(self, size: int) -> ThreadPoolExecutor | None:
        with self._lock:
            if size not in self._pools:
                self._pools[size] = _start(size)
            return self._pools[size]


def _start(size: int) -> ThreadPoolExecutor | None:
    """A pool; None where the process may not start that many threads (a container's limit of processes)."""
    pool = ThreadPoolExecutor(size, thread_name_prefix="ampdoctor-histogram")
    everyone = threading.Barrier(size + 1)
    failed: list[RuntimeError] = []

    def settle() -> None:
        torch.get_num_threads()  # sets the process's default now; later, that would undo the next line
        torch.set_num_threads(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            everyone.wait()

    def start_and_restore() -> None:
        # Each thread has its own count once it is set, but setting it also changes the default of later threads. A new
        # thread reads that default, so a new thread restores it, and the caller's own count stays.
        default = torch.get_num_threads()
        try:
            for _ in range(size):
                pool.submit(settle)
            everyone.wait()
        except RuntimeError as error:
            failed.append(error)
            everyone.abort()  # those that have started wait for the others
            pool.shutdown(cancel_futures=True)
        finally:
            torch.set_num_threads(default)

    try:
        starter = threading.Thread(target=start_and_restore)
        starter.start()
    except RuntimeError:
        return None
    starter.join()
    return None if failed else pool


_workers = _Workers()
os.register_at_fork(after_in_child=_workers.forget)


def imap_on_workers(work: Callable[[Item], Result], items: Iterable[Item], size: int) -> Iterator[Result]:
    """Apply `work` to each item on `size` threads, or on this one where they cannot start; in the items' order.

    It is a few items ahead of the results; if the iteration ends early, it waits for running work.
    """
    pool = _workers.get(size)
    if pool is None:
        yield from map(work, items)
        return
    waiting: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        concurrent.futures.wait(waiting)


CHUNK = 1 << 20  # elements per pass on the CPU: more leave the cache, and fewer cost more calls (measured)
MIN_CHUNK = 1 << 16  # minimum number of elements that are worth a thread
DEVICE_CHUNK = 1 << 24  # elements per pass on a device: limits the scratch to about a quarter of a gigabyte
_SMALL_FOR_A_TABLE = 1 << 18
"""Smaller 16-bit tensors are counted faster as float32 (measured: bf16 and fp16 cross between 2^17 and 2^18)."""
_INF64 = 0x7FF0000000000000
_SHIFT64 = 52 - 3


@dataclass(frozen=True, slots=True)
class _Wide:
    """How a dtype with too many patterns for a table is counted."""

    integer: torch.dtype  # of the dtype's size
    magnitude: int  # the largest pattern without its sign
    infinity: int  # the pattern of +Inf
    shift: int  # (pattern - 1) >> shift is the raw bin: the exponent and three mantissa bits

    @property
    def raw_bins(self) -> int:
        """Number of raw bins, those of NaN included."""
        return self.magnitude + 1 >> self.shift

    @property
    def finite_bins(self) -> int:
        """Number of raw bins that hold finite magnitudes; the last holds infinity as well."""
        return self.infinity >> self.shift


_WIDE = {
    torch.float32: _Wide(torch.int32, 0x7FFFFFFF, 0x7F800000, PATTERN_SHIFT),
    torch.float64: _Wide(torch.int64, 0x7FFFFFFFFFFFFFFF, _INF64, _SHIFT64),
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
}  # significand bits (hidden one included) and smallest spacing of the countable dtypes


def count(tensor: Tensor) -> Histogram:
    """Count a tensor's elements; raises UsageError for a dtype that is not floating-point, or a meta tensor.

    Any shape, layout and device; float64, float32, bfloat16, float16, a float8 dtype, or complex (real and
    imaginary parts are elements). Unstored elements of a sparse tensor count as zero.
    """
    return fetched(count_there(tensor))


def count_there(tensor: Tensor) -> Histogram | DeviceCounts:
    """Count as `count` does; the counts of a device tensor stay on the device, for which nothing waits."""
    if tensor.is_meta:
        raise UsageError("a meta tensor has no values to count")
    with Unseen(tensor):
        part = dense_elements(tensor.detach())
        if part.dtype not in _PRECISION:
            raise UsageError(f"a histogram needs floating-point elements, not {part.dtype}")
        counted = _host_counts(part) if part.device.type == "cpu" else device_counts(part)
        unstored = tensor.numel() - part.numel() if tensor.layout in SPARSE_LAYOUTS else 0
    return merged(counted, Histogram.empty(zeros=unstored)) if unstored else counted


def merged(first: Histogram | DeviceCounts, second: Histogram | DeviceCounts) -> Histogram | DeviceCounts:
    """Return the counts of both tensors; on their device if they share one."""
    if isinstance(first, Histogram) or isinstance(second, Histogram) or first.packed.device != second.packed.device:
        return fetched(first) + fetched(second)
    return first + second


def fetched(counts: Histogram | DeviceCounts) -> Histogram:
    """Return the counts on the host; waits for the device that holds them."""
    return counts if isinstance(counts, Histogram) else counts.fetch()


def _pieces(elements: Tensor, size: int) -> list[Tensor]:
    """Cut a one-dimensional tensor into views of at most `size` elements; always at least one."""
    total = elements.numel()
    return [elements.narrow(0, start, min(size, total - start)) for start in range(0, max(total, 1), size)]


def _host_counts(part: Tensor) -> Histogram:
    elements = flat(part)
    if part.dtype.itemsize == 2 and elements.numel() < _SMALL_FOR_A_TABLE:
        elements = elements.to(torch.float32)
    threads = torch.get_num_threads()
    pieces = _pieces(elements, min(CHUNK, max(MIN_CHUNK, -(-elements.numel() // threads))))
    work = functools.partial(_host_wide if elements.dtype in _WIDE else _host_table, precision=_PRECISION[part.dtype])
    if threads == 1 or len(pieces) == 1:
        return work(pieces)
    shares = [pieces[i::threads] for i in range(threads) if i < len(pieces)]
    return functools.reduce(Histogram.__add__, imap_on_workers(work, shares, threads))


def _host_wide(pieces: list[Tensor], precision: tuple[int, float]) -> Histogram:
    counting = _Counting(pieces[0].dtype, max(piece.numel() for piece in pieces))
    for piece in pieces:
        if piece.numel():
            counting.add(piece)
    return counting.histogram(precision)


class _Counting:
    """Counts pieces of one dtype, float32 or float64, one after the other.

    One pass turns each element into its rank, which falls as the magnitude grows: a constant less twice the pattern,
    where doubling drops the sign. Shifted right, a rank is the negative of its raw bin, whose lower end is then open
    without a separate subtraction. Ranks begin with NaN of the last raw bin, then come zero, the smallest magnitude and
    so on up to infinity, and the other NaN.

    The counts are of the last byte of a raw bin: `torch.bincount` takes 0.37 ns for a byte and 0.6 to 0.8 for any other
    integer (measured), and hardly any piece spans more than 256 bins, 32 binades.
    """

    def __init__(self, dtype: torch.dtype, largest: int) -> None:
        self._dtype = dtype
        self._wide = wide = _WIDE[dtype]
        self._step = 2 << wide.shift  # ranks in a raw bin
        self._zero = wide.magnitude + 1 - self._step
        self._origin = torch.tensor(self._zero, dtype=wide.integer)
        self._ranks = torch.empty(largest, dtype=wide.integer)
        self._bytes = torch.empty(largest, dtype=torch.uint8)
        self._raw = np.zeros(wide.raw_bins + 1, dtype=np.int64)  # from bin -1 on; zeros and what is not finite are last
        self._least, self._most = wide.infinity, 0
        self._nans = self._pos_infs = self._neg_infs = 0

    def add(self, piece: Tensor) -> None:
        wide, ranks = self._wide, self._ranks[: piece.numel()]
        torch.sub(self._origin, piece.view(wide.integer), alpha=2, out=ranks)
        last, first = (int(rank) for rank in torch.aminmax(ranks))
        if first > self._zero or last <= self._zero - 2 * wide.infinity:
            last, first = self._set_apart(piece, ranks), self._zero
        most, origin = (self._zero - last) // 2, self._zero
        if first == origin:
            ranks += self._step  # zero wraps around to the other end, so that the smallest magnitude is first
            origin, first = origin + self._step, int(ranks.amax())
        if first == -origin:
            self._raw[-1] += piece.numel()
            return
        least = (origin - first) // 2
        self._least, self._most = min(self._least, least), max(self._most, most)
        ranks >>= wide.shift + 1
        self._count(ranks, origin // self._step, (least - 1) >> wide.shift, (most - 1) >> wide.shift)

    def _count(self, bins: Tensor, origin: int, low: int, high: int) -> None:
        """Count the raw bins from `low` to `high`, given as `origin - (bin - 1)`; set-apart elements as -origin."""
        if high - low > 255:
            torch.sub(torch.tensor(origin, dtype=bins.dtype), bins, out=bins)
            self._raw += torch.bincount(bins, minlength=self._raw.size).numpy()
            return
        counts = torch.bincount(self._bytes[: bins.numel()].copy_(bins), minlength=256).numpy()
        if origin == self._raw.size // 2:
            shared = (high + 1) // 256 > low // 256  # one of the bins ends in the byte of the elements set apart
            apart = np.count_nonzero(bins.numpy() == -origin) if shared else counts[0]
            counts[0] -= apart
            self._raw[-1] += apart
        self._raw[low + 1 : high + 2] += counts[(origin - np.arange(low + 1, high + 2)) & 0xFF]

    def _set_apart(self, piece: Tensor, ranks: Tensor) -> int:
        """Count non-finite elements (numpy is faster here) and give them the rank of zero; returns the last rank."""
        array = ranks.numpy()
        beyond = (array > self._zero) | (array <= self._zero - 2 * self._wide.infinity)
        pos_infs, neg_infs = int((piece == math.inf).sum()), int((piece == -math.inf).sum())
        self._pos_infs += pos_infs
        self._neg_infs += neg_infs
        self._nans += int(np.count_nonzero(beyond)) - pos_infs - neg_infs
        array[beyond] = self._zero
        return int(ranks.amin())

    def histogram(self, precision: tuple[int, float]) -> Histogram:
        finite = self._raw[1 : self._wide.finite_bins + 1]
        counts = np.zeros(BINS, dtype=np.int64)
        if self._dtype == torch.float64:
            occupied = np.flatnonzero(finite)
            np.add.at(counts, _host_bins_of_raw64()[occupied], finite[occupied])
        else:
            counts[: finite.size] = finite
        amin, amax = torch.tensor([self._least, self._most], dtype=self._wide.integer).view(self._dtype).tolist()
        bits, spacing = precision
        return Histogram(
            counts=counts,
            zeros=int(self._raw[-1]) - self._nans - self._pos_infs - self._neg_infs,
            nans=self._nans,
            pos_infs=self._pos_infs,
            neg_infs=self._neg_infs,
            amin=amin if self._most else None,
            amax=amax if self._most else None,
            significand_bits=bits,
            min_spacing=spacing,
        )


def _bins_of_raw64(device: torch.device) -> Tensor:
    """The bin of each raw float64 bin. Float32 bins are unions of these: no value crosses an edge by rounding.

    Raw bins hold three mantissa bits of float64, even where float32 is subnormal and its own bins are all 2^-129 wide.
    They are computed on the device, as a table would have to be sent there.
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


@functools.cache
def _values_of_codes(dtype: torch.dtype) -> NDArray[np.float64]:
    """The value of every bit pattern of a dtype of at most 16 bits, as torch itself reads it."""
    bits = 8 * dtype.itemsize
    integer = torch.uint8 if bits == 8 else torch.int16
    codes = torch.arange(1 << bits, dtype=torch.int32).to(integer)
    return codes.view(dtype).to(torch.float64).numpy()


def _host_table(pieces: list[Tensor], precision: tuple[int, float]) -> Histogram:
    dtype = pieces[0].dtype
    narrow = dtype.itemsize == 1
    # bincount takes no negative number, so 16-bit patterns lose their sign; it only matters for Inf.
    size = 256 if narrow else 32768
    raw = torch.zeros(size, dtype=torch.int64)
    scratch = torch.empty(0 if narrow else max(piece.numel() for piece in pieces), dtype=torch.int16)
    for piece in pieces:
        codes = piece.view(torch.uint8) if narrow else piece.view(torch.int16)
        if not narrow:
            codes = torch.bitwise_and(codes, 0x7FFF, out=scratch[: codes.numel()])
        raw += torch.bincount(codes, minlength=size)
    by_code = raw.numpy()
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
    return Histogram(
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


# Packed device counts are additive in its bins, zeros, NaN, +Inf and -Inf. Two float64 patterns follow: the largest
# magnitude (0 if there is none) and the smallest (the largest int64 if there is none).
_SUMS = BINS + 4
_NONE64 = 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """Counts still on their device."""

    packed: Tensor  # int64 of shape (2054,): 2048 bins, zeros, NaN, +Inf, -Inf, and the patterns of amax and amin
    significand_bits: int
    min_spacing: float

    def __add__(self, other: DeviceCounts) -> DeviceCounts:
        mine, theirs = self.packed, other.packed
        packed = torch.cat(
            [
                mine.narrow(0, 0, _SUMS) + theirs.narrow(0, 0, _SUMS),
                torch.maximum(mine.narrow(0, _SUMS, 1), theirs.narrow(0, _SUMS, 1)),
                torch.minimum(mine.narrow(0, _SUMS + 1, 1), theirs.narrow(0, _SUMS + 1, 1)),
            ]
        )
        return DeviceCounts(
            packed, max(self.significand_bits, other.significand_bits), min(self.min_spacing, other.min_spacing)
        )

    def fetch(self) -> Histogram:
        """Copy the counts to the host; only this method waits for the device."""
        packed = self.packed.cpu().numpy()
        zeros, nans, pos_infs, neg_infs = (int(v) for v in packed[BINS:_SUMS])
        amax, amin = (float(v) for v in packed[_SUMS:].view(np.float64))
        present = int(packed[_SUMS]) > 0
        return Histogram(
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


def device_counts(part: Tensor) -> DeviceCounts:
    """Count a plain strided tensor on its device without a sync, so by `index_add_`: `torch.bincount` would sync."""
    bits, spacing = _PRECISION[part.dtype]
    elements = flat(part)
    counts = (DeviceCounts(_device_piece(piece), bits, spacing) for piece in _pieces(elements, DEVICE_CHUNK))
    return functools.reduce(DeviceCounts.__add__, counts)


def _device_piece(piece: Tensor) -> Tensor:
    if piece.dtype.itemsize < 4:
        piece = piece.to(torch.float32)  # exact for every format of at most 16 bits
    wide = _WIDE[piece.dtype]
    patterns = piece.view(wide.integer)
    shifted = (patterns & wide.magnitude) - 1
    # The sign bit alone turns +Inf into -Inf; as a signed integer that is the infinity less the smallest integer.
    pos_infs = (patterns == wide.infinity).sum()
    neg_infs = (patterns == wide.infinity - wide.magnitude - 1).sum()
    raw_bins = 2 * wide.raw_bins
    raw_index = (shifted >> wide.shift) & (raw_bins - 1)
    raw = torch.zeros(raw_bins, dtype=torch.int64, device=piece.device)
    one = torch.ones((), dtype=torch.int64, device=piece.device).expand(piece.numel())
    raw.index_add_(0, raw_index.to(torch.int32), one)
    finite_bins = wide.finite_bins
    raw.select(0, finite_bins - 1).sub_(pos_infs + neg_infs)
    of_finite = raw.narrow(0, 0, finite_bins)
    if piece.dtype == torch.float64:
        counts = torch.zeros(BINS, dtype=torch.int64, device=piece.device)
        counts.index_add_(0, _bins_of_raw64(piece.device), of_finite)
    else:
        counts = torch.cat([of_finite, torch.zeros(BINS - finite_bins, dtype=torch.int64, device=piece.device)])
    finite = (shifted >= 0) & (shifted < wide.infinity - 1)
    # A last element that does not count, because an empty or wholly non-finite tensor needs extremes too.
    nothing = torch.full((1,), -1, dtype=wide.integer, device=piece.device)
    most = torch.cat([torch.where(finite, shifted, -1), nothing]).amax()
    least = torch.cat([torch.where(finite, shifted, wide.magnitude - 1), nothing + wide.magnitude]).amin()
    zeros = raw.select(0, raw_bins - 1)
    nans = raw.narrow(0, finite_bins, raw_bins - 1 - finite_bins).sum()
    amax = (most + 1).view(piece.dtype).to(torch.float64).view(torch.int64)
    amin = torch.where(
        most < 0, torch.full_like(amax, _NONE64), (least + 1).view(piece.dtype).to(torch.float64).view(torch.int64)
    )
    return torch.cat([counts, torch.stack([zeros, nans, pos_infs, neg_infs, amax, amin])])
