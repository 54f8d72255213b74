"""Number formats, the histogram of magnitudes, the cheap non-finite check, and distances of tensors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ampdoctor.numerics.formats import FORMATS, FloatFormat, as_format, round_to

if TYPE_CHECKING:
    from ampdoctor.numerics.histogram import Histogram
    from ampdoctor.numerics.tensors import (
        Distance,
        TensorStats,
        describe,
        extremes,
        extremes_of_each,
        nonfinite_counts,
        nonfinite_flag,
    )

__all__ = [
    "FORMATS",
    "Distance",
    "FloatFormat",
    "Histogram",
    "TensorStats",
    "as_format",
    "describe",
    "extremes",
    "extremes_of_each",
    "nonfinite_counts",
    "nonfinite_flag",
    "round_to",
]

_HOME = {
    "Distance": "ampdoctor.numerics.tensors",
    "Histogram": "ampdoctor.numerics.histogram",
    "TensorStats": "ampdoctor.numerics.tensors",
    "describe": "ampdoctor.numerics.tensors",
    "extremes": "ampdoctor.numerics.tensors",
    "extremes_of_each": "ampdoctor.numerics.tensors",
    "nonfinite_counts": "ampdoctor.numerics.tensors",
    "nonfinite_flag": "ampdoctor.numerics.tensors",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use: GradScaler's rules and a table of formats need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ampdoctor.numerics' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
