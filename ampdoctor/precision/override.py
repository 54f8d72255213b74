"""Another autocast dtype than the one written in the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampdoctor.precision.nested import REDUCED


class AutocastOverride:
    """Every autocast region that is entered computes in another dtype than it names, until `remove()`.

    Regions that are switched off (`enabled=False` islands) stay off. Where several hold, the latest decides; they may
    be removed in any order.

    Args:
        dtype: float16 or bfloat16; None switches the regions off.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        if not _HOLDING:
            torch.autocast.__enter__ = _enter  # type: ignore[method-assign]
        _HOLDING.append(self)

    def remove(self) -> None:
        """Regions entered from now on compute in their own dtype; a second call does nothing."""
        if self in _HOLDING:
            _HOLDING.remove(self)
            if not _HOLDING and torch.autocast.__enter__ is _enter:  # else someone else's stands on it and calls it
                torch.autocast.__enter__ = _ENTER  # type: ignore[method-assign]


_HOLDING: list[AutocastOverride] = []
_ENTER = torch.autocast.__enter__


def _enter(region: Any) -> Any:
    kept = region._enabled, region.fast_dtype
    if _HOLDING and region._enabled and region.fast_dtype in REDUCED:
        dtype = _HOLDING[-1].dtype
        if dtype is None:
            region._enabled = False
        else:
            region.fast_dtype = dtype
    try:
        return _ENTER(region)  # type: ignore[no-untyped-call]
    finally:
        region._enabled, region.fast_dtype = kept


@contextmanager
def without_overrides() -> Iterator[None]:
    """Regions compute in the dtype that they name, whatever override holds outside (a change that was applied)."""
    kept = _HOLDING[:]
    _HOLDING.clear()
    try:
        yield
    finally:
        _HOLDING[:] = [*kept, *_HOLDING]
        if _HOLDING:
            torch.autocast.__enter__ = _enter  # type: ignore[method-assign]  # the last one inside took it off


@contextmanager
def override_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Every autocast region that is entered inside, also one that names fp16 itself, computes in `dtype`.

    A user's loss often opens `torch.autocast("cuda", dtype=torch.float16)` on its own; a replay in another precision,
    or in fp32 for reference, must reach it.

    Args:
        dtype: float16 or bfloat16; None switches the regions off.
    """
    override = AutocastOverride(dtype)
    try:
        yield
    finally:
        override.remove()
