"""Runs an op again in float64: is it non-finite by nature, or only in this format?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ampdoctor.evidence.trace import Recomputation
from ampdoctor.numerics.tensors import extremes
from ampdoctor.probes.ops import Ran, Split

_LOW = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
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
    """The verdict on non-finite `results`, and them in float64; (None, []) where the op cannot run again in float64."""
    wide = widely(func, call)
    if not _alike(wide, results):
        return None, []
    finite, amax = _where_nonfinite(results, wide)
    lost = (r for r in results if not all(map(math.isfinite, map(float, extremes(r)))))
    limit = max((float(torch.finfo(r.dtype).max) for r in lost), default=0.0)
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
        returns=None if beyond or (again := _is_finite_again(func, call, results)) is None else not again,
    ), wide


def _is_finite_again(func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor]) -> bool | None:
    """Whether a call in its own format is finite where `results` are not; None where it cannot be run again."""
    args, kwargs = tree_map(
        lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, (call.args, call.kwargs)
    )
    try:
        with torch.no_grad():
            again = call.again(func, args, kwargs)
    except NO_RESULT:
        return None
    return _where_nonfinite(results, again)[0] if _alike(again, results) else None


def _fits_when_smaller(
    func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor], *, finite: bool
) -> bool | None:
    """Whether the op is finite on its large inputs made smaller: then it overflows; None where that does not decide."""
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

    return _is_finite_again(func, call.substituted(smaller), results)


def _largest(tensor: torch.Tensor) -> float:
    """Largest magnitude; NaN where there is a NaN."""
    if tensor.is_complex():
        return float(doubled(tensor).abs().max())
    low, high = (float(end) for end in extremes(tensor))
    return high if math.isnan(high) else max(-low, high)


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


def aligned(ran: Ran, call: Split) -> list[torch.Tensor]:
    """An op's results in float64 on its own inputs or on others (`call`); [] if it cannot run in float64."""
    wide = widely(ran.func, call)
    return list(map(doubled, wide)) if _alike(wide, ran.results) else []
