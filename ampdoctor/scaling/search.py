"""The scaler's settings that serve a trace best, and whether they are worth a change.

Candidates are run by the exact rules of the framework over replicas of the trace (`bootstrap`): first all of them over
a few, then the best and those that stand for "no change" over many, the same replicas for all. The optimum is flat:
what runs already is left alone unless something beats it by more than noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from ampdoctor.errors import UsageError
from ampdoctor.evidence.frameworks import Framework
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scaling_thresholds import ERROR_NOTE, ERROR_WARNING, FLUSHED, HORIZON, SKIP_RATE
from ampdoctor.ranges.profile import EXPONENTS
from ampdoctor.scaling import derived
from ampdoctor.scaling.bootstrap import Drift, find_drift, resample
from ampdoctor.scaling.choice import COMPOUNDING
from ampdoctor.scaling.rules import DEFAULTS, RULES, TorchLanes, expressible
from ampdoctor.scaling.scoring import Expectation, Quantiles, Scores, expectation, quantiles, score_all
from ampdoctor.scaling.settings import Bound, ScalerSettings
from ampdoctor.scaling.spikes import Spikes, find_spikes
from ampdoctor.scaling.trace import StepTrace

REPLICAS = 200
FIRST_REPLICAS = 8
"""Of the first pass, over all candidates."""
MOST_STEPS = 4_000_000
"""Replicas times steps at the most: a long horizon has fewer replicas, whose figures vary less."""
FEWEST_REPLICAS = 8
FIRST_STEPS = 10_000
"""The first pass looks no further ahead."""
WORTH_SKIPS = 1e-3
"""Fewer skips pay from this share of the steps on: less is within what equal runs differ by ..."""
WORTH_ERROR = 1e-3
"""... and less error from this relative error on."""
MOST_SKIPS = 1e-2
"""Share of skipped steps that better gradients may cost: twenty times what the usual settings skip (AMP707)."""
INTERVALS = (200, 500, 1000, 2000)
BACKOFFS = (0.25, 0.5, 0.75)
NEIGHBOURS = (-2, -1, 0)
"""Binades around the scale in closed form; not above it, as what holds it (an fp16 loss, a cap) need not be in the
trace, and a dynamic scaler finds the rest by itself."""
CENSORED_MOST = 0.2
"""With a larger share of steps whose largest gradient is not known, the trace says little about its own tail."""
FEWEST_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What the best candidate gains over the settings in use; differences are paired by replica.

    Attributes:
        objective: Of `Expectation`: in use minus best.
        skip_rate: Median difference.
        relative_error: Median difference, from rounding each tensor once, as in `Expectation`.
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

    Raises:
        UsageError: No step was recorded, or none is left.
    """
    if trace.steps < 1 or (remaining_steps is not None and remaining_steps < 1):
        raise UsageError("a search for a scaler's settings needs a recorded step, and a step to come")
    horizon = min(remaining_steps or thresholds.horizon, int(HORIZON.highest))
    drift = find_drift(trace.log2_amax)
    spikes = find_spikes(trace.log2_amax - drift.slope * np.arange(trace.steps))
    bounds = closed_form(
        trace,
        drift=drift,
        spikes=spikes,
        start=start,
        framework=framework,
        thresholds=thresholds,
        remaining_steps=remaining_steps,
    )
    default = DEFAULTS[framework]
    incumbent = _in_use(current, framework) if current is not None else default
    closed = _settings_of(bounds, framework)
    candidates = _unique([incumbent, default, closed, *_grid(closed, framework)])

    few = resample(trace, drift, replicas=FIRST_REPLICAS, steps=min(horizon, FIRST_STEPS))
    first = dict(zip(candidates, score_all(candidates, trace, few, framework, thresholds[ERROR_NOTE]), strict=True))
    leader = _best(candidates, first, incumbent, thresholds)
    as_good = [c for c in candidates if not _worth_it(first[c], first[leader])]
    plainest = min(as_good, key=lambda c: _changes(c, incumbent))
    finalists = _unique([incumbent, default, closed, leader, plainest])
    many = resample(trace, drift, replicas=_replicas(horizon), steps=horizon)
    scores = dict(
        zip(
            finalists,
            (score_all([f], trace, many, framework, thresholds[ERROR_NOTE])[0] for f in finalists),
            strict=True,
        )
    )

    best = _best(finalists, scores, incumbent, thresholds)
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
        expected_current=expectation(incumbent, scores[incumbent]) if current is not None else None,
        expected_default=expectation(default, scores[default]),
        expected_chosen=expectation(chosen, scores[chosen]),
        confidence=Confidence(
            steps=trace.steps,
            censored=censored,
            exceedances=horizon / (trace.steps + 1),
            drift=drift,
            spikes=spikes,
        ),
    )


def expect(
    settings: ScalerSettings,
    trace: StepTrace,
    *,
    framework: Framework,
    thresholds: Thresholds,
    remaining_steps: int | None = None,
) -> Expectation:
    """What settings would do with a trace, over the replicas that `search` takes.

    Args:
        settings: Of the scaler at the first step.
        trace: At least one step.
        framework: Whose scaler it is.
        thresholds: What is tolerated; the horizon is used where `remaining_steps` is None.
        remaining_steps: Steps that the run still has; None where nobody knows.
    """
    horizon = min(remaining_steps or thresholds.horizon, int(HORIZON.highest))
    many = resample(trace, find_drift(trace.log2_amax), replicas=_replicas(horizon), steps=horizon)
    run_as = expressible(settings, framework)
    return expectation(run_as, score_all([run_as], trace, many, framework, thresholds[ERROR_NOTE])[0])


def closed_form(
    trace: StepTrace,
    *,
    drift: Drift,
    spikes: Spikes,
    start: Bound,
    framework: Framework,
    thresholds: Thresholds,
    remaining_steps: int | None = None,
) -> dict[str, Bound]:
    """Each setting with what holds it: scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale.

    Args:
        trace: What was recorded.
        drift: Of the trace.
        spikes: Of the trace.
        start: As in `search`.
        framework: Whose scaler it is.
        thresholds: What is tolerated.
        remaining_steps: Steps that the run still has; None where nobody knows.
    """
    fixed = RULES[framework] is not TorchLanes
    bounds = {"scale": Bound(value=2.0**start.value, by=start.by)}
    if fixed:
        backoff = Bound(value=0.5, by="the framework, which halves")
    else:
        backoff = derived.backoff_factor(spikes, hysteresis_available=False)
    interval = derived.growth_interval(
        2.0,
        backoff.value,
        skip_rate=thresholds[SKIP_RATE],
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


def _in_use(current: ScalerSettings, framework: Framework) -> ScalerSettings:
    """The run's scaler by the framework's rules, at the scale where it is: only a start is rounded, or lifted to 1."""
    return replace(expressible(current, framework), scale=current.scale)


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
    serving = np.flatnonzero(flushed <= thresholds[FLUSHED])
    return int(EXPONENTS[serving[0]]) if len(serving) else int(EXPONENTS[-1])


def _best(
    candidates: list[ScalerSettings],
    scores: dict[ScalerSettings, Scores],
    incumbent: ScalerSettings,
    thresholds: Thresholds,
) -> ScalerSettings:
    """The first by rank of those that do not cost too many steps: no gradients are worth half of the training."""
    used = scores[incumbent]
    most = max(float(np.median(used.skips)), MOST_SKIPS * used.steps)
    ruined = float(np.maximum(used.poisoned, used.ended).mean()) > 0.0
    cheap = [c for c in candidates if ruined or float(np.median(scores[c].skips)) <= most]
    return min(cheap, key=lambda c: _rank(scores[c], c, incumbent, thresholds))


def _rank(
    scores: Scores, settings: ScalerSettings, incumbent: ScalerSettings, thresholds: Thresholds
) -> tuple[float, bool, float, float, int]:
    """Smaller is better: runs that are ruined, gradients that are, skips beyond what is tolerated, objective, changes.

    Gradients come before skips: a scale that spikes have pushed down until they fit skips nothing, and trains nothing.
    """
    ruined = float(np.maximum(scores.poisoned, scores.ended).mean())
    lost = COMPOUNDING * float(np.median(scores.error)) > thresholds[ERROR_WARNING]
    too_many = max(0.0, float(np.median(scores.skips)) / scores.steps - thresholds[SKIP_RATE])
    objective = float(np.median(scores.objective))
    return (ruined, lost, 0.0 if lost else too_many, objective, _changes(settings, incumbent))


def _changes(settings: ScalerSettings, incumbent: ScalerSettings) -> int:
    return sum(getattr(settings, f.name) != getattr(incumbent, f.name) for f in fields(settings))


def _worth_it(used: Scores, best: Scores) -> bool:
    """Whether the second is better than the first by more than noise."""
    ruined = np.maximum(used.poisoned, used.ended) - np.maximum(best.poisoned, best.ended)
    if ruined.mean() > 0.0:
        return True
    low, _, _ = quantiles(used.objective - best.objective)
    fewer_skips = float(np.median(used.skips - best.skips)) / used.steps
    less_error = COMPOUNDING * float(np.median(used.error - best.error))
    return low > 0.0 and (fewer_skips >= WORTH_SKIPS or less_error >= WORTH_ERROR)


def _margin(used: Scores, best: Scores, incumbent: ScalerSettings, start: Bound) -> Margin:
    usable = incumbent.scale > 0.0 and math.isfinite(incumbent.scale)
    return Margin(
        objective=quantiles(used.objective - best.objective),
        skip_rate=float(np.median(used.skips - best.skips)) / used.steps,
        relative_error=float(np.median(used.error - best.error)),
        headroom=start.value - math.log2(incumbent.scale) if usable else math.nan,
    )
