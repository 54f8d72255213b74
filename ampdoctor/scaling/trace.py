"""What each recorded step says to a loss scaler, as arrays: all that a simulation needs of a profile."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics import FORMATS
from ampdoctor.ranges.profile import EXPONENTS, RangeProfile
from ampdoctor.scaling.shifts import Shift

Array = NDArray[np.float64]
_NONE = Shift()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """n recorded steps, in order; gradients are of the unscaled loss.

    Attributes:
        log2_amax: float64 of shape (n,): log2 of the largest magnitude of all half gradients; -inf where all were
            zero, +inf where one was not finite at any scale. A step overflows at the scale S iff amax S >= 65520.
        error: float64 of shape (n, 43): relative L2 error of the half weight gradients after rounding to fp16 at each
            of the scales 2^EXPONENTS; inf where something overflows; 0 where there is no nonzero gradient.
        activation_flushed: float64 of shape (n, 43): share (0 to 1) of the nonzero elements of half activation
            gradients that becomes zero at each scale.
        weight_flushed: The same for weight gradients.
    """

    log2_amax: Array
    error: Array
    activation_flushed: Array
    weight_flushed: Array

    @property
    def steps(self) -> int:
        """N."""
        return len(self.log2_amax)


def trace_of(profile: RangeProfile, without: Collection[str] = (), shift: Shift = _NONE) -> StepTrace:
    """The trace of a profile.

    Args:
        profile: What was measured.
        without: Modules in fp32: their gradients do not count.
        shift: What the training does to gradients that the recording did not.
    """
    trace = _recorded(profile, without)
    if shift == _NONE:
        return trace
    log2_amax = trace.log2_amax - shift.highest
    error = _at_loss_scales(np.where(np.isinf(trace.error), 1.0, trace.error), shift.lowest)
    error[log2_amax[:, None] + EXPONENTS >= math.log2(FORMATS["fp16"].overflow_at)] = math.inf
    return StepTrace(
        log2_amax=log2_amax,
        error=error,
        activation_flushed=_at_loss_scales(trace.activation_flushed, shift.lowest),
        weight_flushed=_at_loss_scales(trace.weight_flushed, shift.lowest),
    )


def _recorded(profile: RangeProfile, without: Collection[str]) -> StepTrace:
    series, base = profile.series, math.log2(profile.run.base_scale)
    activations, weights = (profile.of_kind(kind, without) for kind in ("activation_grad", "weight_grad"))
    amax = series.amax[:, [*activations, *weights]].max(axis=1, initial=0.0)
    with np.errstate(divide="ignore"):
        log2_amax = np.log2(amax) - base
    power = series.power[:, weights]
    squared = np.einsum("nse,ns->ne", series.error[:, weights].astype(np.float64) ** 2, power)
    total = power.sum(axis=1, keepdims=True)
    error = np.sqrt(np.divide(squared, total, out=np.zeros_like(squared), where=total > 0.0))
    error = _at_loss_scales(error, base)
    error[log2_amax[:, None] + EXPONENTS >= math.log2(FORMATS["fp16"].overflow_at)] = math.inf
    return StepTrace(
        log2_amax=log2_amax,
        error=error,
        activation_flushed=_at_loss_scales(_share(profile, activations), base),
        weight_flushed=_at_loss_scales(_share(profile, weights), base),
    )


def _share(profile: RangeProfile, sites: list[int]) -> Array:
    nonzero = profile.series.nonzero[:, sites].astype(np.float64)
    flushed = np.einsum("nse,ns->ne", profile.series.flushed[:, sites].astype(np.float64), nonzero)
    total = nonzero.sum(axis=1, keepdims=True)
    share: Array = np.divide(flushed, total, out=np.zeros_like(flushed), where=total > 0.0)
    return share


def _at_loss_scales(curves: Array, base: float) -> Array:
    """Curves over factors of the measured gradients, which carry 2^base, as curves over scales of the loss."""
    if base == 0.0:
        return curves
    wanted = EXPONENTS - base
    return np.stack([np.interp(wanted, EXPONENTS, curve) for curve in curves])
