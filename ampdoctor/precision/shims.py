"""Differences of the installed torch from the version that ampdoctor is written for: for reports and `env`."""

from __future__ import annotations

from ampdoctor.hooks import torch_internals as of_loops
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.precision import kernels as of_casts


def torch_shims() -> dict[str, str]:
    """Replacements for what this torch lacks, and measured differences: short names, each with a sentence."""
    shims = {**of_loops.shims(), **of_casts.shims()}
    if FORMATS["e4m3fn"].overflow_result == "nan":
        shims["e4m3fn-overflows-to-nan"] = "A cast to float8_e4m3fn makes NaN of what is beyond its range (measured)."
    return shims
