"""What has arrived on the host, as plain numbers; each maps onto a line of the run's log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ampdoctor.live.numbers.batch import NO_BATCH, BatchReading
from ampdoctor.live.numbers.sampling import Sampled
from ampdoctor.live.numbers.updates import Moved
from ampdoctor.numerics import Histogram
from ampdoctor.probes.measures.module_facts import FORMATS

Role = Literal["parameter", "gradient", "activation", "activation_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """One step of one optimizer, taken or skipped.

    Attributes:
        step: Number of the attempted step.
        optimizer: Name of the optimizer.
        losses: Of the backwards since the optimizer's step before, unscaled, in their order.
        gradient_norm: L2 norm of all its gradients, unscaled; None where it had none. Not finite where one is not.
        norm_heard: It is what clipping computed, and was not computed for this.
        norm_local: It is of this process's shards alone.
        norm_clipped: It was taken after a clipping that was not of exactly these gradients, or not by their L2 norm.
        max_norm: What clipping cuts the norm to, in the units that it saw; None where none was heard.
        loss_scale: What the gradients were or are still multiplied by; None without a scaler.
        skipped: Whether the step was not taken; None where that is not known.
        growth_tracker: The scaler's count of steps since its scale last changed.
        sick: Names of gradients whose norms are not finite, of those that were computed for this.
        batch: What its batches are like.
    """

    step: int
    optimizer: str
    losses: tuple[float, ...] = ()
    gradient_norm: float | None = None
    norm_heard: bool = False
    norm_local: bool = False
    norm_clipped: bool = False
    max_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    growth_tracker: int | None = None
    sick: tuple[str, ...] = ()
    batch: BatchReading = NO_BATCH

    @property
    def micro_steps(self) -> int:
        """Backwards that it is made of."""
        return len(self.losses)

    @property
    def loss(self) -> float | None:
        """Returns what the gradients are the gradient of: the sum of the losses; None where none was seen."""
        return sum(self.losses) if self.losses else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorReading:
    """One tensor in a detail step.

    Attributes:
        name: Of the parameter, or of the module for an activation and its gradient.
        role: What it is. A gradient is as the optimizer gets it.
        part: Of an activation and its gradient "output" or "input", else "".
        call: Number of the module's call.
        format: Its number format ("fp16").
        elements: Number of its elements on this process.
        sampled: Number of those that were counted.
        norm: L2 norm of all elements; None for an activation's gradient.
        amax: Largest finite magnitude: exact for a gradient that is finite, else of the sample; None without one.
        nonfinite: Counted elements that are NaN or infinite.
        scale: The factor that its numbers carry, the loss scale of a scaled gradient; None for none.
        zero_share: Share of the counted elements that is zero.
        flushed_share: Of a gradient: share of what is not zero that becomes zero in the half format, multiplied by the
            loss scale and not clipped; None for a parameter.
        subnormal_share: Share of the same that keeps fewer bits there.
        headroom_binades: Binades from `amax`, so multiplied, to the half format's maximum; negative beyond it.
        update_ratio: As `updates.Moved.ratio`, of a parameter.
        unmoved_share: As `updates.Moved.unmoved`, of a parameter.
        histogram: The counted magnitudes.
    """

    name: str
    role: Role
    part: str = ""
    call: int = 0
    format: str
    elements: int
    sampled: int
    norm: float | None = None
    amax: float | None = None
    nonfinite: int = 0
    scale: float | None = None
    zero_share: float = 0.0
    flushed_share: float | None = None
    subnormal_share: float | None = None
    headroom_binades: float | None = None
    update_ratio: float | None = None
    unmoved_share: float | None = None
    histogram: Histogram


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetailReading:
    """The tensors of one step of one optimizer.

    Attributes:
        step: Number of the attempted step.
        optimizer: Name of the optimizer.
        reason: "sampled", or what asked for the look.
        loss_scale: As in `StepReading`.
        tensors: Gradients, then parameters, each in the optimizer's order; then activations, then gradients of such.
    """

    step: int
    optimizer: str
    reason: str
    loss_scale: float | None
    tensors: tuple[TensorReading, ...]


def tensor_reading(
    role: Role,
    row: Sampled,
    values: Tensor,
    *,
    half: str | None,
    factor: float | None,
    extremes: Tensor | None = None,
    norm: float | None = None,
    scale: float | None = None,
    update: Moved | None = None,
    part: str = "",
    call: int = 0,
) -> TensorReading:
    """Returns the figures of a tensor, counted on the host.

    Args:
        role: What it is.
        row: What its sample is of.
        values: The sample, float32 or float64 on the CPU.
        half: Name of the half format that its numbers pass through; None where that is none, or is not known.
        factor: What the numbers are multiplied by before they are half; None where they never are, or it is unknown.
        extremes: Its smallest and largest element; None where they are not known.
        norm: Of the whole tensor.
        scale: What its numbers carry.
        update: Of a parameter that a step has moved.
        part: Of an activation and its gradient.
        call: Of its module.
    """
    counted = Histogram.of(values.to(row.dtype))  # exact: it was widened, and a format's own values round to nothing
    times = factor if factor is not None and 0.0 < factor < math.inf else None
    amax = _amax(counted, extremes)
    largest = None if amax is None else Histogram.of(torch.tensor([amax], dtype=torch.float64, device="cpu"))
    return TensorReading(
        name=row.name,
        role=role,
        part=part,
        call=call,
        format=FORMATS.get(row.dtype, str(row.dtype).removeprefix("torch.")),
        elements=row.elements,
        sampled=row.count,
        norm=norm,
        amax=amax,
        nonfinite=counted.nans + counted.pos_infs + counted.neg_infs,
        scale=scale,
        zero_share=counted.zeros / counted.numel if counted.numel else 0.0,
        flushed_share=None if half is None or times is None else counted.flushed(half, times),
        subnormal_share=None if half is None or times is None else counted.subnormal(half, times),
        headroom_binades=None if half is None or largest is None or times is None else largest.headroom(half, times),
        update_ratio=None if update is None else update.ratio,
        unmoved_share=None if update is None else update.unmoved,
        histogram=counted,
    )


def _amax(counted: Histogram, extremes: Tensor | None) -> float | None:
    """Returns the largest finite magnitude that is known; None where nothing is finite and nonzero."""
    exact = math.nan if extremes is None else float(extremes.abs().amax())
    return (exact or None) if math.isfinite(exact) else counted.amax
