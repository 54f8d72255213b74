"""An op again, in float64, on the inputs it had: is the result non-finite by nature, or only in this format?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ampdoctor.evidence.trace import Recomputation
from ampdoctor.probes.arguments import Split

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


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, a complex one in complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def widened(value: Any) -> Any:
    """Floating-point tensors and dtypes of a nested value in float64; everything else as it is."""

    def widen(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dtype in _LOW:
            if item._is_zerotensor():
                return doubled(torch.zeros(item.shape, dtype=item.dtype, device=item.device))
            return doubled(item)
        if isinstance(item, torch.dtype) and item in _LOW:
            return torch.complex128 if item.is_complex else torch.float64
        return item

    return tree_map(widen, value)


def widely(func: Callable[..., Any], call: Split) -> list[torch.Tensor]:
    """A call's results in float64; [] where there is no such kernel, or the op draws random numbers."""
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return []
    try:
        with torch.no_grad():
            return call.again(func, widened(call.args), widened(call.kwargs))
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return []


def recompute(
    func: Callable[..., Any], call: Split, results: Sequence[torch.Tensor]
) -> tuple[Recomputation | None, list[torch.Tensor]]:
    """Run `func` in float64 and compare with the low-precision results where those are non-finite.

    Args:
        func: An ATen overload.
        call: Its arguments, with the values they had before the op ran.
        results: Its floating-point results, non-finite somewhere.

    Returns:
        The verdict and the float64 results (parallel to `results`); (None, []) where the op has no float64 kernel, or
        draws random numbers.
    """
    wide = widely(func, call)
    if len(wide) != len(results) or any(w.shape != r.shape for w, r in zip(wide, results, strict=True)):
        return None, []
    finite, amax, limit = True, 0.0, 0.0
    for result, reference in zip(results, wide, strict=True):
        bad = ~torch.isfinite(doubled(result))
        if not bool(bad.any()):
            continue
        limit = max(limit, float(torch.finfo(result.dtype).max))
        there = doubled(reference)[bad]
        fine = torch.isfinite(there)
        finite = finite and bool(fine.all())
        if bool(fine.any()):
            amax = max(amax, float(there[fine].abs().max()))
    return Recomputation(finite=finite, amax=amax, limit=limit), wide
