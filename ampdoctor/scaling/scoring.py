"""Scores candidates over replicas of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.targets import Framework
from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling.bootstrap import Replicas
from ampdoctor.scaling.choice import COMPOUNDING
from ampdoctor.scaling.settings import ScalerSettings
from ampdoctor.scaling.simulate import Simulation, simulate_lanes
from ampdoctor.scaling.trace import StepTrace

LOOKS = 500
"""Number of evenly spread steps of each replica whose errors are read: means over 200 replicas need no more."""
ERROR_WEIGHT = 10.0
"""Number of skipped steps that are as bad as a relative error of 1 in all of them (numerics: our default)."""

Quantiles = tuple[float, float, float]
"""5 %, 50 % and 95 % over the replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The effect of settings over the horizon; figures are medians over the replicas unless stated otherwise.

    Attributes:
        settings: As the framework runs them.
        skips: Number of skipped steps.
        skip_rate: Their share.
        relative_error: L2 error of the weight gradients from rounding each tensor once, mean over the taken steps.
        activation_flushed, weight_flushed: Share of nonzero gradient elements that become zero, same mean.
        final_scale: Loss scale at the end.
        poisoned: Share of the replicas in which an infinite inverse of the scale reaches the weights.
        ended: Share of the replicas in which the scaler raises an exception.
        objective: skip rate + 10 times the mean of max(0, 3.5 error - the tolerated error); smaller is better.
        typical: Number of the first replica whose skips are nearest to their median.
    """

    settings: ScalerSettings
    skips: Quantiles
    skip_rate: float
    relative_error: float
    activation_flushed: float
    weight_flushed: float
    final_scale: float
    poisoned: float
    ended: float
    objective: float
    typical: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one candidate over `steps` steps, each float64 of shape (replicas,), named as in `Expectation`.

    `excess` is the mean of max(0, compounded error - the tolerated error); `poisoned` and `ended` are 0 or 1.
    """

    skips: NDArray[np.float64]
    error: NDArray[np.float64]
    excess: NDArray[np.float64]
    activation_flushed: NDArray[np.float64]
    weight_flushed: NDArray[np.float64]
    final_scale: NDArray[np.float64]
    poisoned: NDArray[np.float64]
    ended: NDArray[np.float64]
    steps: int

    @property
    def objective(self) -> NDArray[np.float64]:
        """`Expectation.objective` of each replica."""
        return self.skips / self.steps + ERROR_WEIGHT * self.excess


def score_all(
    candidates: list[ScalerSettings],
    trace: StepTrace,
    replicas: Replicas,
    framework: Framework,
    tolerated: float,
) -> list[Scores]:
    """Returns each candidate's figures over each replica.

    Args:
        candidates: The settings, as the framework runs them.
        trace: The recorded steps.
        replicas: Replicas of this trace.
        framework: The framework whose rules they follow.
        tolerated: Relative error of a run up to which nothing is lost.
    """
    run = simulate_lanes(candidates, replicas.maxima, framework)
    return [_score(run, lane, trace, replicas, tolerated) for lane in range(len(candidates))]


def _score(run: Simulation, lane: int, trace: StepTrace, replicas: Replicas, tolerated: float) -> Scores:
    steps = replicas.source.shape[1]
    looks = np.linspace(0, steps - 1, min(steps, LOOKS)).astype(np.int64)
    source = replicas.source[:, looks]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(np.abs(run.scale[lane][:, looks])) + replicas.shift[:, looks]
    # the curve's next lower point: at the upper one, a taken step may count as overflowing
    lowest, highest = float(EXPONENTS[0]), float(EXPONENTS[-1])
    column = (np.clip(np.nan_to_num(np.floor(exponent), nan=highest), lowest, highest) - lowest).astype(np.int64)
    taken = ~(run.skipped[lane] | run.ended[lane])[:, looks]
    weight = taken / np.maximum(taken.sum(axis=1, keepdims=True), 1)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = (np.where(taken, values, 0.0) * weight).sum(axis=1)
        return result

    # Below the curves' first scale, the error of subnormals doubles with each binade until all is lost. A share of
    # zeros that is tiny there says nothing more: the error is a lower bound of what flushes.
    below = np.exp2(np.clip(lowest - exponent, 0.0, 64.0))
    error = np.minimum(trace.error[source, column] * below, 1.0)
    least = np.where(below > 1.0, error, 0.0)
    return Scores(
        skips=(run.skipped[lane] | run.ended[lane]).sum(axis=1).astype(np.float64),
        error=mean(error),
        excess=mean(np.maximum(0.0, COMPOUNDING * error - tolerated)),
        activation_flushed=mean(np.maximum(trace.activation_flushed[source, column], least)),
        weight_flushed=mean(np.maximum(trace.weight_flushed[source, column], least)),
        final_scale=run.scale[lane][:, -1],
        poisoned=run.poisoned[lane].any(axis=1).astype(np.float64),
        ended=run.ended[lane].any(axis=1).astype(np.float64),
        steps=steps,
    )


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    """Returns 5 %, 50 % and 95 % quantiles of a figure."""
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return (low, middle, high)


def expectation(settings: ScalerSettings, scores: Scores) -> Expectation:
    """Returns the summary of a candidate's figures."""
    return Expectation(
        settings=settings,
        skips=quantiles(scores.skips),
        skip_rate=float(np.median(scores.skips)) / scores.steps,
        relative_error=float(np.median(scores.error)),
        activation_flushed=float(np.median(scores.activation_flushed)),
        weight_flushed=float(np.median(scores.weight_flushed)),
        final_scale=float(np.median(scores.final_scale)),
        poisoned=float(scores.poisoned.mean()),
        ended=float(scores.ended.mean()),
        objective=float(np.median(scores.objective)),
        typical=int(np.abs(scores.skips - np.median(scores.skips)).argmin()),
    )
