"""Recorded steps in arrays, with all that a simulation of a loss scaler needs of a profile."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics.formats import FORMATS
from ampdoctor.ranges.profile import EXPONENTS, RangeProfile

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """n recorded steps, in order, at each of the scales 2^EXPONENTS; gradients are of the unscaled loss.

    A step overflows at the scale S iff amax S >= 65520. -inf: all half gradients were zero; +inf: one was not finite at
    any scale. The error is inf where something overflows, and 0 where there is no nonzero gradient.
    """

    log2_amax: Array  # (n,): log2 of the largest magnitude of all half gradients
    error: Array  # (n, 43): relative L2 error of the half weight gradients after rounding to fp16
    activation_flushed: Array  # (n, 43): share of the nonzero elements of half activation gradients that becomes zero
    weight_flushed: Array  # the same for weight gradients

    @property
    def steps(self) -> int:
        """n, the number of steps."""
        return len(self.log2_amax)


def trace_of(profile: RangeProfile, without: Collection[str] = ()) -> StepTrace:
    """Returns the trace of a profile; gradients of the modules in `without`, which are in fp32, do not count."""
    series, base = profile.series, math.log2(profile.run.base_scale)
    activations, weights = (profile.of_kind(kind, without) for kind in ("activation_grad", "weight_grad"))
    amax = series.amax[:, [*activations, *weights]].max(axis=1, initial=0.0)
    with np.errstate(divide="ignore"):
        log2_amax = np.log2(amax) - base
    power = series.power[:, weights]
    squared = np.einsum("nse,ns->ne", series.error[:, weights].astype(np.float64) ** 2, power)
    error = np.sqrt(_over(squared, power.sum(axis=1)))
    activation_flushed, weight_flushed = (_share(profile, sites) for sites in (activations, weights))
    if base != 0.0:
        activation_flushed, weight_flushed = (_at_loss_scales(f, base) for f in (activation_flushed, weight_flushed))
        # an overflow counts as clipped in a curve: its lower neighbour must not be interpolated with it
        error = _at_loss_scales(np.minimum.accumulate(error, axis=1), base)
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


def _at_loss_scales(curves: Array, carried: float) -> Array:
    """Turns curves over factors of the measured gradients, which carry 2^carried, into curves over scales of the loss.

    Below the first recorded factor a curve stays what it is there: at least as much is lost.
    """
    return np.stack([np.interp(EXPONENTS - carried, EXPONENTS, curve) for curve in curves])


# -- replicas: more steps than were recorded, drawn in blocks, with the trace's drift --


BLOCK = 50  # shortest mean block in steps, if the trace is long enough: bursts of overflows stay together
BLOCKS = 4  # least number of blocks in a trace: with fewer, a replica would be the trace itself, rotated
SLOPE_POINTS = 400
"""A longer trace is cut into this many pieces, and their medians give the slope: 10,000 steps have 50 million pairs."""
FEWEST_FOR_DRIFT = 8
"""With fewer steps, no order of them is rare enough: one order of 4 steps in 12 is monotone by chance."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A linear trend of log2 of the largest gradient."""

    slope: float  # per step; 0.0 if the confidence interval (95 %) includes 0
    autocorrelation: float  # number of steps over which steps resemble each other, at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Traces of `steps` steps each, made of recorded steps; all arrays have the shape (replicas, steps)."""

    source: NDArray[np.int64]  # index of the recorded step
    shift: NDArray[np.float64]  # log2 of the factor by which its gradients are larger than recorded
    maxima: NDArray[np.float64]  # largest magnitude, after the shift


def resample(trace: StepTrace, drift: Drift, *, replicas: int, steps: int, seed: int = 0, first: int = 0) -> Replicas:
    """Draws replicas by the stationary bootstrap (Politis and Romano, 1994).

    Blocks start anywhere, have geometric lengths, and wrap round the end of the trace. Their mean length is the larger
    of `BLOCK` and the autocorrelation length, but at most a `BLOCKS`th of the trace. The drift is removed from the
    recorded steps and added again by the replica's own step. It continues for as many steps as were recorded and then
    stops: a line through 50 steps does not reach the ten thousandth, and gradients that fall as in a warm-up do not
    fall for ever.

    The same seed gives the same replicas: the first ones are the same for any number of them. `first` is the number of
    the first replica.
    """
    n = trace.steps
    mean_block = max(1.0, min(max(BLOCK, drift.autocorrelation), n / BLOCKS))
    source = np.stack(
        [_blocks(np.random.default_rng((seed, r)), n, mean_block, steps) for r in range(first, first + replicas)]
    )
    reached = np.minimum(np.arange(steps), 2 * n)
    shift = (drift.slope * (reached - source)).astype(np.float64)
    return Replicas(source=source, shift=shift, maxima=np.exp2(trace.log2_amax[source] + shift))


def _blocks(generator: np.random.Generator, n: int, mean_block: float, steps: int) -> NDArray[np.int64]:
    begins = generator.random(steps) < 1.0 / mean_block
    begins[0] = True
    starts = generator.integers(0, n, steps)
    first = np.maximum.accumulate(np.where(begins, np.arange(steps), 0))
    recorded: NDArray[np.int64] = (starts[first] + np.arange(steps) - first) % n
    return recorded


def find_drift(log2_amax: NDArray[np.float64]) -> Drift:
    """Returns the Theil-Sen slope with Sen's confidence interval (1968), over the steps with a finite nonzero gradient.

    The interval is that of Kendall's statistic. Its variance is multiplied by the autocorrelation length of the
    residuals (Hamed and Rao, 1998, shortened); otherwise a slow wave would count as a trend.
    """
    at = np.flatnonzero(np.isfinite(log2_amax))
    if len(at) < FEWEST_FOR_DRIFT:
        return Drift(slope=0.0, autocorrelation=1.0)
    pieces = min(len(at), SLOPE_POINTS)
    x = np.array([np.median(piece) for piece in np.array_split(at, pieces)])
    y = np.array([np.median(piece) for piece in np.array_split(log2_amax[at], pieces)])
    i, j = np.triu_indices(pieces, k=1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    slope = float(np.median(slopes))
    resembling = autocorrelation_length(y - slope * x)
    variance = pieces * (pieces - 1) * (2 * pieces + 5) / 18.0 * resembling
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0) * math.sqrt(variance)
    low = max(0, math.floor((len(slopes) - reach) / 2.0))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2.0))
    significant = reach < len(slopes) and (slopes[low] > 0.0 or slopes[high] < 0.0)
    kept = slope if significant else 0.0
    return Drift(slope=kept, autocorrelation=autocorrelation_length(log2_amax[at] - kept * at))


def autocorrelation_length(series: NDArray[np.float64]) -> float:
    """Returns 1 + 2 (rho_1 + rho_2 + ...) up to the first rho <= 0: how many steps count as one, at least 1."""
    n = len(series)
    centred = series - series.mean()
    spectrum = np.fft.rfft(centred, 2 * n)
    covariance = np.fft.irfft(spectrum * spectrum.conj())[:n]
    if covariance[0] <= 1e-24 * max(1.0, float(np.square(series).sum())):  # constant, but for rounding
        return 1.0
    rho = covariance / covariance[0]
    below = np.flatnonzero(rho <= 0.0)
    end = int(below[0]) if len(below) else n
    return float(min(n, 1.0 + 2.0 * rho[1:end].sum()))
