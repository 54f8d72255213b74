"""The section `scaler` of a report: loss scaling as it is, as it should be, and what either comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ampdoctor.evidence.json_records import Count, Fraction, Positive
from ampdoctor.evidence.targets import Framework

Language = Literal["python", "json", "shell", "toml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerArguments:
    """Arguments of a GradScaler.

    Attributes:
        init_scale: Loss scale to start with.
        growth_factor: What the scale is multiplied with when it grows.
        backoff_factor: What it is multiplied with after an overflow.
        growth_interval: Steps without overflow after which the scale grows.
    """

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingBound:
    """What holds one setting of a scaler.

    Attributes:
        value: The closed form.
        by: What holds it, a clause.
    """

    value: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedGradients:
    """Shares of nonzero gradients that become zero.

    Attributes:
        activation_grad: Of the gradients of half activations.
        weight_grad: Of the gradients of weights that pass through the half format.
    """

    activation_grad: Fraction | None
    weight_grad: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOutcome:
    """What some scaler settings cost.

    Attributes:
        skip_rate: Share of steps that the scaler skips.
        flushed: Shares of nonzero gradients that become zero.
        relative_error: Relative error of the gradients, against fp32.
    """

    skip_rate: Fraction | None
    flushed: FlushedGradients
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOutcome:
    """Of a simulation; relative_error as a run would have it.

    Attributes:
        skips: 5, 50 and 95 % quantile of the replicas.
        skip_rate: Median share of skipped steps.
        relative_error: L2 error of the weight gradients from rounding each tensor once, mean over the taken
            steps; median of the replicas.
        activation_flushed: Share of nonzero activation gradients that become zero, likewise.
        weight_flushed: Share of nonzero weight gradients that become zero, likewise.
        final_scale: Median loss scale at the end of the horizon.
        inf_in_weights: Share of the replicas whose weights became infinite.
    """

    skips: tuple[float, float, float]
    skip_rate: Fraction
    relative_error: float
    activation_flushed: Fraction
    weight_flushed: Fraction
    final_scale: float
    inf_in_weights: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Outcomes of the simulation, by settings.

    Attributes:
        current: Of the settings in use; None where the run has no scaler.
        default: Of torch's defaults.
        recommended: Of the recommended settings, or of those in use where they are kept.
    """

    current: SimulatedOutcome | None
    default: SimulatedOutcome | None
    recommended: SimulatedOutcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePath:
    """The loss scale along one replica.

    Attributes:
        points: [step, scale] from which step on it is this scale; of more than 2,000 changes the lowest and the
            highest scale in each of 1,000 equal spans.
        changes: Points without that thinning.
        skips: Skipped steps; an even choice of more than 2,000.
        skipped: How many steps are skipped.
        replica: Number of the replica.
    """

    points: tuple[tuple[float, float], ...]
    changes: Positive
    skips: tuple[Count, ...]
    skipped: Count
    replica: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePaths:
    """The loss scale over the horizon, with each settings.

    Attributes:
        current: Of the settings in use; None where the run has no scaler.
        recommended: Of the recommended settings; None where those in use are kept.
        limit: [recorded step, largest power of two at which none of its half gradients overflows], of steps
            with a known largest gradient; of more than 2,000 steps the lowest in each of 2,000 equal spans.
    """

    current: ScalePath | None
    recommended: ScalePath | None
    limit: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMargin:
    """What the best settings gain.

    Attributes:
        skip_rate: Median difference over the replicas.
        relative_error: Median difference over the replicas.
        headroom: Powers of two that the scale in use starts below the closed form; negative above it.
    """

    skip_rate: float
    relative_error: float
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfidence:
    """What the answer rests on.

    Attributes:
        steps: Recorded steps.
        censored: Share of them whose largest gradient is not known.
        exceedances: Steps ahead that are expected to exceed the largest recorded gradient: m / (n + 1).
        drift: Powers of two per step that the largest gradient drifts by; 0 where that is not certain.
        spiky: The tail of the largest gradients is heavy: how high the next spike goes is not known.
        low: A recording of 50 steps in fp32 or bf16 should come first.
    """

    steps: int
    censored: Fraction
    exceedances: float
    drift: float
    spiky: bool
    low: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedSettings:
    """Settings in the words of a framework.

    Attributes:
        framework: Whose words.
        language: Of the text: Python to paste where the model has been built, JSON or TOML to merge
            into a configuration, or a bash array of flags.
        text: The fragment.
        notes: What the framework does otherwise than the settings say, and what must be watched, a sentence
            each.
    """

    framework: str
    language: Language
    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSection:
    """The loss scaling of a run: what is there, what to use, and what either comes to.

    Attributes:
        current: The scaler's state or arguments as found; None where there is none.
        recommended: The settings to use.
        change: Whether they differ from the present ones in a way that matters.
        bound_by: What holds each setting, in words.
        predicted: What the profile says of the recommended settings.
        observed: What a replay with them showed.
        framework: Whose scaler is simulated.
        bounds: The closed form of each setting, and what holds it.
        horizon: Steps that the simulation looks ahead.
        simulated: What the scaler's exact rules make of resampled traces.
        trajectory: The loss scale over the horizon in one bootstrap replica of the recorded steps: for each
            settings the replica whose number of skipped steps is nearest to the median (the first of several).
        margin: What the best settings found gain over those in use, in the figures of `simulated`.
        confidence: What the answer rests on.
        before: What a replay with the present ones showed.
        emit: The settings in a framework's words.
    """

    current: Mapping[str, Any] | None = None
    recommended: ScalerArguments | None = None
    change: bool = False
    bound_by: str | None = None
    predicted: ScalingOutcome | None = None
    observed: ScalingOutcome | None = None
    framework: Framework | None = None
    bounds: Mapping[str, SettingBound] | None = None
    horizon: int | None = None
    simulated: Simulated | None = None
    trajectory: ScalePaths | None = None
    margin: ScalingMargin | None = None
    confidence: ScalingConfidence | None = None
    before: ScalingOutcome | None = None
    emit: EmittedSettings | None = None
