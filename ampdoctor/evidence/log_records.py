"""The lines of a run's log as records: `run` writes them, `health` reads them.

The JSON Schema beside this file is made from the classes (tests/schemas.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from ampdoctor.evidence.json_records import Count, Fraction, Positive, Shape, Text, form
from ampdoctor.evidence.report import Finding, Verdict
from ampdoctor.evidence.report_health import Health
from ampdoctor.evidence.report_profile import HistogramValues

# -- lines about single tensors --

PLAIN: Mapping[str, bool] = MappingProxyType({"plain": True})
"""Metadata of a field whose value consists of JSON values, and is written as it is."""

Role = Literal["parameter", "gradient", "update", "activation", "activation_gradient", "optimizer_state", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetail:
    """One tensor in one step.

    Attributes:
        tensor: Index of its name in the table of the `run` line before it: a parameter's or buffer's own name; of an
            activation or its gradient the module's.
        role: What it is to the run. A gradient is as the optimizer gets it, but for the loss scale; an update is what
            the step adds to the parameter.
        part: Of an activation or its gradient `output` or `input`; of optimizer state the key (`exp_avg`); else "".
        call: Number of the module's call in the step, from 0.
        format: The number format that it is in ("fp16", "bf16", "fp32", "e4m3").
        elements: Number of its elements.
        sampled: Number of those that were counted; null where all were.
        norm: L2 norm.
        amax: Largest finite magnitude.
        nonfinite: Number of counted elements that are NaN or infinite.
        scale: The factor that its numbers carry here, the loss scale of a scaled gradient or an FP8 tensor's own; null
            for none.
        block: Elements that share a scale, in a format that is scaled by blocks.
        zero_share: Share of the counted elements that is zero.
        flushed_share: Share of what is not zero that becomes zero in the half format of the run, at its loss scale.
        log2_headroom: Powers of two from its largest magnitude to its format's maximum, at the loss scale.
        update_ratio: L2 norm of the update over that of the parameter.
        unmoved_share: Share of a parameter's counted elements that the step left as they were.
        histogram: The counted magnitudes, as `Histogram.to_dict()` gives them.
    """

    tensor: Count
    role: Role
    part: str = ""
    call: Count = 0
    format: str | None = None
    elements: Count | None = None
    sampled: Count | None = None
    norm: float | None = None
    amax: float | None = None
    nonfinite: Count | None = None
    scale: float | None = None
    block: Positive | None = None
    zero_share: Fraction | None = None
    flushed_share: Fraction | None = None
    log2_headroom: float | None = None
    update_ratio: float | None = None
    unmoved_share: Fraction | None = None
    histogram: Annotated[Mapping[str, Any], Shape(HistogramValues)] | None = field(default=None, metadata=PLAIN)


class TensorTable(Sequence[TensorDetail]):
    """Tensors by columns, as a reader of many lines has them: a `TensorDetail` is made where one is asked for."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns  # of every field

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def __getitem__(self, at: Any) -> Any:
        return TensorDetail(**{name: column[at] for name, column in self.columns.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | TensorTable) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def column_of(tensors: Sequence[TensorDetail], name: str) -> Sequence[Any]:
    """Returns a field of all tensors."""
    return tensors.columns[name] if isinstance(tensors, TensorTable) else [getattr(one, name) for one in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailLine:
    """Tensors of a step; those of one step may be spread over several lines.

    Attributes:
        step: The attempted step.
        reason: Why they were looked at: "sampled", or what fired.
        optimizer: Index of the optimizer that stepped.
        loss_scale: The step's loss scale, whether or not a tensor carries it; null without one.
        tensors: Any number.
    """

    step: Count
    reason: str = "sampled"
    optimizer: Count = 0
    loss_scale: float | None = None
    tensors: Sequence[TensorDetail] = ()


SCHEMA_VERSION = 2
"""Raised when a change would break a reader of the last version; new kinds and keys do not raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What every line carries.

    Attributes:
        schema_version: Raised where a reader of the last one would break.
        run_id: The run; the same on every rank and in every attempt.
        attempt: Raised by each rollback: steps of an earlier attempt from the first step of this one on are undone.
        branch: The attempt that this one goes on from; null for the first.
        rank: Of the process, from 0.
        world_size: Number of processes.
        restarts: How often the run's processes have been started anew.
        time_ms: Milliseconds since 1970-01-01 UTC at which the line was handed over.
    """

    schema_version: Annotated[int, form(const=SCHEMA_VERSION)] = SCHEMA_VERSION
    run_id: Text
    attempt: Count = 0
    branch: Count | None = None
    rank: Count = 0
    world_size: Positive = 1
    restarts: Count = 0
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """Begins each file of a log, and says anew what further lines speak of once the table of names has grown.

    Attributes:
        name: The run's name, for people.
        tool: The version of ampdoctor that writes.
        segment: Number of the file, from 0 for the oldest.
        tensors: The names that lines speak of by their index here; a later table begins like an earlier one.
        optimizers: Names of the optimizers, by their index.
        groups: Of each optimizer, of each of its parameter groups, the indices of its parameters' names.
        scalers: Names of the scalers, by their index.
        precision: The format that the run computes in (fp16, bf16, fp32, tf32), where it is known.
        autocast: Whether it computes under autocast.
        master_weights: Whether a half model has fp32 master weights in its optimizer.
        accumulation: Micro-steps of a step.
        detail_every: Steps from one detail to the next where nothing fires.
        scaler: State of the first enabled scaler when the run began (`state_dict()` form); null without one.
    """

    name: str
    tool: str = ""
    segment: Count = 0
    tensors: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    groups: tuple[tuple[tuple[Count, ...], ...], ...] = ()
    scalers: tuple[str, ...] = ()
    precision: str | None = None
    autocast: bool | None = None
    master_weights: bool | None = None
    accumulation: Positive | None = None
    detail_every: Positive | None = None
    scaler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A step of one optimizer, taken or skipped.

    Attributes:
        step: Number of the attempted step, from 0.
        accepted: Number of the steps that were taken before it.
        micro_steps: Backwards that it is made of.
        optimizer: Its optimizer's index.
        scaler: Its scaler's index; null without one.
        loss: As the loop computed it; null where it was not seen.
        gradient_norm: L2 norm of all gradients of the optimizer; null where nobody computed it.
        norm_local: Whether the norm is of this rank's gradients alone; false: of all ranks' together.
        norm_reduced: Whether the gradients were averaged or summed over the ranks before it was taken.
        norm_scaled: Whether the norm carries the loss scale.
        norm_clipped: Whether the norm was taken after clipping.
        max_norm: What gradients are clipped to; null where they are not, or by something that was not seen.
        loss_scale: The scale that the step's loss was multiplied by; null without one.
        skipped: Whether the step was not taken; null where that is not known.
        growth_tracker: The scaler's own count of steps since its scale last changed.
        learning_rates: Of each parameter group of the optimizer.
        weight_decays: Likewise, as the groups have them; empty where they have none.
        seconds: From the step before it to this one.
        data_seconds: Those of them that the loop waited for its data; null where that was not seen.
        memory_bytes: Most memory that tensors have held on the device, as its allocator counts it since the run began,
            or since the loop began that count anew; null on a CPU, and where it was asked less than 50 ms ago.
        memory_retries: How often the device's allocator had to free its cache and try again, since the run began.
        samples: Rows of the batches that the models were given, of all ranks, from the run's beginning to this step;
            null where that is not certain.
        tokens: Elements of batches of ids, likewise, padding among them.
        batch_elements: Elements of the batches that the models were given in this step, of all micro-steps, on this
            rank; null where none was seen.
        batch_rms: Root mean square of the numbers that the models were given in this step: of at most 512 elements of
            the batch of each micro-step, on this rank; null for ids, and where no batch was seen.
        batch_zero_share: Share of the same that is zero.
        batch_fingerprint: CRC-32 of the same elements, of ids as well: batches that are the same have the same.
    """

    step: Count
    accepted: Count | None = None
    micro_steps: Count | None = None
    optimizer: Count = 0
    scaler: Count | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    norm_local: bool = False
    norm_reduced: bool = False
    norm_scaled: bool = False
    norm_clipped: bool = False
    max_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    growth_tracker: int | None = None
    learning_rates: tuple[float, ...] = ()
    weight_decays: tuple[float, ...] = ()
    seconds: float | None = None
    data_seconds: float | None = None
    memory_bytes: Count | None = None
    memory_retries: Count | None = None
    samples: Count | None = None
    tokens: Count | None = None
    batch_elements: Count | None = None
    batch_rms: float | None = None
    batch_zero_share: float | None = None
    batch_fingerprint: Count | None = None

    @property
    def norm(self) -> float | None:
        """The norm before clipping, without the loss scale; None where one of these is unknown."""
        return None if self.norm_clipped else self._unscaled_norm

    @property
    def clipped_norm(self) -> float | None:
        """The norm after clipping, without the loss scale; None where nothing clips, or the norm is not finite."""
        norm = self._unscaled_norm
        if self.norm_clipped or norm is None or self.max_norm is None:
            return norm if self.norm_clipped else None
        return min(norm, self.max_norm) if isfinite(norm) else None

    @property
    def _unscaled_norm(self) -> float | None:
        if self.gradient_norm is None or not self.norm_scaled:
            return self.gradient_norm
        return self.gradient_norm / self.loss_scale if self.loss_scale else None

    def per_second(self, counted: Literal["samples", "tokens"], before: StepLine | None) -> float | None:
        """The rate since an earlier line, perhaps of many steps before; `seconds` is the time of one step."""
        if before is None or not self.seconds or self.step <= before.step:
            return None
        now, was = getattr(self, counted), getattr(before, counted)
        seconds = self.seconds * (self.step - before.step)
        return None if now is None or was is None or now < was else (now - was) / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLine:
    """Something that was noticed while the run went on.

    Attributes:
        step: The attempted step.
        finding: What was noticed.
    """

    step: Count
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLine:
    """Something that ampdoctor did to the run, because it was asked to.

    Attributes:
        step: The attempted step.
        action: One word: look, stop, skip, rollback, fallback.
        reason: Why, in a sentence.
        facts: What belongs to this action: where a rollback went, which precision a fallback chose.
    """

    step: Count
    action: Text
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """What is known of a checkpoint of the run; a later line about the same path replaces it.

    Attributes:
        step: The attempted step that it was saved after.
        path: Its path, as the run names it.
        health: What has become known of it.
        reason: Why, in a sentence.
        size_bytes: Size of all its files.
        seconds: How long saving it took.
    """

    step: Count
    path: str
    health: Health = "unknown"
    reason: str = ""
    size_bytes: Count | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookLine:
    """A diagnosis that was made in place.

    Attributes:
        step: The attempted step that was looked at.
        verdict: As of the report.
        findings: As of the report.
        bundle: Path of the bundle that was written, relative to the log's folder; null without one.
        model: What `--model` has to name for the bundle's model to be made again; null where it takes no code.
        reason: What could not be looked at or left behind, in a sentence.
        seconds: How long it took.
        device: Device type of the training ("cuda" as well where a CPU stood in for one); null where it is not known.
        precision: The format that the step computes in; null where it is not known.
        autocast: Whether it computes under autocast; null where it is not known.
    """

    step: Count
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    bundle: str | None = None
    model: str | None = None
    reason: str = ""
    seconds: float | None = None
    device: str | None = None
    precision: str | None = None
    autocast: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLine:
    """Lines that were handed over and are not in the log, counted from its beginning.

    Attributes:
        details: Details that came faster than they could be written.
        steps: Steps, for the same reason, or because their numbers never came from the device.
        others: Others, for the first reason.
        unmade: Lines whose numbers could not be made into text.
        thinned: Old details that were taken out again for the sake of the log's size.
    """

    details: Count = 0
    steps: Count = 0
    others: Count = 0
    unmade: Count = 0
    thinned: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLine:
    """The last line of a process that ended in order.

    Attributes:
        exit_code: Of the script; null where only the watching ended.
        steps: Attempted steps.
        accepted: Those that were taken.
        reason: Why it ended where that was not the script's own end ("SIGTERM", an exception's name).
    """

    exit_code: int | None = None
    steps: Count = 0
    accepted: Count | None = None
    reason: str = ""


Line: TypeAlias = (
    RunLine | StepLine | DetailLine | AlertLine | ActionLine | CheckpointLine | LookLine | LostLine | EndLine
)
KINDS: Mapping[str, type[Any]] = {
    "run": RunLine,
    "step": StepLine,
    "detail": DetailLine,
    "alert": AlertLine,
    "action": ActionLine,
    "checkpoint": CheckpointLine,
    "look": LookLine,
    "lost": LostLine,
    "end": EndLine,
}
"""The word under `kind`, and the class of such a line."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A whole line: the values that every line has, and its own."""

    stamp: Stamp
    line: Line
