"""The kind of line that speaks of single tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from ampdoctor.evidence.codec import Count, Fraction, Positive, Shape
from ampdoctor.evidence.report.profile import HistogramValues

PLAIN: Mapping[str, bool] = MappingProxyType({"plain": True})
"""Metadata of a field whose value consists of what JSON has, and is written as it is."""

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
        headroom_binades: Binades from its largest magnitude to its format's maximum, at the loss scale.
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
    headroom_binades: float | None = None
    update_ratio: float | None = None
    unmoved_share: Fraction | None = None
    histogram: Annotated[Mapping[str, Any], Shape(HistogramValues)] | None = field(default=None, metadata=PLAIN)


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
    tensors: tuple[TensorDetail, ...] = ()
