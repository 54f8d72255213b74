"""The section `health` of a report: what the logs of runs show over their steps, condensed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdoctor.evidence.json_records import Count, Fraction, Positive, Text
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments

Health = Literal["unknown", "finite", "probation", "good", "sick"]
"""Of a checkpoint: `finite` was scanned, `probation` waits for clean steps after it, `good` has had them."""

CurveName = Literal[
    "loss",
    "gradient_norm",
    "clipped_norm",
    "loss_scale",
    "learning_rate",
    "log2_headroom",
    "step_seconds",
    "data_seconds",
    "samples_per_second",
    "tokens_per_second",
    "memory_bytes",
]
MapName = Literal["norm", "amax", "zero_share", "flushed_share", "log2_headroom", "update_ratio"]
Ending = Literal["running", "ended", "cut_off", "unknown"]
"""`running`: no last line, and the log has grown lately; `cut_off`: no last line, and it has not; `unknown`: a log of
this kind does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAxis:
    """The spans of steps that all curves of a run have in common, in the order of the steps.

    Attributes:
        first: First attempted step of each span.
        last: Last attempted step of each span.
        samples: Of all ranks from the run's beginning to the end of each span; null where they were not counted.
        tokens: Likewise.
        time_ms: Milliseconds since 1970-01-01 UTC at each span's end; null where the log does not say.
        skipped: Steps of each span that were not taken.
    """

    first: tuple[Count, ...]
    last: tuple[Count, ...]
    samples: tuple[Count | None, ...] | None = None
    tokens: tuple[Count | None, ...] | None = None
    time_ms: tuple[int | None, ...] | None = None
    skipped: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One number of a run over its steps; each span of the axis keeps its extremes.

    Attributes:
        name: What it is.
        low: Lowest finite value of each span; null where there is none.
        middle: Median of its finite values.
        high: Highest finite value.
        p99: 99th percentile of its finite values; null where nobody has computed it.
        nonfinite: Values of each span that are NaN or infinite; null where none of any span is.
    """

    name: CurveName
    low: tuple[float | None, ...]
    middle: tuple[float | None, ...]
    high: tuple[float | None, ...]
    p99: tuple[float | None, ...] | None = None
    nonfinite: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """One number of many tensors over the steps at which single tensors were looked at.

    Attributes:
        name: What it is.
        role: What the tensors are to the run, as in the log's details.
        steps: Attempted step of each column; of a long run the one whose values are the worst of their span.
        tensors: Names of the rows, in the order of the log's table.
        of: Rows that the log has; more than `tensors` where the least conspicuous were left out.
        values: A row a tensor.
    """

    name: MapName
    role: str
    steps: tuple[Count, ...]
    tensors: tuple[str, ...]
    of: Count
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """A checkpoint of the run.

    Attributes:
        step: The attempted step that it was saved after.
        path: As the run names it.
        health: What is known of it.
        reason: Why, in a sentence.
    """

    step: Count
    path: str
    health: Health
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookMark:
    """A diagnosis that was made in place.

    Attributes:
        step: The attempted step.
        verdict: Its report's.
        says: The message of its first finding; "" where it found nothing.
        bundle: Path of the bundle that was left behind, as the reader can give it to a command; null without one.
        command: What replays it; null without a bundle.
        device: Device type of the training ("cuda" as well where a CPU stood in for one); null where it is not known.
        precision: The format that the step computes in; null where it is not known.
        autocast: Whether it computes under autocast; null where it is not known.
    """

    step: Count
    verdict: str
    says: str = ""
    bundle: str | None = None
    command: str | None = None
    device: str | None = None
    precision: str | None = None
    autocast: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMark:
    """Something that was done to the run, because it was asked for.

    Attributes:
        step: The attempted step.
        action: One word: look, stop, skip, rollback, fallback.
        reason: Why, in a sentence.
    """

    step: Count
    action: Text
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerHistory:
    """Loss scaling over a run's steps, or over a series of checkpoints.

    Attributes:
        scaler: Its name or index; "" for the only one.
        path: The scale as it was; its replica is 0.
        growths: How often the scale rose.
        backoffs: How often it fell.
        growth_tracker: The scaler's own count of steps since its scale last changed, at the end.
        arguments: Its settings, where the log has them.
    """

    scaler: str = ""
    path: ScalePath
    growths: Count
    backoffs: Count
    growth_tracker: int | None = None
    arguments: ScalerArguments | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRun:
    """One run, or one optimizer of a run that has several.

    Attributes:
        name: For people.
        source: Path of its log, as the user named it.
        format: Whose log it is: "ampdoctor", "transformers", "lightning", "tensorboard", "megatron", "deepspeed",
            "wandb", "table" (CSV or JSON lines) or "console" (what a job has printed).
        optimizer: The optimizer's name where the run has several; "" otherwise.
        ending: Whether it still runs.
        exit_code: The script's, where the log says it.
        precision: The format that it computed in, where the log says it.
        steps: Attempted steps that the log has.
        skipped: Those that were not taken.
        first_step: Number of the first.
        last_step: Number of the last.
        lost: Lines that were handed over and are not in the log.
        skip_share: Share of the attempted steps that were not taken; null where that is not known.
        axis: The spans that the curves have in common.
        curves: Those that the log has numbers for.
        maps: Those that the log has details for.
        scalers: One a scaler.
        checkpoints: In the order of their steps.
        looks, actions: Likewise.
    """

    name: str
    source: str
    format: Text
    optimizer: str = ""
    ending: Ending = "unknown"
    exit_code: int | None = None
    precision: str | None = None
    steps: Count
    skipped: Count = 0
    first_step: Count = 0
    last_step: Count = 0
    lost: Count = 0
    skip_share: Fraction | None = None
    axis: HealthAxis
    curves: tuple[Curve, ...] = ()
    maps: tuple[HeatMap, ...] = ()
    scalers: tuple[ScalerHistory, ...] = ()
    checkpoints: tuple[CheckpointMark, ...] = ()
    looks: tuple[LookMark, ...] = ()
    actions: tuple[ActionMark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    """Runs over their steps, side by side.

    Attributes:
        runs: In the order in which the user named them.
        axis: What several runs are laid beside each other by.
        detail_every: Steps from one detail to the next in the first run; null where the log has none.
    """

    runs: tuple[HealthRun, ...]
    axis: Literal["step", "samples", "tokens"] = "step"
    detail_every: Positive | None = None
