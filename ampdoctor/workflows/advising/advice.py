"""From measured ranges to advice on loss scaling: classify first, keep what works, change only what pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ampdoctor.diagnosis.replay.range_rules import near_limit
from ampdoctor.evidence.report.scaler import (
    FlushedGradients,
    ScalePath,
    ScalePaths,
    ScalerSection,
    ScalingConfidence,
    ScalingMargin,
    ScalingOutcome,
    SettingBound,
    Simulated,
    SimulatedOutcome,
)
from ampdoctor.evidence.thresholds.replay_thresholds import CLEARLY_BETTER, ERROR_NOTE, FLUSHED
from ampdoctor.scaling.choice import Prediction, ScaleChoice, choose_scale, predict
from ampdoctor.scaling.search import Outcome, expect, search
from ampdoctor.scaling.settings import Bound, ScalerSettings
from ampdoctor.scaling.shifts import Shift, accumulation_shift, reduction_shift
from ampdoctor.scaling.trace import StepTrace, trace_of
from ampdoctor.scaling.trajectory import Trajectory, largest_scales, trajectory

if TYPE_CHECKING:
    from ampdoctor.evidence.frameworks import Framework
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.scaling.scoring import Expectation
    from ampdoctor.workflows.measuring.observe import Observed
    from ampdoctor.workflows.opening.request import ReplayRequest

MASK_LIKE = 2.0**120
"""Magnitudes from here on are constants written to be masked out (finfo.min of bf16 or fp32), no activations."""
SKIPS_THAT_PAY = 1e-3
"""A change pays where it saves this share of the steps (a tenth of a percent, within the noise of equal runs) ..."""
FLUSH_THAT_PAYS = 1e-2
"""... or so large a share of the activation gradients: 1 % is the level up to which nothing was seen to suffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a profile says about loss scaling of an fp16 run.

    Attributes:
        choice: The scale that fits.
        current: The run's scaler; one that never moves where the run has none. What that would skip is not skipped.
        recommended: The settings to try.
        outcome: What the simulation of candidates came to.
        expected: What the recommended settings do in it.
        trace: The recorded steps that were simulated.
        now: What is predicted of the run's scaler over the recorded steps.
        then: What is predicted of the recommended settings.
        large: Largest magnitude by module, of half activations within a binade of the limit or beyond it.
    """

    choice: ScaleChoice
    current: ScalerSettings
    recommended: ScalerSettings
    outcome: Outcome
    expected: Expectation
    trace: StepTrace
    now: Prediction
    then: Prediction
    large: dict[str, float]

    @property
    def simulated_change(self) -> bool:
        """The simulation finds other settings better, on a recording long enough to say so."""
        return self.outcome.change and self.outcome.expected_current is not None and not self.outcome.confidence.low


def advise(ranges: RangeProfile, request: ReplayRequest) -> Advice | None:
    """The advice; None where no half gradient has a finite nonzero value, so that there is nothing to scale.

    Args:
        ranges: What was measured.
        request: Its thresholds, its framework, and what the training does that the recording did not.
    """
    thresholds, framework, shift = request.thresholds, request.framework, shift_of(ranges, request)
    choice = choose_scale(ranges, thresholds, shift)
    if choice is None:
        return None
    state = ranges.run.scaler
    fixed = ScalerSettings(scale=ranges.run.loss_scale, backoff_factor=1.0, growth_interval=0)  # nothing moves it
    current = ScalerSettings.of_state(state) if state is not None else fixed
    trace = trace_of(ranges, choice.fp32_modules, shift)
    outcome = search(
        trace,
        current=current if state is not None else None,
        start=Bound(value=choice.exponent, by=choice.bound_by),
        framework=framework,
        thresholds=thresholds,
        censored=float(np.isposinf(trace.log2_amax).mean()),  # of those steps nobody knows how large they were
    )
    recommended = _recommended(choice, outcome, current if state is not None else None)
    return Advice(
        choice=choice,
        current=current,
        recommended=recommended,
        outcome=outcome,
        expected=expect(recommended, trace, framework=framework, thresholds=thresholds),
        trace=trace,
        now=predict(ranges, current),
        then=predict(ranges, recommended, choice.fp32_modules),
        large=large_activations(ranges, thresholds),
    )


def shift_of(ranges: RangeProfile, request: ReplayRequest) -> Shift:
    """What the training does to gradients that the recording did not: an fp16 all-reduce, another accumulation."""
    run = ranges.run
    reduced = reduction_shift(request.ranks, request.reduce_fp16) if request.reduce_fp16 is not None else Shift()
    after = request.accumulation or run.accumulation
    pure = not run.autocast and not run.master_weights
    return reduced + accumulation_shift(
        run.accumulation, after, loss_divided=run.loss_divided, half_gradients=pure and run.precision == "fp16"
    )


def _recommended(choice: ScaleChoice, outcome: Outcome, current: ScalerSettings | None) -> ScalerSettings:
    """What the simulation prefers where it may; else the scale in closed form, everything else as it is.

    A few steps say where gradients lie, and little about how they vary: then only the scale is touched.
    """
    if outcome.change and not outcome.confidence.low:
        return outcome.settings
    kept = current if current is not None and is_sound(current) else ScalerSettings()
    return replace(kept, scale=choice.settings.scale, growth_tracker=0)


def is_sound(settings: ScalerSettings) -> bool:
    """Can a scaler work with these settings: grow, back off, come round, and start at a scale?"""
    return (
        0.0 < settings.scale < math.inf
        and 1.0 < settings.growth_factor < math.inf
        and 0.0 < settings.backoff_factor < 1.0
        and settings.growth_interval >= 1
    )


def large_activations(ranges: RangeProfile, thresholds: Thresholds) -> dict[str, float]:
    """Half activations near fp16's limit, by module."""
    found: dict[str, float] = {}
    near = near_limit(thresholds)
    for index in ranges.of_kind("activation"):
        module, amax = ranges.sites[index].module, ranges.histograms[index].amax
        if amax is not None and near <= amax < MASK_LIKE:
            found[module] = max(amax, found.get(module, 0.0))
    return found


def pays(advice: Advice, thresholds: Thresholds, *, scaled: bool, now: Observed | None, then: Observed | None) -> bool:
    """Is the recommended scaler better than the present one by more than noise? What was replayed decides.

    Args:
        advice: What was predicted.
        thresholds: What counts as lost, and as harmful.
        scaled: The run has a scaler (or scales by hand) at all: without one an overflow is not survived.
        now: The replay with the run's own scaling, where there was one.
        then: The replay with the recommended scaler.
    """
    if not scaled and advice.now.skipped:
        return True
    if advice.outcome.expected_current is not None and not is_sound(advice.current):
        return True  # a scaler that cannot work
    if advice.now.poisoned or not _settles(advice.now, now):
        return True
    if now is not None and then is not None and len(then.skipped) > len(now.skipped):
        return _gains(advice, thresholds, now, then)  # what loses more steps has to be better in its gradients
    if advice.simulated_change:
        return True
    skips = (_skips(advice.now, now) - _skips(advice.then, then)) / thresholds.horizon
    if skips > SKIPS_THAT_PAY:
        return True
    return _gains(advice, thresholds, now, then)


def _gains(advice: Advice, thresholds: Thresholds, now: Observed | None, then: Observed | None) -> bool:
    """Does the change save gradients?"""
    flushed_now, flushed_then = _flushed(advice.now, now), _flushed(advice.then, then)
    if max(flushed_now) <= thresholds[FLUSHED]:
        return False  # nothing is lost: what error there is comes from rounding, which no scale changes
    error_now, error_then = _error(advice.now, now), _error(advice.then, then)
    if error_now > thresholds[ERROR_NOTE] and error_now > thresholds[CLEARLY_BETTER] * error_then:
        return True
    return flushed_now[0] - flushed_then[0] > FLUSH_THAT_PAYS


def _settles(expected: Prediction, seen: Observed | None) -> bool:
    return expected.settled if seen is None else seen.settled


def _skips(expected: Prediction, seen: Observed | None) -> int:
    return expected.skipped if seen is None else len(seen.skipped)


def _error(expected: Prediction, seen: Observed | None) -> float:
    return expected.relative_error if seen is None or seen.relative_error is None else seen.relative_error


def _flushed(expected: Prediction, seen: Observed | None) -> tuple[float, float]:
    if seen is None or seen.relative_error is None:
        return expected.activation_flushed, expected.weight_flushed
    return seen.activation_flushed or 0.0, seen.weight_flushed or 0.0


def outcome_of(expected: Prediction) -> ScalingOutcome:
    """A prediction as the report shows it."""
    return ScalingOutcome(
        skip_rate=expected.skip_rate,
        flushed=FlushedGradients(activation_grad=expected.activation_flushed, weight_grad=expected.weight_flushed),
        relative_error=expected.relative_error,
    )


def outcome_seen(seen: Observed) -> ScalingOutcome:
    """A replay as the report shows it."""
    return ScalingOutcome(
        skip_rate=seen.skip_rate,
        flushed=FlushedGradients(activation_grad=seen.activation_flushed, weight_grad=seen.weight_flushed),
        relative_error=seen.relative_error,
    )


def with_simulation(
    section: ScalerSection, advice: Advice, framework: Framework, horizon: int, *, change: bool
) -> ScalerSection:
    """The section with the simulation in it; "recommended" is what is to be used, changed or not."""
    outcome = advice.outcome
    margin, confidence, kept = outcome.margin, outcome.confidence, outcome.expected_current
    used = advice.expected if change or kept is None else None

    def path(expected: Expectation | None) -> ScalePath | None:
        return None if expected is None else _shown(trajectory(expected, advice.trace, framework, horizon))

    return replace(
        section,
        framework=framework,
        horizon=horizon,
        bounds=_bounds(advice, change=change),
        simulated=Simulated(
            current=_expectation(outcome.expected_current),
            default=_expectation(outcome.expected_default),
            recommended=_expectation(advice.expected if change or kept is None else kept),
        ),
        trajectory=ScalePaths(
            current=path(kept),
            recommended=path(used),
            limit=tuple((step, scale) for step, scale in largest_scales(advice.trace)),
        ),
        margin=None
        if kept is None
        else ScalingMargin(skip_rate=margin.skip_rate, relative_error=margin.relative_error, headroom=margin.headroom),
        confidence=ScalingConfidence(
            steps=confidence.steps,
            censored=confidence.censored,
            exceedances=confidence.exceedances,
            drift=confidence.drift.slope,
            spiky=confidence.spikes.spiky,
            low=confidence.low,
        ),
    )


def _shown(path: Trajectory) -> ScalePath:
    return ScalePath(
        points=tuple((step, scale) for step, scale in path.points),
        changes=path.changes,
        skips=tuple(path.skips),
        skipped=path.skipped,
        replica=path.replica,
    )


_ARGUMENTS = {"scale": "init_scale"}


def _bounds(advice: Advice, *, change: bool) -> dict[str, SettingBound]:
    """Each setting that is to be used, and what holds it: its closed form, or what was preferred to that."""
    used, closed = advice.recommended if change else advice.current, advice.outcome.bounds
    default = ScalerSettings()
    bounds = {}
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
        value, form = getattr(used, name), closed[name]
        if value == form.value:
            by = form.by
        elif value == getattr(advice.current, name):
            by = f"kept as it is; in closed form {form.value:g} ({form.by})"
        elif value == getattr(default, name):
            by = f"the usual default; in closed form {form.value:g} ({form.by})"
        else:
            by = f"the simulation, which does better with it than with {form.value:g} ({form.by})"
        bounds[_ARGUMENTS.get(name, name)] = SettingBound(value=value, by=by)
    alarm = closed["min_scale"]
    if alarm.value < used.scale:
        bounds["min_scale"] = SettingBound(value=alarm.value, by=f"an alarm, no floor: {alarm.by}")
    return bounds


def _expectation(expected: Expectation | None) -> SimulatedOutcome | None:
    if expected is None:
        return None
    low, middle, high = expected.skips
    return SimulatedOutcome(
        skips=(low, middle, high),
        skip_rate=expected.skip_rate,
        relative_error=expected.relative_error,
        activation_flushed=expected.activation_flushed,
        weight_flushed=expected.weight_flushed,
        final_scale=expected.final_scale,
        poisoned=expected.poisoned,
    )
