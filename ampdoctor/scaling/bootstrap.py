"""Makes more steps than were recorded: replicas of a trace, drawn in blocks, with its drift kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ampdoctor.scaling.trace import StepTrace

BLOCK = 50
"""Shortest mean block in steps, if the trace is long enough: bursts of overflows stay together."""
BLOCKS = 4
"""Minimum number of blocks in a trace: with fewer, a replica would be the trace itself, rotated."""
SLOPE_POINTS = 400
"""A longer trace is cut into this many pieces, and their medians give the slope: 10,000 steps have 50 million pairs."""
FEWEST_FOR_DRIFT = 8
"""With fewer steps, no order of them is rare enough: one order of 4 steps in 12 is monotone by chance."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A linear trend of log2 of the largest gradient.

    Attributes:
        slope: Binades per step; 0.0 if its confidence interval includes 0.
        low, high: The confidence interval (95 %).
        autocorrelation: Number of steps over which steps resemble each other, at least 1.
    """

    slope: float
    low: float
    high: float
    autocorrelation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Traces of `steps` steps each, made of recorded steps.

    Attributes:
        source: int64 of shape (replicas, steps): the index of the recorded step.
        shift: float64 of the same shape: by how many binades its gradients are larger than recorded.
        maxima: float64 of the same shape: largest magnitude, after the shift.
    """

    source: NDArray[np.int64]
    shift: NDArray[np.float64]
    maxima: NDArray[np.float64]


def resample(trace: StepTrace, drift: Drift, *, replicas: int, steps: int, seed: int = 0, first: int = 0) -> Replicas:
    """Draw replicas by the stationary bootstrap (Politis and Romano, 1994).

    Blocks start anywhere, have geometric lengths, and wrap round the end of the trace. Their mean length is the larger
    of `BLOCK` and the autocorrelation length, but at most a `BLOCKS`th of the trace. The drift is taken out of the
    recorded steps and added again by the replica's own step. It continues for as many steps as were recorded and then
    stops: a line through 50 steps says nothing about the ten thousandth, and gradients that fall as in a warm-up do not
    fall for ever.

    Args:
        trace: At least one step.
        drift: The drift of this trace.
        replicas: Number of replicas.
        steps: Length of each replica.
        seed: The same seed gives the same replicas; the first ones are the same for any number of them.
        first: Number of the first replica.
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
    residuals (Hamed and Rao, 1998, shortened); otherwise a slow wave would pass for a trend.

    Args:
        log2_amax: Shape (n,), may hold infinities.
    """
    at = np.flatnonzero(np.isfinite(log2_amax))
    if len(at) < FEWEST_FOR_DRIFT:
        return Drift(slope=0.0, low=-math.inf, high=math.inf, autocorrelation=1.0)
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
    return Drift(
        slope=kept,
        low=float(slopes[low]),
        high=float(slopes[high]),
        autocorrelation=autocorrelation_length(log2_amax[at] - kept * at),
    )


def autocorrelation_length(series: NDArray[np.float64]) -> float:
    """Returns 1 + 2 (rho_1 + rho_2 + ...) up to the first rho <= 0: how many steps count as one, at least 1.

    Args:
        series: Shape (n,), finite.
    """
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
