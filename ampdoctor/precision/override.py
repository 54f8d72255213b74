"""Another autocast dtype than the one written in the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampdoctor.precision.nested import REDUCED


@contextmanager
def override_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Every autocast region that is entered inside, also one that names fp16 itself, computes in `dtype`.

    A user's loss often opens `torch.autocast("cuda", dtype=torch.float16)` on its own; a replay in another precision,
    or in fp32 for reference, must reach it. Regions that are switched off (`enabled=False` islands) stay off.

    Args:
        dtype: float16 or bfloat16; None switches the regions off.
    """
    original = torch.autocast.__enter__

    def enter(region: Any) -> Any:
        kept = region._enabled, region.fast_dtype
        if region._enabled and region.fast_dtype in REDUCED:
            if dtype is None:
                region._enabled = False
            else:
                region.fast_dtype = dtype
        try:
            return original(region)  # type: ignore[no-untyped-call]
        finally:
            region._enabled, region.fast_dtype = kept

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]
