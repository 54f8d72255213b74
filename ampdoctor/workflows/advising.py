"""From measured ranges to advice on loss scaling: classify first, keep what works, change only what pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.range_rules import CLEARLY_BETTER, NEAR_LIMIT
from ampdoctor.scaling.choice import Prediction, ScaleChoice, choose_scale, predict
from ampdoctor.scaling.settings import ScalerSettings

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.workflows.shadow import Observed

MASK_LIKE = 2.0**120
"""Magnitudes from here on are constants written to be masked out (finfo.min of bf16 or fp32), no activations."""
HORIZON = 10_000
"""Steps over which skips at the start are counted: a short training run."""
SKIPS_THAT_PAY = 1e-3
"""A change pays where it saves this share of the steps (a tenth of a percent, within the noise of equal runs) ..."""
FLUSH_THAT_PAYS = 1e-2
"""... or so large a share of the activation gradients: 1 % is the level up to which nothing was seen to suffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a profile says about loss scaling of an fp16 run.

    Attributes:
        choice: The scale that fits; None where no half gradient was measured.
        current: The run's scaler; one that never moves where the run has none. What that would skip is not skipped.
        now: What is predicted of it.
        then: What is predicted of the recommended settings.
        large: Largest magnitude by module, of half activations within a binade of the limit or beyond it.
    """

    choice: ScaleChoice
    current: ScalerSettings
    now: Prediction
    then: Prediction
    large: dict[str, float]

    @property
    def recommended(self) -> ScalerSettings:
        """Settings that start at the chosen scale."""
        return self.choice.settings


def advise(ranges: RangeProfile, thresholds: Thresholds) -> Advice | None:
    """The advice; None where no half gradient has a finite nonzero value, so that there is nothing to scale."""
    choice = choose_scale(ranges, thresholds)
    if choice is None:
        return None
    state = ranges.run.scaler
    fixed = ScalerSettings(scale=ranges.run.loss_scale, backoff_factor=1.0, growth_interval=0)  # nothing moves it
    current = ScalerSettings.of_state(state) if state is not None else fixed
    return Advice(
        choice=choice,
        current=current,
        now=predict(ranges, current),
        then=predict(ranges, choice.settings, choice.fp32_modules),
        large=large_activations(ranges),
    )


def large_activations(ranges: RangeProfile) -> dict[str, float]:
    """Half activations near fp16's limit, by module."""
    found: dict[str, float] = {}
    for index in ranges.of_kind("activation"):
        module, amax = ranges.sites[index].module, ranges.histograms[index].amax
        if amax is not None and NEAR_LIMIT <= amax < MASK_LIKE:
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
    if advice.now.poisoned or not _settles(advice.now, now):
        return True
    skips = (_skips(advice.now, now) - _skips(advice.then, then)) / HORIZON
    if skips > SKIPS_THAT_PAY:
        return True
    flushed_now, flushed_then = _flushed(advice.now, now), _flushed(advice.then, then)
    if max(flushed_now) <= thresholds.flushed:
        return False  # nothing is lost: what error there is comes from rounding, which no scale changes
    error_now, error_then = _error(advice.now, now), _error(advice.then, then)
    if error_now > thresholds.error_note and error_now > CLEARLY_BETTER * error_then:
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


def outcome_of(expected: Prediction) -> dict[str, Any]:
    """A prediction as the report shows it."""
    return {
        "skip_rate": expected.skip_rate,
        "flushed": {"activation_grad": expected.activation_flushed, "weight_grad": expected.weight_flushed},
        "relative_error": expected.relative_error,
    }


def outcome_seen(seen: Observed) -> dict[str, Any]:
    """A replay as the report shows it."""
    return {
        "skip_rate": seen.skip_rate,
        "flushed": {"activation_grad": seen.activation_flushed, "weight_grad": seen.weight_flushed},
        "relative_error": seen.relative_error,
    }
