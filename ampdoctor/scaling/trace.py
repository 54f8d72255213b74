"""Each recorded step as a loss scaler sees it, in arrays: all that a simulation needs of a profile."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.run_facts import SiteKind
from ampdoctor.numerics import FORMATS
from ampdoctor.numerics.rounding_error import flushed_counts, powers, squared_errors
from ampdoctor.ranges.profile import EXPONENTS, RangeProfile
from ampdoctor.scaling.shifts import Shift

Array = NDArray[np.float64]
_NONE = Shift()

_FACTORS_BELOW = EXPONENTS - len(EXPONENTS)
"""log2 of factors below the recorded ones: a loss that is scaled by hand has its smaller scales there."""


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
        """n, the number of steps."""
        return len(self.log2_amax)


def trace_of(profile: RangeProfile, without: Collection[str] = (), shift: Shift = _NONE) -> StepTrace:
    """Returns the trace of a profile.

    Args:
        profile: The measured ranges.
        without: Modules in fp32: their gradients do not count.
        shift: What the training does to gradients that the recording did not.
    """
    series, base = profile.series, math.log2(profile.run.base_scale)
    carried = base + shift.lowest  # the factor that the recorded gradients have at their lower end, unlike the loss's
    activations, weights = (profile.of_kind(kind, without) for kind in ("activation_grad", "weight_grad"))
    amax = series.amax[:, [*activations, *weights]].max(axis=1, initial=0.0)
    with np.errstate(divide="ignore"):
        log2_amax = np.log2(amax) - base - shift.highest
    power = series.power[:, weights]
    squared = np.einsum("nse,ns->ne", series.error[:, weights].astype(np.float64) ** 2, power)
    error = np.sqrt(_over(squared, power.sum(axis=1)))
    activation_flushed, weight_flushed = (_share(profile, sites) for sites in (activations, weights))
    if carried != 0.0:
        flushed, _ = _below(profile, "activation_grad", without)
        activation_flushed = _at_loss_scales(activation_flushed, flushed, carried)
        flushed, lost = _below(profile, "weight_grad", without)
        weight_flushed = _at_loss_scales(weight_flushed, flushed, carried)
        # an overflow counts as clipped in a curve: its lower neighbour must not be interpolated with it
        error = _at_loss_scales(np.minimum.accumulate(error, axis=1), lost, carried)
    error[log2_amax[:, None] + EXPONENTS >= math.log2(FORMATS["fp16"].overflow_at)] = math.inf
    return StepTrace(
        log2_amax=log2_amax, error=error, activation_flushed=activation_flushed, weight_flushed=weight_flushed
    )


def _share(profile: RangeProfile, sites: list[int]) -> Array:
    nonzero = profile.series.nonzero[:, sites].astype(np.float64)
    flushed = np.einsum("nse,ns->ne", profile.series.flushed[:, sites].astype(np.float64), nonzero)
    return _over(flushed, nonzero.sum(axis=1))


def _over(sums: Array, totals: Array) -> Array:
    """Divides each row by its total; 0 if that is 0."""
    total = totals[:, None]
    result: Array = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0.0)
    return result


def _below(profile: RangeProfile, kind: SiteKind, without: Collection[str]) -> tuple[Array, Array]:
    """Returns flushed share and error at the factors below the recorded ones, of all steps together, for each step.

    Returns:
        Two arrays of shape (n, 43); 0 for a step without such gradients.
    """
    counts = profile.merged(kind, without).counts.reshape(1, -1)
    flushed = _over(flushed_counts(counts, "fp16", _FACTORS_BELOW).astype(np.float64), counts.sum(axis=1))
    error: Array = np.sqrt(_over(squared_errors(counts, "fp16", _FACTORS_BELOW), powers(counts)))
    present = profile.series.nonzero[:, profile.of_kind(kind, without)].any(axis=1, keepdims=True)
    return present * flushed, present * error


def _at_loss_scales(curves: Array, below: Array, carried: float) -> Array:
    """Turns curves over factors of the measured gradients, which carry 2^carried, into curves over scales of the loss.

    Args:
        curves: Shape (n, 43), over 2^EXPONENTS.
        below: Shape (n, 43), over the factors below.
        carried: log2 of the factor that the measured gradients carry.
    """
    factors, wanted = np.concatenate([_FACTORS_BELOW, EXPONENTS]), EXPONENTS - carried
    return np.stack([np.interp(wanted, factors, curve) for curve in np.concatenate([below, curves], axis=1)])
