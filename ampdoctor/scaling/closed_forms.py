"""Closed forms for the loss scale S = 2^s (fp16), from gradients' magnitudes.

An element flushes to zero iff |x| 2^s <= 2^-25 and overflows iff |x| 2^s >= 65520 (ties to even; both bisected on real
casts). Scales are powers of two throughout: scaling then commutes with rounding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.numerics.formats import FORMATS

FP16 = FORMATS["fp16"]
LIM = math.log2(FP16.overflow_at)  # log2 of the smallest magnitude that overflows: 15.99965

FEWEST_FOR_TREND = 8  # with fewer steps, a line explains too much by chance
SLOPE_STEPS = 64
MAX_SPREADS = 4.0
"""Largest multiple of the spread that is added to the median.

Student's quantile at the defaults' tail (ln 2 / 2000) is below 4 from 22 steps on. At 2, 3 and 4 steps it is 918, 38
and 15, which only shows how few steps were seen. A dynamic scaler pays one skipped step for each doubling too high, and
growth_interval steps of more underflow for each halving too low: such a low guess is expensive.
"""


def highest_exponent(log2_magnitude: float) -> int:
    """Returns the largest integer s at which a magnitude (its log2) does not overflow: ceil(LIM - Q) - 1."""
    return math.ceil(LIM - log2_magnitude) - 1


def loss_scale_limit(loss_magnitude: float) -> int | None:
    """Returns the largest s at which a loss that stays fp16 (of shape [1]) is finite; None for a loss of 0."""
    return highest_exponent(math.log2(loss_magnitude)) if loss_magnitude > 0 else None


def equilibrium_skip_rate(growth_factor: float, backoff_factor: float, growth_interval: int) -> float:
    """Returns the share of steps that a settled dynamic scaler skips: ln(1 + a / b) / N.

    a = log2(growth_factor), b = -log2(backoff_factor). From (1 - p)^N = b / (a + b), the level at which growth and
    backoff balance; simulations gave 1.03 to 1.2 times it for gradients that vary by a factor of two or more.
    GradScaler's defaults give 3.5e-4.
    """
    return math.log1p(math.log2(growth_factor) / -math.log2(backoff_factor)) / growth_interval


def upper_log2(series: Sequence[float], tail: float) -> float:
    """Returns the log2 magnitude that one further step exceeds with probability `tail`, at least the largest seen."""
    return max(usual_log2(series, tail), *series)


def usual_log2(series: Sequence[float], tail: float) -> float:
    """Returns the same for the bulk of the steps, which spikes (fewer than half of them) do not move.

    m + t sigma sqrt(1 + 1/n): median m, sigma = 1.4826 MAD, t Student's quantile with n - 1 degrees of freedom, at most
    `MAX_SPREADS`. A trend is not spread: if a line explains part of it, the rest counts (the gradients of a converging
    run fall by a factor of 2^20, and none of them is ever above the first).
    """
    count = len(series)
    middle = statistics.median(series)
    spread = min(_spread(series), _spread(_without_trend(series)))
    if count == 1 or spread == 0.0:
        return middle
    return middle + _spreads(tail, count - 1) * spread * math.sqrt(1.0 + 1.0 / count)


def _spread(series: Sequence[float]) -> float:
    middle = statistics.median(series)
    return 1.4826 * statistics.median(abs(x - middle) for x in series)


def _without_trend(series: Sequence[float]) -> Sequence[float]:
    """Returns the series minus its Theil-Sen line; the slope of a long series is that of `SLOPE_STEPS` steps."""
    if len(series) < FEWEST_FOR_TREND:
        return series
    at = np.unique(np.linspace(0, len(series) - 1, min(len(series), SLOPE_STEPS)).astype(np.int64))
    values = np.asarray(series)
    i, j = np.triu_indices(len(at), k=1)
    slope = float(np.median((values[at[j]] - values[at[i]]) / (at[j] - at[i])))
    left: list[float] = (values - slope * np.arange(len(values))).tolist()
    return left


def _spreads(tail: float, freedom: int) -> float:
    """Returns Student's quantile, at most `MAX_SPREADS` (Abramowitz and Stegun 26.7.5; off by at most 6e-4)."""
    z, n = -statistics.NormalDist().inv_cdf(tail), float(freedom)
    first, second = (z**3 + z) / (4 * n), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return min(z + first + second + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3), MAX_SPREADS)


# -- spikes: steps whose gradients exceed the rest --


TAIL = math.log(2.0) / 2000  # the quantile at which a scaler with torch's defaults settles
TAIL_SHARE = 0.1
FEWEST_FOR_TAIL = 300  # with fewer steps, the top tenth is too few to fit
HEAVY = 0.2  # `tail_index` from which on a tail is heavy


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    """Overflows of a trace at the largest scale that its bulk allows, in runs of consecutive steps.

    A run's height is log2 of the factor by which the scale would have to fall for it to fit, at least 1; inf if no
    scale fits.
    """

    steps: int  # of the trace
    lengths: tuple[int, ...] = ()  # steps of each run
    heights: tuple[float, ...] = ()
    spiky: bool = False  # the tail is heavy: the recorded spikes then do not bound the next

    @property
    def isolated(self) -> bool:
        """Whether there are runs, with a median length of one step."""
        return bool(self.lengths) and statistics.median(self.lengths) <= 1

    @property
    def height(self) -> float:
        """Median of `heights`; 0.0 without runs."""
        return statistics.median(self.heights) if self.heights else 0.0

    def longest_interval(self, growth_factor: float, backoff_factor: float) -> float:
        """Returns the longest growth interval, in clean steps, with which the scale still climbs; inf without spikes.

        Growth makes up for runs at a rate lambda, of D (log2) each, if a clean interval is likely enough:
        (1 - lambda)^N = D / (a + D), so N = ln(1 + a/D) / lambda, with a = log2(growth_factor). At that N the scale
        only wanders, so half of it is returned. A run backs off until it fits or ends, by b = -log2(backoff_factor) a
        step whatever its height.
        """
        if not self.lengths:
            return math.inf
        b = -math.log2(backoff_factor)
        runs = zip(self.lengths, self.heights, strict=True)
        backoffs = [min(n, math.ceil(h / b)) if h < math.inf else n for n, h in runs]
        lost = b * statistics.mean(backoffs)
        return math.log1p(math.log2(growth_factor) / lost) * self.steps / (2.0 * len(self.lengths))


def find_spikes(log2_amax: NDArray[np.float64]) -> Spikes:
    """Returns the spikes of a trace without its drift; -inf: all gradients were zero, +inf: one was never finite."""
    finite = log2_amax[np.isfinite(log2_amax)]
    if len(finite) == 0:
        return Spikes(steps=len(log2_amax))
    above = log2_amax + highest_exponent(usual_log2(finite.tolist(), TAIL)) - LIM
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], above >= 0.0, [False]])))
    runs = [above[begin:end] for begin, end in bounds.reshape(-1, 2)]
    return Spikes(
        steps=len(log2_amax),
        lengths=tuple(len(run) for run in runs),
        heights=tuple(float(np.floor(run.max())) + 1.0 for run in runs),
        spiky=len(finite) >= FEWEST_FOR_TAIL and tail_index(finite) > HEAVY,
    )


def tail_index(series: NDArray[np.float64]) -> float:
    """Returns the shape xi of a generalised Pareto distribution of the top tenth, by probability-weighted moments.

    Hosking and Wallis, 1987: with excesses y in ascending order, a0 = mean y and a1 = mean (1 - p) y,
    xi = 2 - a0 / (a0 - 2 a1). Below 0 the tail ends, 0 is exponential, from 0.5 on its variance is infinite.
    """
    threshold = np.quantile(series, 1.0 - TAIL_SHARE)
    excess = np.sort(series[series > threshold]) - threshold
    if len(excess) < 2:
        return 0.0
    p = (np.arange(1, len(excess) + 1) - 0.35) / len(excess)
    a0, a1 = float(excess.mean()), float(((1.0 - p) * excess).mean())
    return 2.0 - a0 / (a0 - 2.0 * a1) if a0 > 2.0 * a1 else 0.0
