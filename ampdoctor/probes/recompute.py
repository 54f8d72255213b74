"""Runs an op again in float64: whole, or at selected elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ampdoctor.evidence.trace import Recomputation
from ampdoctor.numerics.tensors import extremes, nonfinite_flag
from ampdoctor.probes.ops import Ran, Split

# -- the whole op in float64 and float32: is it non-finite by nature, or only in this format? --

_LOW = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex32,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

LARGE = 64.0  # no function has its pole here, and inputs that overflow float64 (exp from 710 on, powers) are no smaller

NO_RESULT = (RuntimeError, TypeError, ValueError, IndexError)  # where an op has no kernel or rejects a new input


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, a complex one in complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def widened(value: Any, single: bool = False) -> Any:  # noqa: FBT001, FBT002 - internal
    """Floating-point tensors and dtypes of a nested value in float64 (or float32); everything else unchanged."""
    real, compound = (torch.float32, torch.complex64) if single else (torch.float64, torch.complex128)

    def widen(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dtype in _LOW:
            kind = compound if item.is_complex() else real
            if item._is_zerotensor():
                return torch.zeros(item.shape, dtype=kind, device=item.device)
            # a copy also where the dtype stays: an in-place op must not write into what the step saw
            return item.detach().to(kind, copy=True)
        if isinstance(item, torch.dtype) and item in _LOW:
            return compound if item.is_complex else real
        return item

    return tree_map(widen, value)


def widely(func: Callable[..., Any], call: Split, *, single: bool = False) -> list[torch.Tensor]:
    """A call's results in float64 (or float32); [] where there is no such kernel, or the op draws random numbers."""
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return []
    try:
        with torch.no_grad():
            return call.again(func, widened(call.args, single), widened(call.kwargs, single))
    except NO_RESULT:
        return []


def recompute(
    func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor]
) -> tuple[Recomputation | None, list[torch.Tensor]]:
    """Run `func` in float64 and float32 and compare where `results` are non-finite.

    Returns the verdict and the float64 results (parallel to `results`). They are (None, []) where the op has no float64
    kernel, or draws random numbers.
    """
    wide = widely(func, call)
    if not _alike(wide, results):
        return None, []
    finite, amax = _where_nonfinite(results, wide)
    limit = max(
        (float(torch.finfo(r.dtype).max) for r in results if not math.isfinite(float(nonfinite_flag(r)))), default=0.0
    )
    single = widely(func, call, single=True)
    finite32, amax32 = _where_nonfinite(results, single) if _alike(single, results) else (None, 0.0)
    beyond = finite and amax > limit
    overflow = None if beyond else _fits_when_smaller(func, call, results, finite=finite)
    return Recomputation(
        finite=finite,
        amax=amax,
        limit=limit,
        finite32=finite32,
        amax32=amax32,
        overflow=overflow,
        returns=None if beyond else _returns(func, call, results),
    ), wide


def _returns(func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor]) -> bool | None:
    """Whether the op is non-finite again in its own format, on the same inputs; None where it cannot be run again."""
    try:
        with torch.no_grad():
            again = call.again(func, _copied(call.args), _copied(call.kwargs))
    except NO_RESULT:
        return None
    return not _where_nonfinite(results, again)[0] if _alike(again, results) else None


def _fits_when_smaller(
    func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor], *, finite: bool
) -> bool | None:
    """Whether the op is finite on the same inputs, each scaled down to at most 1 by a power of two.

    A pole (log(0), a flushed epsilon) stays one. Results that are not finite in float64 either count as an overflow
    only where they are an infinity from large inputs: NaN from acos(1.5) is no overflow, nor is the pole of atanh at 1.
    """
    sizes = {id(t): _largest(b) for t, b in zip(call.reads, call.before, strict=True) if b.numel()}
    if not finite:
        nan = any(math.isnan(float(extremes(r)[0])) for r in results)
        if nan or max(sizes.values(), default=0.0) < LARGE:
            return False
    values = dict(zip(map(id, call.reads), call.before, strict=True))

    def smaller(tensor: torch.Tensor) -> torch.Tensor | None:
        size = sizes.get(id(tensor), 0.0)
        if size <= 1.0 or not math.isfinite(size):
            return None
        # in float64: the factor itself may not fit the format
        return (doubled(values[id(tensor)]) * 2.0 ** -math.ceil(math.log2(size))).to(tensor.dtype)

    low = call.substituted(smaller)
    try:
        with torch.no_grad():
            again = low.again(func, _copied(low.args), _copied(low.kwargs))
    except NO_RESULT:
        return None
    return _where_nonfinite(results, again)[0] if _alike(again, results) else None


def _largest(tensor: torch.Tensor) -> float:
    """Largest magnitude; NaN where there is a NaN."""
    if tensor.is_complex():
        return float(doubled(tensor).abs().max())
    low, high = (float(end) for end in extremes(tensor))
    return high if math.isnan(high) else max(-low, high)


def _copied(value: Any) -> Any:
    return tree_map(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value)


def _alike(wide: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    return [t.shape for t in wide] == [t.shape for t in results]


def _where_nonfinite(results: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> tuple[bool, float]:
    """Of the elements that are non-finite here: are all finite in `wide`, and the largest finite magnitude there."""
    finite, amax = True, 0.0
    for result, reference in zip(results, wide, strict=True):
        bad = ~torch.isfinite(result.detach() if result.element_size() > 1 else doubled(result))
        there = doubled(reference[bad])
        fine = torch.isfinite(there)
        finite = finite and bool(fine.all())
        if bool(fine.any()):
            amax = max(amax, float(there[fine].abs().max()))
    return finite, amax


# -- selected elements in float64 --

FEW = 8  # if a tensor has at least this many times the selected elements, gathering those is cheaper than computing all


class _NotByElementError(Exception):
    """An argument has another shape than the result."""


class RecomputeAt:
    """Runs an op in float64 on its own inputs or on others (`call`).

    An elementwise op runs on the selected elements only: a cast of 38 million weights flushes a handful of them.
    """

    def __init__(self, ran: Ran, call: Split) -> None:
        self._ran = ran
        self._call = call
        self._whole: list[torch.Tensor] | None = None

    def at(self, position: int, places: torch.Tensor) -> torch.Tensor | None:
        """A result's float64 elements at `places` (as if it were contiguous); None if the op cannot run in float64."""
        few = self._few(position, places)
        if few is not None:
            return few
        if self._whole is None:
            self._whole = widely(self._ran.func, self._call)
        if [wide.shape for wide in self._whole] != [result.shape for result in self._ran.results]:
            return None
        return doubled(self._whole[position]).reshape(-1)[places]

    def _few(self, position: int, places: torch.Tensor) -> torch.Tensor | None:
        """The op on those elements alone; None where it is not elementwise."""
        ran = self._ran
        result = ran.results[position]
        if len(ran.results) != 1 or len(places) * FEW > result.numel() or not _is_elementwise(ran.func, ran.kernel):
            return None
        try:
            found = widely(ran.func, _picked(self._call, result.shape, places))
        except _NotByElementError:
            return None
        return doubled(found[0]) if [wide.shape for wide in found] == [places.shape] else None


def _picked(call: Split, shape: torch.Size, places: torch.Tensor) -> Split:
    def pick(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.dim() == 0:
            return item
        if item.shape != shape or item.layout is not torch.strided:
            raise _NotByElementError
        return item.detach().reshape(-1)[places]

    return replace(call, args=tree_map(pick, call.args), kwargs=tree_map(pick, call.kwargs))


@lru_cache(maxsize=1024)
def _is_elementwise(func: Callable[..., Any], kernel: str) -> bool:
    """Whether torch tags the op, or for one over lists the op of a single tensor, as pointwise."""
    packet = getattr(torch.ops.aten, kernel, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return kernel == "_to_copy" or any(torch.Tag.pointwise in op.tags for op in (func, *overloads))
