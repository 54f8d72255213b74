"""The number formats of mixed precision as a table of data, and correct rounding to any of them.

The numbers were enumerated or bisected on real casts; they do not come from `torch.finfo`, which is wrong in places (it
gives 0.125 as the eps of float8_e5m2fnuz, whose spacing at 1 is 0.25).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError

OverflowResult = Literal["inf", "nan", "saturate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """One binary floating-point format. All magnitudes are exact float64 values.

    Attributes:
        name: The key of `FORMATS`.
        min_subnormal: Smallest magnitude above zero.
        flush_at: Magnitudes up to and including this one become zero (half of `min_subnormal`: the tie goes to the even
            zero).
        overflow_at: Magnitudes from this one on round beyond `max`. Below it a saturating format still rounds to `max`.
    """

    name: str
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float
    flush_at: float
    overflow_at: float

    @property
    def overflow_result(self) -> OverflowResult:
        """Result of the installed torch's cast of a magnitude of `overflow_at` or more; `saturate` keeps `max`."""
        return _beyond_e4m3fn() if self.name == "e4m3fn" else "inf"


@functools.cache
def _beyond_e4m3fn() -> OverflowResult:
    # Measured: NaN up to torch 2.12. Imported here, so that reading a log needs no torch.
    import torch
    from torch._C import DisableTorchFunction
    from torch.utils._python_dispatch import _disable_current_modes

    with DisableTorchFunction(), _disable_current_modes():  # the caller may have modes on
        beyond = torch.tensor(1e6, device="cpu").to(torch.float8_e4m3fn).to(torch.float32)
        return "nan" if bool(beyond.isnan()) else "saturate"


_ROWS = (
    # bits of the mantissa, the largest value, log2 of the smallest normal one
    ("fp16", 10, 65504.0, -14),
    ("bf16", 7, (2.0 - 2.0**-7) * 2.0**127, -126),
    ("fp32", 23, (2.0 - 2.0**-23) * 2.0**127, -126),
    ("e4m3fn", 3, 448.0, -6),
    ("e5m2", 2, 57344.0, -14),
)


def _table() -> dict[str, FloatFormat]:
    found = {
        name: FloatFormat(
            name=name,
            mantissa_bits=mantissa_bits,
            max=largest,
            min_normal=2.0**least,
            min_subnormal=2.0 ** (least - mantissa_bits),
            flush_at=2.0 ** (least - mantissa_bits - 1),
            overflow_at=largest + math.ldexp(0.25, math.frexp(largest)[1] - mantissa_bits),  # half a spacing further
        )
        for name, mantissa_bits, largest, least in _ROWS
    }
    # The tie at 464 goes down to 448, whose code is even, so overflow starts just above the tie.
    found["e4m3fn"] = replace(found["e4m3fn"], overflow_at=math.nextafter(464.0, math.inf))
    return found


FORMATS: Mapping[str, FloatFormat] = MappingProxyType(_table())  # fp32 is a target too, for what fp64 loses in it


def as_format(fmt: FloatFormat | str) -> FloatFormat:
    """Return the format itself, or the one with this name; raises UsageError for an unknown name."""
    if isinstance(fmt, FloatFormat):
        return fmt
    found = FORMATS.get(fmt)
    if found is None:
        raise UsageError(f"unknown number format {fmt!r}; known are {', '.join(FORMATS)}")
    return found


def spacing(magnitudes: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.float64]:
    """Distance of a format's values at each magnitude: 2^(floor(log2 x) - mantissa_bits), at least the subnormals'."""
    exponent = np.frexp(magnitudes)[1] - 1
    step: NDArray[np.float64] = np.maximum(np.ldexp(1.0, exponent - fmt.mantissa_bits), fmt.min_subnormal)
    return step


def round_to(magnitudes: NDArray[np.float64], fmt: FloatFormat) -> NDArray[np.float64]:
    """Round non-negative finite magnitudes to a format: to nearest, ties to even, one rounding from float64.

    Overflow gives inf, nan or the format's max, depending on its `overflow_result`.
    """
    inside = np.minimum(magnitudes, fmt.overflow_at)
    step = spacing(inside, fmt)
    rounded: NDArray[np.float64] = np.rint(inside / step) * step
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": fmt.max}[fmt.overflow_result]
    rounded[magnitudes >= fmt.overflow_at] = beyond
    return rounded
