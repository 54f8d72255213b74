"""Searches the scaler's settings that serve a trace best, and decides whether they are worth a change.

Candidates run by the framework's exact rules over replicas of the trace: first all of them over a few replicas, then
the best and the present settings over many. The optimum is flat: the present settings stay unless others are better by
more than noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import UNWRITTEN
from ampdoctor.evidence.report_scaler import ScalePath, ScalingConfidence, ScalingMargin, SettingBound, SimulatedOutcome
from ampdoctor.evidence.targets import Framework
from ampdoctor.evidence.thresholds import ERROR_NOTE, ERROR_WARNING, FLUSHED, SKIP_RATE, Thresholds
from ampdoctor.ranges.profile import EXPONENTS, RangeProfile
from ampdoctor.scaling import choose
from ampdoctor.scaling.choose import COMPOUNDING
from ampdoctor.scaling.closed_forms import Spikes, find_spikes, highest_exponent
from ampdoctor.scaling.scalers import (
    DEFAULTS,
    RULES,
    GradScalerSim,
    ScalerSettings,
    Simulation,
    expressible,
    simulate_lanes,
)
from ampdoctor.scaling.trace import Drift, Replicas, StepTrace, find_drift, resample, trace_of

# -- scores of candidates over replicas of a trace --


LOOKS = 500  # evenly spread steps of each replica whose errors are read: means over 200 replicas need no more
ERROR_WEIGHT = 10.0  # skipped steps that are as bad as a relative error of 1 in all of them (numerics: our default)

Quantiles = tuple[float, float, float]  # 5 %, 50 % and 95 % over the replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation(SimulatedOutcome):
    """The effect of settings over the horizon; figures are medians over the replicas unless stated otherwise."""

    settings: ScalerSettings = field(metadata=UNWRITTEN)  # as the framework runs them
    typical: int = field(metadata=UNWRITTEN)  # number of the first replica whose skips are nearest to their median


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one candidate over `steps` steps, each float64 of shape (replicas,), named as in `Expectation`."""

    skips: NDArray[np.float64]
    error: NDArray[np.float64]
    excess: NDArray[np.float64]
    activation_flushed: NDArray[np.float64]
    weight_flushed: NDArray[np.float64]
    final_scale: NDArray[np.float64]
    inf_in_weights: NDArray[np.float64]
    ended: NDArray[np.float64]
    steps: int

    @property
    def objective(self) -> NDArray[np.float64]:
        """Of each replica: skip rate + 10 times the mean of max(0, 3.5 error - the tolerated error); less is better."""
        return self.skips / self.steps + ERROR_WEIGHT * self.excess


def score_all(
    candidates: list[ScalerSettings], trace: StepTrace, replicas: Replicas, framework: Framework, tolerated: float
) -> list[Scores]:
    """Returns each candidate's figures over each replica; up to the relative error `tolerated` nothing is lost."""
    run = simulate_lanes(candidates, replicas.maxima, framework)
    return [_score(run, lane, trace, replicas, tolerated) for lane in range(len(candidates))]


def _score(run: Simulation, lane: int, trace: StepTrace, replicas: Replicas, tolerated: float) -> Scores:
    steps = replicas.source.shape[1]
    looks = np.linspace(0, steps - 1, min(steps, LOOKS)).astype(np.int64)
    source = replicas.source[:, looks]
    lowest, highest = float(EXPONENTS[0]), float(EXPONENTS[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.log2(np.abs(run.scale[lane][:, looks])) + replicas.shift[:, looks]
    exponent = np.nan_to_num(exponent, nan=highest)
    # the curve's next lower point: at the upper one, a taken step may count as overflowing
    column = (np.clip(np.floor(exponent), lowest, highest) - lowest).astype(np.int64)
    taken = ~(run.skipped[lane] | run.ended[lane])[:, looks]
    taken |= ~taken.any(axis=1, keepdims=True)  # of a run that takes no step, every step counts
    weight = taken / np.maximum(taken.sum(axis=1, keepdims=True), 1)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = (np.where(taken, values, 0.0) * weight).sum(axis=1)
        return result

    # Below the curves' first scale, the error of subnormals doubles with each halving until all is lost. A tiny share
    # of zeros there means nothing more: the error is a lower bound of what flushes.
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
        inf_in_weights=run.inf_in_weights[lane].any(axis=1).astype(np.float64),
        ended=run.ended[lane].any(axis=1).astype(np.float64),
        steps=steps,
    )


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    """Returns the 5 %, 50 % and 95 % quantiles of a figure."""
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return (low, middle, high)


def expectation(settings: ScalerSettings, scores: Scores) -> Expectation:
    """Summarises a candidate's figures."""
    return Expectation(
        settings=settings,
        skips=quantiles(scores.skips),
        skip_rate=float(np.median(scores.skips)) / scores.steps,
        relative_error=float(np.median(scores.error)),
        activation_flushed=float(np.median(scores.activation_flushed)),
        weight_flushed=float(np.median(scores.weight_flushed)),
        final_scale=float(np.median(scores.final_scale)),
        inf_in_weights=float(scores.inf_in_weights.mean()),
        typical=int(np.abs(scores.skips - np.median(scores.skips)).argmin()),
    )


REPLICAS = 200
FIRST_REPLICAS = 8  # replicas of the first pass, over all candidates
MOST_STEPS = 4_000_000  # most replicas times steps: a long horizon gets fewer replicas, but their figures vary less
FEWEST_REPLICAS = 8
FIRST_STEPS = 10_000  # horizon of the first pass, in steps
WORTH_SKIPS = 1e-3
"""A change pays if it saves at least this share of skipped steps: smaller savings are noise between equal runs ..."""
WORTH_ERROR = 1e-3  # ... or at least this much relative error
MOST_SKIPS = 1e-2
"""Share of skipped steps that better gradients may cost: twenty times the share of the usual settings (AMP723)."""
INTERVALS = (200, 500, 1000, 2000)
BACKOFFS = (0.25, 0.5, 0.75)
NEIGHBOURS = (-2, -1, 0)
"""log2 of scales relative to the closed form's. None is above it, because its bound (an fp16 loss, a cap) may be
outside the trace, and a dynamic scaler finds the rest by itself."""
CENSORED_MOST = 0.2
"""If more than this share of the steps has an unknown largest gradient, the trace does not show its own tail."""
FEWEST_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the search."""

    settings: ScalerSettings  # to use, as the framework runs them; the present ones if nothing is worth a change
    change: bool  # they differ from the present ones (the framework's defaults if there are none)
    margin: ScalingMargin
    bounds: dict[str, SettingBound]  # of each setting of the closed form, by its name; "min_scale" is an alarm
    expected_current: Expectation | None  # None: the run has no scaler
    expected_default: Expectation  # of the framework's defaults
    expected_chosen: Expectation
    confidence: ScalingConfidence


def search(
    trace: StepTrace,
    *,
    current: ScalerSettings | None,
    start: SettingBound,
    framework: Framework,
    thresholds: Thresholds,
    censored: float = 0.0,
) -> Outcome:
    """Returns the settings to use with a trace; raises UsageError where no step was recorded.

    `current` is the run's scaler, if it has one. `start` is log2 of the largest scale at which no gradient should
    overflow, and what bounds it. `censored` is the share of the steps whose largest gradient is unknown.
    """
    if trace.steps < 1:
        raise UsageError("a search for a scaler's settings needs a recorded step")
    horizon = thresholds.horizon
    drift = find_drift(trace.log2_amax)
    spikes = find_spikes(trace.log2_amax - drift.slope * np.arange(trace.steps))
    bounds = _closed_form(trace, drift, spikes, start=start, framework=framework, thresholds=thresholds)
    default = DEFAULTS[framework]
    # by the framework's rules, but at its present scale: only a first scale is rounded
    incumbent = replace(expressible(current, framework), scale=current.scale) if current is not None else default
    closed = _settings_of(bounds, framework)
    candidates = list(dict.fromkeys([incumbent, default, closed, *_grid(closed, framework)]))

    few = resample(trace, drift, replicas=FIRST_REPLICAS, steps=min(horizon, FIRST_STEPS))
    first = dict(zip(candidates, score_all(candidates, trace, few, framework, thresholds[ERROR_NOTE]), strict=True))
    leader = _best(candidates, first, incumbent, thresholds)
    as_good = [c for c in candidates if not _worth_it(first[c], first[leader])]
    plainest = min(as_good, key=lambda c: _changes(c, incumbent))
    finalists = list(dict.fromkeys([incumbent, default, closed, leader, plainest]))
    many = resample(trace, drift, replicas=_replicas(horizon), steps=horizon)
    scores = {f: score_all([f], trace, many, framework, thresholds[ERROR_NOTE])[0] for f in finalists}

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
        confidence=ScalingConfidence(
            steps=trace.steps,
            censored=censored,
            exceedances=horizon / (trace.steps + 1),
            drift=drift.slope,
            spiky=spikes.spiky,
            low=trace.steps < FEWEST_STEPS or censored > CENSORED_MOST,
        ),
    )


def expect(settings: ScalerSettings, trace: StepTrace, *, framework: Framework, thresholds: Thresholds) -> Expectation:
    """Returns the effect of settings on a trace, over the same replicas as `search`."""
    horizon = thresholds.horizon
    many = resample(trace, find_drift(trace.log2_amax), replicas=_replicas(horizon), steps=horizon)
    run_as = expressible(settings, framework)
    return expectation(run_as, score_all([run_as], trace, many, framework, thresholds[ERROR_NOTE])[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Expectation):
    """The effect of settings over the recorded steps themselves."""

    settled: bool = field(metadata=UNWRITTEN)  # the last step is taken
    scale: float = field(metadata=UNWRITTEN)  # of a typical taken step; of the last one where none is taken

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return round(self.skips[1])


def predict(profile: RangeProfile, settings: ScalerSettings, without: Collection[str] = ()) -> Prediction:
    """Returns the effect of a GradScaler over the recorded steps, with the modules in `without` in fp32."""
    trace = trace_of(profile, without)
    maxima = np.exp2(trace.log2_amax)[None]
    recorded = Replicas(source=np.arange(trace.steps)[None], shift=np.zeros(maxima.shape), maxima=maxima)
    run = simulate_lanes([settings], maxima, "torch")
    taken = ~(run.skipped[0, 0] | run.ended[0, 0])
    scales = run.scale[0, 0]
    found = expectation(settings, _score(run, 0, trace, recorded, tolerated=0.0))
    return Prediction(
        **{one.name: getattr(found, one.name) for one in fields(found)},
        settled=bool(taken[-1]),
        scale=statistics.median_high(scales[taken].tolist()) if taken.any() else float(scales[-1]),
    )


def _closed_form(
    trace: StepTrace, drift: Drift, spikes: Spikes, *, start: SettingBound, framework: Framework, thresholds: Thresholds
) -> dict[str, SettingBound]:
    """Returns scale, growth_factor, backoff_factor, growth_interval, hysteresis and min_scale, each with its bound."""
    fixed = RULES[framework] is not GradScalerSim
    backoff = SettingBound(value=0.5, by="the framework, which halves") if fixed else choose.backoff_factor(spikes)
    interval = choose.growth_interval(
        2.0, backoff.value, skip_rate=thresholds[SKIP_RATE], drift=drift.slope, spikes=spikes
    )
    doubles = SettingBound(value=2.0, by="the framework, which doubles")
    return {
        "scale": SettingBound(value=2.0**start.value, by=start.by),
        "growth_factor": doubles if fixed else choose.growth_factor(drift.slope, interval.value),
        "backoff_factor": backoff,
        "growth_interval": interval,
        "hysteresis": choose.hysteresis(spikes),
        "min_scale": choose.alarm_scale(_lowest(trace, thresholds)),
    }


def _settings_of(bounds: dict[str, SettingBound], framework: Framework) -> ScalerSettings:
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


def _replicas(horizon: int) -> int:
    return max(FEWEST_REPLICAS, min(REPLICAS, MOST_STEPS // max(1, horizon)))


def _lowest(trace: StepTrace, thresholds: Thresholds) -> int:
    """Returns the smallest recorded exponent at which at most tau of the gradients of either kind becomes zero."""
    flushed = np.maximum(trace.activation_flushed.mean(axis=0), trace.weight_flushed.mean(axis=0))
    serving = np.flatnonzero(flushed <= thresholds[FLUSHED])
    return int(EXPONENTS[serving[0]]) if len(serving) else int(EXPONENTS[-1])


def _best(
    candidates: list[ScalerSettings],
    scores: dict[ScalerSettings, Scores],
    incumbent: ScalerSettings,
    thresholds: Thresholds,
) -> ScalerSettings:
    """Returns the best candidate that does not skip too many steps: no gradients are worth half of the training."""
    used = scores[incumbent]
    most = max(float(np.median(used.skips)), MOST_SKIPS * used.steps)
    ruined = float(np.maximum(used.inf_in_weights, used.ended).mean()) > 0.0
    cheap = [c for c in candidates if ruined or float(np.median(scores[c].skips)) <= most]
    return min(cheap, key=lambda c: _rank(scores[c], c, incumbent, thresholds))


def _rank(
    scores: Scores, settings: ScalerSettings, incumbent: ScalerSettings, thresholds: Thresholds
) -> tuple[float, bool, float, float, int]:
    """Ranks by ruined runs, ruined gradients (before skips), skips beyond the tolerated, objective, changes."""
    ruined = float(np.maximum(scores.inf_in_weights, scores.ended).mean())
    lost = COMPOUNDING * float(np.median(scores.error)) > thresholds[ERROR_WARNING]
    too_many = max(0.0, float(np.median(scores.skips)) / scores.steps - thresholds[SKIP_RATE])
    objective = float(np.median(scores.objective))
    return (ruined, lost, 0.0 if lost else too_many, objective, _changes(settings, incumbent))


def _changes(settings: ScalerSettings, incumbent: ScalerSettings) -> int:
    return sum(getattr(settings, f.name) != getattr(incumbent, f.name) for f in fields(settings))


def _worth_it(used: Scores, best: Scores) -> bool:
    """Returns whether the second is better than the first by more than noise."""
    ruined = np.maximum(used.inf_in_weights, used.ended) - np.maximum(best.inf_in_weights, best.ended)
    if ruined.mean() > 0.0:
        return True
    low, _, _ = quantiles(used.objective - best.objective)
    fewer_skips = float(np.median(used.skips - best.skips)) / used.steps
    less_error = COMPOUNDING * float(np.median(used.error - best.error))
    return low > 0.0 and (fewer_skips >= WORTH_SKIPS or less_error >= WORTH_ERROR)


def _margin(used: Scores, best: Scores, incumbent: ScalerSettings, start: SettingBound) -> ScalingMargin:
    usable = incumbent.scale > 0.0 and math.isfinite(incumbent.scale)
    return ScalingMargin(
        skip_rate=float(np.median(used.skips - best.skips)) / used.steps,
        relative_error=float(np.median(used.error - best.error)),
        headroom=start.value - math.log2(incumbent.scale) if usable else math.nan,
    )


# -- a typical simulated path of a loss scale, short enough to draw, and the recorded steps' limits --


MOST_POINTS = 2000  # most points of a line, and most skipped steps of a path: a drawing has no more pixels


def trajectory(expected: Expectation, trace: StepTrace, framework: Framework, horizon: int) -> ScalePath:
    """Returns the path of the replica with the median number of skipped steps, over `horizon` simulated steps."""
    replica = resample(trace, find_drift(trace.log2_amax), replicas=1, steps=horizon, first=expected.typical)
    run = simulate_lanes([expected.settings], replica.maxima, framework)
    scale, over = run.scale[0, 0], run.skipped[0, 0] | run.ended[0, 0]
    starts = np.concatenate([[0], np.flatnonzero(scale[1:] != scale[:-1]) + 1])
    skips = np.flatnonzero(over)
    return ScalePath(
        points=tuple((at, float(scale[at])) for at in drawn_changes(starts, scale)),
        changes=len(starts),
        skips=drawn_skips(skips),
        skipped=len(skips),
        replica=expected.typical,
    )


def largest_scales(trace: StepTrace) -> tuple[tuple[float, float], ...]:
    """Returns (step, largest power of two that does not overflow), the lowest of each of `MOST_POINTS` spans."""
    known = np.flatnonzero(np.isfinite(trace.log2_amax))
    spans = np.array_split(known, min(MOST_POINTS, len(known))) if len(known) else []
    steps = [int(span[np.argmax(trace.log2_amax[span])]) for span in spans]
    return tuple((step, 2.0 ** highest_exponent(float(trace.log2_amax[step]))) for step in steps)


def drawn_changes(starts: NDArray[np.int64], scales: NDArray[np.float64]) -> list[int]:
    """Returns the changes that are drawn: all, or the lowest and highest scale of each of `MOST_POINTS / 2` spans."""
    if len(starts) <= MOST_POINTS:
        return [int(at) for at in starts]
    span = starts * (MOST_POINTS // 2) // len(scales)
    kept: set[int] = {0}
    for members in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(span)) + 1):
        of = scales[starts[members]]
        kept |= {int(members[np.argmin(of)]), int(members[np.argmax(of)])}
    return [int(starts[index]) for index in sorted(kept)]


def drawn_skips(skips: NDArray[np.integer[Any]]) -> tuple[int, ...]:
    """Returns the skipped steps that are drawn: all, or `MOST_POINTS` of them."""
    if len(skips) > MOST_POINTS:
        skips = skips[np.linspace(0, len(skips) - 1, MOST_POINTS).astype(np.intp)]
    return tuple(skips.tolist())
