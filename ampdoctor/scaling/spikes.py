"""Steps whose gradients exceed the rest: how often, how high, how long, and how heavy their tail is."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.scaling.closed_forms import LIM, highest_exponent, usual_log2

TAIL = math.log(2.0) / 2000
"""The quantile at which a scaler with torch's defaults settles."""
TAIL_SHARE = 0.1
FEWEST_FOR_TAIL = 300
"""With fewer steps, the top tenth is too few to fit."""
HEAVY = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    """Overflows of a trace at the largest scale that its bulk allows, in runs of consecutive steps.

    Attributes:
        steps: Number of steps of the trace.
        lengths: Number of steps of each run.
        heights: Binades by which the scale would have to fall for the run to fit, at least 1; inf if no scale fits.
        excess: 99 % quantile over all steps of the binades above the bulk's limit, 0.0 if fewer exceed it; runs that no
            scale fits do not count.
        tail_index: xi of a generalised Pareto distribution of the top tenth; None with fewer than 300 steps.
    """

    steps: int
    lengths: tuple[int, ...] = ()
    heights: tuple[float, ...] = ()
    excess: float = 0.0
    tail_index: float | None = None

    @property
    def isolated(self) -> bool:
        """Are there runs, with a median length of one step?"""
        return bool(self.lengths) and statistics.median(self.lengths) <= 1

    @property
    def height(self) -> float:
        """Median of `heights`; 0.0 without runs."""
        return statistics.median(self.heights) if self.heights else 0.0

    @property
    def spiky(self) -> bool:
        """Is the tail heavy? Then the recorded spikes say little about the height of the next."""
        return self.tail_index is not None and self.tail_index > HEAVY

    def longest_interval(self, growth_factor: float, backoff_factor: float) -> float:
        """Returns the longest growth interval, in clean steps, with which the scale still climbs; inf without spikes.

        Growth makes up for runs at a rate lambda, of D binades each, if a clean interval is likely enough:
        (1 - lambda)^N = D / (a + D), so N = ln(1 + a/D) / lambda. At that N the scale only wanders, so half of it is
        returned. A run backs off until it fits or ends, b binades a step whatever its height.

        Args:
            growth_factor: Above 1; a = log2 of it.
            backoff_factor: Between 0 and 1; b = -log2 of it.
        """
        if not self.lengths:
            return math.inf
        b = -math.log2(backoff_factor)
        runs = zip(self.lengths, self.heights, strict=True)
        backoffs = [min(n, math.ceil(h / b)) if h < math.inf else n for n, h in runs]
        lost = b * statistics.mean(backoffs)
        return math.log1p(math.log2(growth_factor) / lost) * self.steps / (2.0 * len(self.lengths))


def find_spikes(log2_amax: NDArray[np.float64]) -> Spikes:
    """Returns the spikes of a trace without its drift.

    Args:
        log2_amax: Shape (n,); -inf if all gradients were zero, +inf if one was not finite at any scale.
    """
    finite = log2_amax[np.isfinite(log2_amax)]
    if len(finite) == 0:
        return Spikes(steps=len(log2_amax))
    above = log2_amax + highest_exponent(usual_log2(finite.tolist(), TAIL)) - LIM
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], above >= 0.0, [False]])))
    runs = [above[begin:end] for begin, end in bounds.reshape(-1, 2)]
    measured = above[np.isfinite(log2_amax)]
    return Spikes(
        steps=len(log2_amax),
        lengths=tuple(len(run) for run in runs),
        heights=tuple(float(np.floor(run.max())) + 1.0 for run in runs),
        excess=float(max(0.0, np.quantile(measured, 0.99))),
        tail_index=tail_index(finite) if len(finite) >= FEWEST_FOR_TAIL else None,
    )


def tail_index(series: NDArray[np.float64]) -> float:
    """Returns the shape xi of a generalised Pareto distribution of the top tenth, by probability-weighted moments.

    Hosking and Wallis, 1987: with excesses y in ascending order, a0 = mean y and a1 = mean (1 - p) y,
    xi = 2 - a0 / (a0 - 2 a1). Below 0 the tail ends, 0 is exponential, from 0.5 on its variance is infinite.

    Args:
        series: Shape (n,), finite.
    """
    threshold = np.quantile(series, 1.0 - TAIL_SHARE)
    excess = np.sort(series[series > threshold]) - threshold
    if len(excess) < 2:
        return 0.0
    p = (np.arange(1, len(excess) + 1) - 0.35) / len(excess)
    a0, a1 = float(excess.mean()), float(((1.0 - p) * excess).mean())
    return 2.0 - a0 / (a0 - 2.0 * a1) if a0 > 2.0 * a1 else 0.0
