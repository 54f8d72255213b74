"""From measured ranges to advice on loss scaling and precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ampdoctor.diagnosis.replay.gradients import CLEARLY_BETTER
from ampdoctor.diagnosis.replay.scale_choice import near_limit
from ampdoctor.evidence.report_scaler import (
    FlushedGradients,
    ScalePath,
    ScalePaths,
    ScalerSection,
    ScalingOutcome,
    SettingBound,
    Simulated,
)
from ampdoctor.evidence.run_facts import PrecisionFacts, ScaleFacts, Spread
from ampdoctor.evidence.thresholds import ERROR_NOTE, FLUSHED
from ampdoctor.numerics.formats import FORMATS, FloatFormat
from ampdoctor.scaling.choose import COMPOUNDING, ScaleChoice, choose_scale
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.scaling.search import Outcome, Prediction, expect, largest_scales, predict, search, trajectory
from ampdoctor.scaling.trace import StepTrace, trace_of
from ampdoctor.workflows.replay_under_change import FLUSH_THAT_PAYS

if TYPE_CHECKING:
    from ampdoctor.evidence.targets import Framework, Target
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.scaling.search import Expectation
    from ampdoctor.workflows.replay_under_change import Observed, Then
    from ampdoctor.workflows.requests import ReplayRequest


# -- loss scaling: keep what works, change only what pays --

MASK_LIKE = 2.0**120
"""Magnitudes from here on are constants that mask something out (finfo.min of bf16 or fp32), not activations."""
SKIPS_THAT_PAY = 1e-3
"""A change pays if it saves this share of the steps (a tenth of a percent, within the noise of equal runs), or
`FLUSH_THAT_PAYS` of the activation gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a profile of an fp16 run says about loss scaling; for a run without a scaler, `current` never moves.

    `now`, `then`: predictions over the recorded steps; `expected`: the simulation of the recommended settings.
    """

    choice: ScaleChoice  # the scale that fits
    current: ScalerSettings
    recommended: ScalerSettings
    outcome: Outcome  # the simulation of the candidates
    expected: Expectation
    trace: StepTrace
    now: Prediction
    then: Prediction
    large: dict[str, float]  # largest half activation by module, within a factor of 2 of the limit or beyond

    @property
    def simulated_change(self) -> bool:
        """Whether the simulation prefers other settings, on a recording that is long enough to say so."""
        return self.outcome.change and self.outcome.expected_current is not None and not self.outcome.confidence.low


def advise(ranges: RangeProfile, request: ReplayRequest) -> Advice | None:
    """Returns the advice; None if no half gradient has a finite nonzero value, so that nothing needs scaling."""
    thresholds, framework = request.thresholds, request.framework
    choice = choose_scale(ranges, thresholds)
    if choice is None:
        return None
    state = ranges.run.scaler
    fixed = ScalerSettings(scale=ranges.run.loss_scale, backoff_factor=1.0, growth_interval=0)  # nothing moves it
    current = ScalerSettings.of_state(state) if state is not None else fixed
    trace = trace_of(ranges, choice.fp32_modules)
    outcome = search(
        trace,
        current=current if state is not None else None,
        start=SettingBound(value=choice.exponent, by=choice.bound_by),
        framework=framework,
        thresholds=thresholds,
        censored=float(np.isposinf(trace.log2_amax).mean()),  # steps of unknown magnitude
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


def _recommended(choice: ScaleChoice, outcome: Outcome, current: ScalerSettings | None) -> ScalerSettings:
    """Returns the simulation's settings, or after too few steps the present ones with the closed form's scale."""
    if outcome.change and not outcome.confidence.low:
        return outcome.settings
    kept = current if current is not None and is_sound(current) else ScalerSettings()
    return replace(kept, scale=choice.settings.scale, growth_tracker=0)


def is_sound(settings: ScalerSettings) -> bool:
    """Whether a scaler can work with these settings: a usable scale, growth, backoff and interval."""
    return (
        0.0 < settings.scale < math.inf
        and 1.0 < settings.growth_factor < math.inf
        and 0.0 < settings.backoff_factor < 1.0
        and settings.growth_interval >= 1
    )


def large_activations(ranges: RangeProfile, thresholds: Thresholds) -> dict[str, float]:
    """Returns the largest magnitude of half activations near fp16's limit, by module."""
    near = near_limit(thresholds)
    return {module: amax for module, amax in _largest_activations(ranges).items() if amax >= near}


def _largest_activations(ranges: RangeProfile) -> dict[str, float]:
    found: dict[str, float] = {}
    for index in ranges.of_kind("activation"):
        module, amax = ranges.sites[index].module, ranges.histograms[index].amax
        if amax is not None and amax < MASK_LIKE:
            found[module] = max(amax, found.get(module, 0.0))
    return found


def pays(advice: Advice, thresholds: Thresholds, *, scaled: bool, now: Observed | None, then: Then) -> bool:
    """Whether the recommended scaler beats the present one by more than noise; replays overrule predictions."""
    if not scaled and advice.now.skipped:
        return True
    if advice.outcome.expected_current is not None and not is_sound(advice.current):
        return True  # a scaler that cannot work
    if advice.now.inf_in_weights or not (now or advice.now).settled:
        return True
    if now is not None and not now.skipped and not advice.simulated_change and not _loses(advice, thresholds, now):
        return False
    seen = then()
    if now is not None and seen is not None and len(seen.skipped) > len(now.skipped):
        return _gains(advice, thresholds, now, seen)  # a scaler that loses more steps must have better gradients
    if advice.simulated_change:
        return True
    skips = (_skips(advice.now, now) - _skips(advice.then, seen)) / thresholds.horizon
    if skips > SKIPS_THAT_PAY:
        return True
    return _gains(advice, thresholds, now, seen)


def _loses(advice: Advice, thresholds: Thresholds, now: Observed) -> bool:
    """Whether a replay loses gradients; if not, its error comes from rounding, which no scale changes."""
    return max(_flushed(advice.now, now)) > thresholds[FLUSHED]


def _gains(advice: Advice, thresholds: Thresholds, now: Observed | None, then: Observed | None) -> bool:
    if now is not None and not _loses(advice, thresholds, now):
        return False
    error_now, error_then = _error(advice.now, now), _error(advice.then, then)
    if error_now > thresholds[ERROR_NOTE] and error_now > thresholds[CLEARLY_BETTER] * error_then:
        return True
    return _flushed(advice.now, now)[0] - _flushed(advice.then, then)[0] > FLUSH_THAT_PAYS


def _skips(expected: Prediction, seen: Observed | None) -> int:
    return expected.skipped if seen is None else len(seen.skipped)


def _error(expected: Prediction, seen: Observed | None) -> float:
    return expected.relative_error if seen is None or seen.relative_error is None else seen.relative_error


def _flushed(expected: Prediction, seen: Observed | None) -> tuple[float, float]:
    if seen is None or seen.relative_error is None:
        return expected.activation_flushed, expected.weight_flushed
    return seen.activation_flushed or 0.0, seen.weight_flushed or 0.0


def outcome_of(seen: Prediction | Observed) -> ScalingOutcome:
    """Returns a prediction, or a replay, as the report shows it."""
    return ScalingOutcome(
        skip_rate=seen.skip_rate,
        flushed=FlushedGradients(activation_grad=seen.activation_flushed, weight_grad=seen.weight_flushed),
        relative_error=seen.relative_error,
    )


def with_simulation(
    section: ScalerSection, advice: Advice, framework: Framework, horizon: int, *, change: bool
) -> ScalerSection:
    """Returns the section with the simulation; "recommended" are the settings to use, changed or not."""
    outcome = advice.outcome
    kept = outcome.expected_current
    used = advice.expected if change or kept is None else None

    def path(expected: Expectation | None) -> ScalePath | None:
        return None if expected is None else trajectory(expected, advice.trace, framework, horizon)

    return replace(
        section,
        framework=framework,
        horizon=horizon,
        bounds=_bounds(advice, change=change),
        simulated=Simulated(
            current=kept,
            default=outcome.expected_default,
            recommended=advice.expected if change or kept is None else kept,
        ),
        trajectory=ScalePaths(current=path(kept), recommended=path(used), limit=largest_scales(advice.trace)),
        margin=None if kept is None else outcome.margin,
        confidence=outcome.confidence,
    )


_ARGUMENTS = {"scale": "init_scale"}


def _bounds(advice: Advice, *, change: bool) -> dict[str, SettingBound]:
    """Returns each setting to use and what it follows from: its closed form, or the reason to prefer another value."""
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


# -- precision --

FP8_FLUSHED = 1e-2
"""Share of a tensor's nonzero elements that FP8 may lose: ten times the aim of a loss scale, because FP8's recipes keep
sums and master weights wide and lose the smallest of each tensor by design (Transformer Engine's default is HYBRID, and
this share gives HYBRID for the measured gradients: 23 binades)."""


def precision_facts(
    profile: RangeProfile,
    target: Target,
    *,
    choice: ScaleChoice | None,
    pure: bool = False,
    harm: str | None = None,
    settled: bool = False,
    precision_matters: bool = False,
) -> PrecisionFacts:
    """Returns the facts from a profile that `diagnosis.replay.precision.advise_precision` needs.

    `choice` is None if no half gradient was seen. `pure`: the run keeps its weights in its compute format, without
    autocast or fp32 master weights. `harm` is a clause on what went wrong in an fp16 replay that no loss scale cures,
    and `settled` says that the scaler skipped no steps after it.
    """
    scale = fp16 = bf16 = None
    if choice is not None:
        gradients = profile.merged("weight_grad", choice.fp32_modules)
        fp16 = COMPOUNDING * gradients.relative_error("fp16", profile.factor("weight_grad", 2.0**choice.exponent))
        bf16 = COMPOUNDING * gradients.relative_error("bf16", profile.factor("weight_grad", 1.0))
        scale = ScaleFacts(exponent=choice.exponent, modules_not_covered=choice.modules_not_covered, share=choice.share)
    return PrecisionFacts(
        target=target,
        own=profile.run.precision,
        pure=pure,
        forward=_largest_activations(profile),
        forward_flushed=profile.merged("activation").flushed(fp16_of(target)),
        scale=scale,
        fp16_error=fp16,
        bf16_error=bf16,
        harm=harm,
        settled=settled,
        spreads=tuple(_spreads(profile)),
        modules=profile.modules,
        updates=profile.updates,
        precision_matters=precision_matters,
    )


def fp16_of(target: Target) -> FloatFormat:
    """Returns the fp16 of a target's forward: without subnormals if the target flushes them.

    The threshold is then the upper end of a bin that also holds the smallest normal number itself. If many values are
    exactly that number, they count as flushed.
    """
    fp16 = FORMATS["fp16"]
    if not target.flushes_subnormals:
        return fp16
    least = 2.0**target.fp16_flush
    return replace(fp16, min_normal=least, min_subnormal=least, flush_at=math.nextafter(least, 0.0))


def _spreads(profile: RangeProfile) -> Iterator[Spread]:
    kinds: tuple[Literal["activation", "weight", "activation_grad"], ...] = ("activation", "weight", "activation_grad")
    for kind in kinds:
        for index in profile.of_kind(kind):
            top, low = profile.histograms[index].amax, profile.histograms[index].quantile(FP8_FLUSHED)
            if top is not None and low is not None and top < MASK_LIKE:
                binades = math.log2(top) - math.log2(low)
                yield Spread(module=profile.sites[index].module, kind=kind, log2_span=binades)
