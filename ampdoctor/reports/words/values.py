"""Values for JSON: floats of six digits, and a form for values that JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

_EXACT_INTEGERS = 2.0**53


def plain(value: Any, path: str = "report") -> Any:
    """Return `value` as JSON values.

    Floats keep 6 significant digits; whole numbers below 2^53 and powers of two stay exact, because loss scales and the
    limits of formats are such and are meant to be copied. Non-finite floats become "NaN", "Infinity" and "-Infinity".
    Dataclasses become objects, sets sorted lists; NumPy scalars count as numbers.

    Raises:
        TypeError: A value is none of these; the message names its path.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else _float(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), f"{path}.{field.name}") for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, AbstractSet):
        value = sorted(value, key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{path} is a {type(value).__name__}, which JSON has no form for")


def _float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    whole = abs(value) < _EXACT_INTEGERS and value.is_integer()
    if whole or abs(math.frexp(value)[0]) == 0.5:  # frexp gives a power of two the mantissa 0.5
        return value
    return float(f"{value:.6g}")
