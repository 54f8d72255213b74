"""The thresholds that a user may move: what counts as lost, as harmful, as too many."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ampdoctor.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Defaults of `profile` and `recommend`; the derivations are on the rules' pages.

    Attributes:
        flushed: tau, share of nonzero gradient elements that may become zero (adaptive loss scaling aims at 1e-3; Zhao
            et al., arXiv 1910.12385).
        skip_rate: rho, share of steps that a settled scaler may skip (OpenSeq2Seq's LogMax aims at 1e-3).
        error_note: Relative L2 error of the weight gradients that is as good as bf16's (measured: 3.3e-3 to 5.5e-3).
        error_warning: From here on training was measurably worse (12-block transformer, two seeds).
        error_bad: From here on it failed to learn.
        fp32_share: Share of the parameters beyond which fp32 modules are no longer the cheap answer (our default).
        horizon: Steps ahead that a simulation covers: a short training run.

    Raises:
        UsageError: A share is not between 0 and 1, the errors do not ascend, or the horizon is below 1.
    """

    flushed: float = 1e-3
    skip_rate: float = 1e-3
    error_note: float = 5e-3
    error_warning: float = 2e-2
    error_bad: float = 0.1
    fp32_share: float = 0.2
    horizon: int = 10_000

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "horizon" and not (math.isfinite(value) and 0.0 < value < 1.0):
                raise UsageError(f"{_named(entry.name)} is {value:g}, not a share between 0 and 1")
        if not self.error_note <= self.error_warning <= self.error_bad:
            errors = ", ".join(_OPTIONS[name] for name in ("error_note", "error_warning", "error_bad"))
            raise UsageError(f"the thresholds of the gradient error must ascend: {errors}")
        if not 1 <= self.horizon <= MAX_HORIZON:
            raise UsageError(f"the horizon is {self.horizon} steps, not between 1 and {MAX_HORIZON}")


_OPTIONS = {
    "flushed": "--tau",
    "skip_rate": "--rho",
    "error_note": "--error-note",
    "error_warning": "--error-warning",
    "error_bad": "--error-bad",
    "fp32_share": "--fp32-share",
}
"""The command line's name of each."""


def _named(field: str) -> str:
    return f"the threshold {field} ({_OPTIONS[field]})"


MAX_HORIZON = 1_000_000
"""A simulation goes through it step by step."""
