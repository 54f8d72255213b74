"""The section `plan` of a report: one global batch on another cluster, and what it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdoctor.evidence.json_records import Count, Fraction, Positive
from ampdoctor.evidence.report_scaler import EmittedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """The devices of a job.

    Attributes:
        devices: All of them.
        tensor: Tensor parallel size.
        pipeline: Pipeline parallel size.
        context: Context parallel size.
        data_parallel: devices / (tensor x pipeline x context).
    """

    devices: Positive
    tensor: Positive
    pipeline: Positive
    context: Positive
    data_parallel: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A way to cut the batch of an optimizer step.

    Attributes:
        micro_batch: Samples that a rank runs at once.
        accumulation: Micro-batches that a rank runs before a step.
        data_parallel: Ranks that see other samples.
        global_batch: The product of the three.
        off: Samples by which that is more than the batch that is asked for; below 0: less.
        devices: Devices that work; fewer than there are where that makes the plan exact.
        bytes_needed: Memory that a device needs for it; None where nothing says that.
        fits: Whether that is there; null where all that is known is that the micro-batch in force fits, and this one is
            larger.
    """

    micro_batch: Positive
    accumulation: Positive
    data_parallel: Positive
    global_batch: Positive
    off: int
    devices: Positive
    bytes_needed: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInForce:
    """How the batch is cut before the change.

    Attributes:
        plan: The plan.
        source: Where that is known from, a clause.
        fits: Whether its micro-batch still fits a device after the change.
    """

    plan: PlannedBatch
    source: str
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a device's memory holds, in bytes; null for what nobody has said.

    Attributes:
        device: What there is.
        per_sample: What a sample of the micro-batch takes.
        states_before: Parameters, gradients and optimizer states on a device of the cluster before.
        states_after: The same on a device of the new cluster.
        max_micro_batch: The largest micro-batch that fits.
        limited_by: What says so, a clause.
        notes: What else there is to say, a sentence each.
    """

    device: float | None
    per_sample: float | None
    states_before: float | None
    states_after: float | None
    max_micro_batch: Count
    limited_by: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """One thing that another plan changes, or does not.

    Attributes:
        what: What is spoken of.
        figure: By how much, in a few words; docs/plan.md says why, and what to do.
    """

    what: str
    figure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedOfPlan:
    """Shares of a gradient's nonzero elements that fp16 makes zero.

    Attributes:
        layer: The module; "" for all together.
        kind: Of activations, or of weights.
        before: With the plan in force, at its loss scale.
        after: With the new plan, at the same scale: at least this much.
        after_most: And at most this much.
        kept: The most with the new plan, at the loss scale that keeps them.
        lower_bound: It is more than that: what these gradients are made of loses much as well.
    """

    layer: str
    kind: Literal["activation_grad", "weight_grad"]
    before: Fraction
    after: Fraction
    after_most: Fraction
    kept: Fraction
    lower_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedByPlan:
    """What the new plan does to the gradients of a saved profile.

    Attributes:
        profile: Its file.
        scale: The loss scale of now.
        init_scale: The one that keeps the shares.
        bound_by: What would overflow at a higher one; null where that one keeps everything.
        totals: All gradients of a kind together.
        layers: Each gradient, those that change most first.
    """

    profile: str
    scale: float
    init_scale: float
    bound_by: str | None
    totals: tuple[FlushedOfPlan, ...]
    layers: tuple[FlushedOfPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """A global batch on another cluster.

    Attributes:
        global_batch: Samples of an optimizer step that are asked for.
        before: The cluster in force; null where nothing was said of one.
        after: The cluster that is planned for.
        current: The plan before; null likewise.
        rule: How the plans are ranked, a clause.
        exact: The plans whose product is the batch, those that do not fit a device included.
        nearest: Where none is exact: the plans of the nearest batches, nearest first.
        fewer: Where none is exact: the first exact plan on fewer devices, of the most that have one.
        memory: What fits a device.
        changes: What the first plan changes.
        flushed: What becomes zero in fp16, where a saved profile was given.
        emit: The first plan in a framework's words.
    """

    global_batch: Positive
    before: PlannedCluster | None
    after: PlannedCluster
    current: BatchInForce | None
    rule: str
    exact: tuple[PlannedBatch, ...]
    nearest: tuple[PlannedBatch, ...]
    fewer: PlannedBatch | None
    memory: DeviceMemory
    changes: tuple[PlanChange, ...] = ()
    flushed: FlushedByPlan | None = None
    emit: EmittedSettings | None = None

    @property
    def use(self) -> PlannedBatch | None:
        """The plan to use: the first exact one that fits; None where there is none."""
        return next((plan for plan in self.exact if plan.fits), None)
