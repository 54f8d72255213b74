"""The scaler's settings that serve a trace best, and whether they are worth a change.

Candidates are run by the exact rules of the framework over replicas of the trace (`bootstrap`): first all of them over a
few, then the best and those that stand for "no change" over many, the same replicas for all. The optimum is flat: what
runs already is left alone unless something beats it by more than noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.frameworks import Framework
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.scaling import derived
from ampdoctor.scaling.bootstrap import Drift, Replicas, find_drift, resample
from ampdoctor.scaling.choice import COMPOUNDING
from ampdoctor.scaling.rules import DEFAULTS, RULES, TorchLanes, expressible
from ampdoctor.scaling.settings import Bound, ScalerSettings
from ampdoctor.scaling.simulate import Simulation, simulate_lanes
from ampdoctor.scaling.spikes import Spikes, find_spikes
from ampdoctor.scaling.trace import EXPONENTS, StepTrace

REPLICAS = 200
FIRST_REPLICAS = 8
"""Of the first pass, over all candidates."""
MOST_STEPS = 4_000_000
"""Replicas times steps at the most: a long horizon has fewer replicas, as its figures vary less from one to the next."""
FEWEST_REPLICAS = 16
LOOKS = 500
"""Steps of each replica, evenly spread, at which errors are read off: means over 200 replicas need no more."""
ERROR_WEIGHT = 10.0
"""Steps skipped that are as bad as a relative error of 1 in all of them (numerics: our default)."""
WORTH_SKIPS = 1e-3
"""Fewer skips pay from this share of the steps on: less is within what equal runs differ by ..."""
WORTH_ERROR = 1e-3
"""... and less error from this relative error on."""
INTERVALS = (200, 500, 1000, 2000)
BACKOFFS = (0.25, 0.5, 0.75)
NEIGHBOURS = (-2, -1, 0, 1, 2)
"""Binades around the scale in closed form."""
CENSORED_MOST = 0.2
"""With a larger share of steps whose largest gradient is not known, the trace says little about its own tail."""
FEWEST_STEPS = 50

Quantiles = tuple[float, float, float]
"""5 %, 50 % and 95 % over the replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What settings do over the horizon; medians over the replicas where nothing else is said.

    Attributes:
        settings: As the framework runs them.
        skips: Steps skipped.
        skip_rate: Their share.
        relative_error: L2 error of the weight gradients from rounding each tensor once, mean over the taken steps.
        activation_flushed, weight_flushed: Share of nonzero gradient elements that become zero, likewise.
        final_scale: Loss scale at the end.
        poisoned: Share of the replicas in which an infinite inverse of the scale reaches the weights.
        ended: Share in which the scaler raises an exception.
        objective: skip rate + 10 times the mean of max(0, 3.5 error - what is tolerated); smaller is better.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What the best candidate gains over the settings in use; differences are paired by replica.

    Attributes:
        objective: Of `Expectation`: in use minus best.
        skip_rate: Median difference.
        relative_error: Median difference, as a run would have it (compounded).
        headroom: Binades that the scale in use starts below the one in closed form; negative above it.
    """

    objective: Quantiles
    skip_rate: float
    relative_error: float
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How far to trust it.

    Attributes:
        steps: Recorded.
        censored: Share of them whose largest gradient is not known (skipped fp16 steps).
        exceedances: Steps of the horizon m expected to exceed the largest of the n recorded ones: m / (n + 1). At a
            static scale these are overflows.
        drift: Of the trace.
        spikes: Of the trace.
    """

    steps: int
    censored: float
    exceedances: float
    drift: Drift
    spikes: Spikes

    @property
    def low(self) -> bool:
        """A recording of 50 steps in fp32 or bf16 should come first."""
        return self.steps < FEWEST_STEPS or self.censored > CENSORED_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer.

    Attributes:
        settings: To use, as the framework runs them; those in use where nothing is worth a change.
        change: They differ from those in use (the framework's defaults where there are none).
        margin: Between those in use and the best candidate.
        bounds: What holds each setting of the closed form, by the name of the setting; "min_scale" is an alarm.
        expected_current: None where the run has no scaler.
        expected_default: The framework's defaults.
        expected_chosen: `settings`.
        confidence: How far to trust it.
    """

    settings: ScalerSettings
    change: bool
    margin: Margin
    bounds: dict[str, Bound]
    expected_current: Expectation | None
    expected_default: Expectation
    expected_chosen: Expectation
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class _Scores:
    """Figures of one candidate, each float64 of shape (replicas,)."""

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
        return self.skips / self.steps + ERROR_WEIGHT * self.excess


def search(
    trace: StepTrace,
    *,
    current: ScalerSettings | None,
    start: Bound,
    framework: Framework,
    thresholds: Thresholds,
    censored: float = 0.0,
    remaining_steps: int | None = None,
) -> Outcome:
    """The settings to use with a trace.

    Args:
        trace: At least one step.
        current: The run's scaler; None where it has none.
        start: log2 of the largest scale at which no gradient is expected to overflow, and what holds it.
        framework: Whose scaler it is.
        thresholds: What is tolerated; the horizon is used where `remaining_steps` is None.
        censored: Share of the steps whose largest gradient is not known.
        remaining_steps: Steps that the run still has; None where nobody knows.
    """
    horizon = remaining_steps if remaining_steps is not None else thresholds.horizon
    drift = find_drift(trace.log2_amax)
    spikes = find_spikes(trace.log2_amax - drift.slope * np.arange(trace.steps))
    bounds = closed_form(trace, drift, spikes, start, framework, thresholds, remaining_steps)
    default = DEFAULTS[framework]
    incumbent = current if current is not None else default
    closed = _settings_of(bounds, framework)
    candidates = _unique([incumbent, default, closed, *_grid(closed, framework)])

    few = resample(trace, drift, replicas=min(FIRST_REPLICAS, _replicas(horizon)), steps=horizon)
    first = _scores(candidates, trace, few, framework, thresholds)
    ranked = sorted(candidates, key=lambda c: _rank(first[candidates.index(c)], c, incumbent, thresholds))
    finalists = _unique([incumbent, default, closed, ranked[0]])
    many = resample(trace, drift, replicas=_replicas(horizon), steps=horizon)
    scores = dict(zip(finalists, (_scores([f], trace, many, framework, thresholds)[0] for f in finalists), strict=True))

    best = min(finalists, key=lambda c: _rank(scores[c], c, incumbent, thresholds))
    margin = _margin(scores[incumbent], scores[best], incumbent, start)
    chosen = incumbent
    if _worth_it(scores[incumbent], scores[best]):
        as_good = [c for c in finalists if not _worth_it(scores[c], scores[best])]
        chosen = min(as_good, key=lambda c: (_changes(c, incumbent), c != closed))
    return Outcome(
        settings=chosen,
        change=chosen != incumbent,
        margin=margin,
        bounds=bounds,
        expected_current=_expectation(current, scores[current]) if current is not None else None,
        expected_default=_expectation(default, scores[default]),
        expected_chosen=_expectation(chosen, scores[chosen]),
        confidence=Confidence(
            steps=trace.steps,
            censored=censored,
            exceedances=horizon / (trace.steps + 1),
            drift=drift,
            spikes=spikes,
        ),
    )


def closed_form(
    trace: StepTrace,
    drift: Drift,
    spikes: Spikes,
    start: Bound,
    framework: Framework,
    thresholds: Thresholds,
    remaining_steps: int | None,
) -> dict[str, Bound]:
    """Each setting with what holds it: scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale."""
    fixed = RULES[framework] is not TorchLanes
    bounds = {"scale": Bound(value=2.0**start.value, by=start.by)}
    if fixed:
        backoff = Bound(value=0.5, by="the framework, which halves")
    else:
        backoff = derived.backoff_factor(spikes, hysteresis_available=False)
    interval = derived.growth_interval(
        2.0,
        backoff.value,
        skip_rate=thresholds.skip_rate,
        drift=drift.slope,
        steps_left=remaining_steps,
        spikes=spikes,
    )
    growth = (
        Bound(value=2.0, by="the framework, which doubles")
        if fixed
        else derived.growth_factor(drift.slope, interval.value)
    )
    bounds["growth_factor"] = growth
    bounds["backoff_factor"] = backoff
    bounds["growth_interval"] = interval
    bounds["hysteresis"] = derived.hysteresis(spikes)
    bounds["min_scale"] = derived.alarm_scale(_lowest(trace, thresholds))
    return bounds


def _settings_of(bounds: dict[str, Bound], framework: Framework) -> ScalerSettings:
    asked = ScalerSettings(
        scale=bounds["scale"].value,
        growth_factor=bounds["growth_factor"].value,
        backoff_factor=bounds["backoff_factor"].value,
        growth_interval=int(bounds["growth_interval"].value),
        hysteresis=int(bounds["hysteresis"].value),
    )
    return expressible(asked, framework)


def _grid(closed: ScalerSettings, framework: Framework) -> list[ScalerSettings]:
    return [
        expressible(
            replace(closed, scale=closed.scale * 2.0**binades, growth_interval=interval, backoff_factor=backoff),
            framework,
        )
        for binades in NEIGHBOURS
        for interval in INTERVALS
        for backoff in BACKOFFS
    ]


def _unique(settings: Iterable[ScalerSettings]) -> list[ScalerSettings]:
    return list(dict.fromkeys(settings))


def _replicas(horizon: int) -> int:
    return max(FEWEST_REPLICAS, min(REPLICAS, MOST_STEPS // max(1, horizon)))


def _lowest(trace: StepTrace, thresholds: Thresholds) -> int:
    """Smallest recorded exponent at which no more than tau of the gradients becomes zero, of both kinds."""
    flushed = np.maximum(trace.activation_flushed.mean(axis=0), trace.weight_flushed.mean(axis=0))
    serving = np.flatnonzero(flushed <= thresholds.flushed)
    return int(EXPONENTS[serving[0]]) if len(serving) else int(EXPONENTS[-1])


def _scores(
    candidates: list[ScalerSettings],
    trace: StepTrace,
    replicas: Replicas,
    framework: Framework,
    thresholds: Thresholds,
) -> list[_Scores]:
    run = simulate_lanes(candidates, replicas.maxima, framework)
    return [_score(run, lane, trace, replicas, thresholds) for lane in range(len(candidates))]


def _score(run: Simulation, lane: int, trace: StepTrace, replicas: Replicas, thresholds: Thresholds) -> _Scores:
    steps = replicas.source.shape[1]
    looks = np.linspace(0, steps - 1, min(steps, LOOKS)).astype(np.int64)
    source = replicas.source[:, looks]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(np.abs(run.scale[lane][:, looks])) + replicas.shift[:, looks]
    # the curve's next point below: at the one above a taken step may count as overflowing
    lowest, highest = float(EXPONENTS[0]), float(EXPONENTS[-1])
    column = (np.clip(np.nan_to_num(np.floor(exponent), nan=highest), lowest, highest) - lowest).astype(np.int64)
    taken = ~(run.skipped[lane] | run.ended[lane])[:, looks]
    weight = taken / np.maximum(taken.sum(axis=1, keepdims=True), 1)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = (np.where(taken, values, 0.0) * weight).sum(axis=1)
        return result

    error = trace.error[source, column]
    return _Scores(
        skips=(run.skipped[lane] | run.ended[lane]).sum(axis=1).astype(np.float64),
        error=mean(error),
        excess=mean(np.maximum(0.0, COMPOUNDING * error - thresholds.error_note)),
        activation_flushed=mean(trace.activation_flushed[source, column]),
        weight_flushed=mean(trace.weight_flushed[source, column]),
        final_scale=run.scale[lane][:, -1],
        poisoned=run.poisoned[lane].any(axis=1).astype(np.float64),
        ended=run.ended[lane].any(axis=1).astype(np.float64),
        steps=steps,
    )


def _rank(
    scores: _Scores, settings: ScalerSettings, incumbent: ScalerSettings, thresholds: Thresholds
) -> tuple[float, float, float, int]:
    """Smaller is better: runs that are ruined, skips beyond what is tolerated, the objective, changes."""
    ruined = float(np.maximum(scores.poisoned, scores.ended).mean())
    skip_rate = float(np.median(scores.skips)) / scores.steps
    return (
        ruined,
        max(0.0, skip_rate - thresholds.skip_rate),
        float(np.median(scores.objective)),
        _changes(settings, incumbent),
    )


def _changes(settings: ScalerSettings, incumbent: ScalerSettings) -> int:
    return sum(getattr(settings, f.name) != getattr(incumbent, f.name) for f in fields(settings))


def _worth_it(used: _Scores, best: _Scores) -> bool:
    """Whether the second is better than the first by more than noise."""
    ruined = np.maximum(used.poisoned, used.ended) - np.maximum(best.poisoned, best.ended)
    if ruined.mean() > 0.0:
        return True
    low, _, _ = _quantiles(used.objective - best.objective)
    fewer_skips = float(np.median(used.skips - best.skips)) / used.steps
    less_error = COMPOUNDING * float(np.median(used.error - best.error))
    return low > 0.0 and (fewer_skips >= WORTH_SKIPS or less_error >= WORTH_ERROR)


def _margin(used: _Scores, best: _Scores, incumbent: ScalerSettings, start: Bound) -> Margin:
    usable = incumbent.scale > 0.0 and math.isfinite(incumbent.scale)
    return Margin(
        objective=_quantiles(used.objective - best.objective),
        skip_rate=float(np.median(used.skips - best.skips)) / used.steps,
        relative_error=COMPOUNDING * float(np.median(used.error - best.error)),
        headroom=start.value - math.log2(incumbent.scale) if usable else math.nan,
    )


def _quantiles(values: NDArray[np.float64]) -> Quantiles:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return (low, middle, high)


def _expectation(settings: ScalerSettings, scores: _Scores) -> Expectation:
    return Expectation(
        settings=settings,
        skips=_quantiles(scores.skips),
        skip_rate=float(np.median(scores.skips)) / scores.steps,
        relative_error=float(np.median(scores.error)),
        activation_flushed=float(np.median(scores.activation_flushed)),
        weight_flushed=float(np.median(scores.weight_flushed)),
        final_scale=float(np.median(scores.final_scale)),
        poisoned=float(scores.poisoned.mean()),
        ended=float(scores.ended.mean()),
        objective=float(np.median(scores.objective)),
    )
