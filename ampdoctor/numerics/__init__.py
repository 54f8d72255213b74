"""Number formats, the histogram of magnitudes, the cheap non-finite check, and distances of tensors."""

from ampdoctor.numerics.distance import Distance
from ampdoctor.numerics.formats import FORMATS, FloatFormat, as_format, round_to
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.nonfinite import (
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
