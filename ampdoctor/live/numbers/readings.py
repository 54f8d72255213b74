"""A step whose numbers are on their way, and what is read from them on the host, for a line of the run's log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ampdoctor.hooks.callbacks import Clip
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.activations import HALF, NO_BATCH, Arrived, BatchReading, Returned, batch_of
from ampdoctor.live.numbers.async_reader import Parcel
from ampdoctor.live.numbers.norms_and_samples import Moved, Sampled, Updates, cut, moved
from ampdoctor.numerics import Histogram
from ampdoctor.probes.formats_seen import FORMATS

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


# Which of the clippings that were heard are of an optimizer's gradients, and whether their norm is that of all.


@dataclass(slots=True, eq=False)
class Heard:
    """A clipping since the last step.

    Attributes:
        clip: The clipping.
        scaled: The gradients carried the loss scale then.
    """

    clip: Clip
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What clipping knows of an optimizer's gradients.

    Attributes:
        parts: Clippings of disjoint sets of gradients, together exactly the optimizer's; the norm of their norms is
            that of all. () where there are none such.
        clipped: Some of the gradients were clipped.
        only: The one clipping there was; None where there were more or none.
    """

    parts: tuple[Heard, ...] = ()
    clipped: bool = False
    only: Heard | None = None


class Clippings:
    """Those that were heard and not yet used by a step."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []

    def __bool__(self) -> bool:
        return bool(self._heard)

    def add(self, clip: Clip) -> None:
        """A clipping is about to be made."""
        self._heard.append(Heard(clip))

    def carry_scale(self, gradients: AbstractSet[int]) -> None:
        """What was clipped of these so far was still scaled."""
        for heard in self._heard:
            if heard.clip.gradients & gradients:
                heard.scaled = True

    def forget(self, gradients: AbstractSet[int] | None = None) -> None:
        """A step has used these gradients (None: all), or they are cleared: their ids may be others' from here on."""
        self._heard = [h for h in self._heard if gradients is not None and not h.clip.gradients & gradients]

    def norm_of(self, gradients: AbstractSet[int]) -> Norm:
        """Returns what is known of these gradients; of two clippings of the same the first counts."""
        mine = [heard for heard in self._heard if heard.clip.gradients & gradients]
        parts: list[Heard] = []
        covered: set[int] = set()
        exact = True
        for heard in mine:
            own = heard.clip.gradients
            if own <= covered:
                continue
            exact &= own <= gradients and not own & covered and heard.clip.norm_type in {2.0, None}
            covered |= own
            parts.append(heard)
        whole = exact and covered == set(gradients)
        return Norm(parts=tuple(parts) if whole else (), clipped=bool(mine), only=mine[0] if len(mine) == 1 else None)


# A step whose numbers are on their way, and what is read from them when they have arrived.


Sections = Mapping[str, Sequence[Tensor]]

_SICK = 16
"""Gradients that a step names."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sent:
    """What the host knows of a step before its numbers arrive.

    Attributes:
        number: Of the attempted step.
        optimizer: Its name.
        reason: Why single tensors are looked at; None where they are not.
        clips: The clippings of its gradients.
        unscaled: The gradients were divided by the loss scale.
        scale: The loss scale, where it is a number and not a tensor.
        gradients: `id` of each.
        shards: Some of them are distributed.
        skipped: As in `StepReading`.
        norms: Names of gradients, in the order of the section "norms".
        weights: Names of parameters, in the order of "weights".
        sampled: Gradients, in the order of "gradients".
        extremes: Names of gradients, in the order of the pairs in "extremes".
        updates: Parameters, in the order of "parameters" and "changes".
        returned: Activations, in the order of "returned", "returned_extremes" (pairs) and "returned_norm".
        arrived: Gradients of activations, in the order of "arrived".
        batches_are_numbers: What is in "batches" are numbers, and no ids.
        batch_elements: Elements of the batches that these were drawn from.
        parcel: The numbers.
    """

    number: int
    optimizer: str
    reason: str | None
    clips: Norm
    unscaled: bool
    scale: float | None = None
    gradients: frozenset[int] = frozenset()
    shards: bool = False
    skipped: bool | None = None
    norms: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    extremes: tuple[str, ...] = ()
    updates: Updates | None = None
    returned: tuple[Returned, ...] = ()
    arrived: tuple[Arrived, ...] = ()
    batches_are_numbers: bool = False
    batch_elements: int = 0
    parcel: Parcel = field(default_factory=Parcel)


@unseen()
def step_of(sent: Sent, sections: Sections) -> StepReading:
    """Returns what a step's numbers say.

    Args:
        sent: The step.
        sections: Its numbers, on the CPU.
    """
    scale = _scale(sent, sections)
    norms = _numbers(sections, "norms")
    tracker = _first(sections, "growth_tracker")
    first = sent.clips.parts[0] if sent.clips.parts else sent.clips.only
    return StepReading(
        step=sent.number,
        optimizer=sent.optimizer,
        losses=tuple(_numbers(sections, "losses")),
        gradient_norm=_gradient_norm(sent, sections, scale),
        norm_heard=bool(sent.clips.parts),
        norm_local=sent.shards,
        norm_clipped=sent.clips.clipped and not sent.clips.parts,
        max_norm=None if first is None else first.clip.max_norm,
        loss_scale=scale,
        skipped=_skipped(sent, sections),
        growth_tracker=None if tracker is None else int(tracker),
        sick=tuple(name for name, n in zip(sent.norms, norms, strict=True) if not math.isfinite(n))[:_SICK],
        batch=batch_of(sections.get("batches", ()), elements=sent.batch_elements, numbers=sent.batches_are_numbers),
    )


@unseen()
def detail_of(sent: Sent, sections: Sections) -> DetailReading:
    """Returns what a step's samples say; counts them, some 0.2 ms a tensor.

    Args:
        sent: A step with a reason.
        sections: Its numbers, on the CPU.
    """
    scale = _scale(sent, sections)
    half = _half_of(sent, scale)
    tensors = [
        *_gradients(sent, sections, scale, half),
        *_parameters(sent, sections),
        *_returned(sent, sections),
        *_arrived(sent, sections, scale, half),
    ]
    return DetailReading(
        step=sent.number,
        optimizer=sent.optimizer,
        reason=sent.reason or "",
        loss_scale=scale,
        tensors=tuple(tensors),
    )


def _gradients(sent: Sent, sections: Sections, scale: float | None, half: str | None) -> list[TensorReading]:
    norms = dict(zip(sent.norms, _numbers(sections, "norms"), strict=True))
    extremes = dict(zip(sent.extremes, _joined(sections, "extremes").reshape(-1, 2), strict=True))
    carried = None if sent.unscaled else scale
    kept = _kept_by_clipping(sent, sections)
    factor = None if kept is None else (1.0 if carried is not None else scale or 1.0) / kept
    return [
        tensor_reading(
            "gradient",
            row,
            values,
            half=half,
            factor=factor,
            extremes=extremes.get(row.name),
            norm=norms.get(row.name),
            scale=carried,
        )
        for row, values in zip(sent.sampled, cut(sent.sampled, _joined(sections, "gradients")), strict=True)
    ]


def _parameters(sent: Sent, sections: Sections) -> list[TensorReading]:
    if sent.updates is None:
        return []
    rows = [row for samples in sent.updates.before for row in samples.plan]
    norms = dict(zip(sent.weights, _numbers(sections, "weights"), strict=True))
    before = cut(rows, _joined(sections, "parameters"))
    taken = "changes" in sections and not _skipped(sent, sections)
    updates: list[Moved | None] = [None] * len(rows)
    if taken:
        changes = cut(rows, _joined(sections, "changes"))
        random = sent.updates.random
        updates = [moved(values, change, random=random) for values, change in zip(before, changes, strict=True)]
    return [
        tensor_reading("parameter", row, values, half=None, factor=None, norm=norms.get(row.name), update=update)
        for row, values, update in zip(rows, before, updates, strict=True)
    ]


def _returned(sent: Sent, sections: Sections) -> list[TensorReading]:
    values, norms = sections.get("returned", ()), _numbers(sections, "returned_norm")
    extremes = _joined(sections, "returned_extremes").reshape(-1, 2)
    return [
        tensor_reading(
            "activation",
            found.sampled,
            value,
            half=FORMATS[found.sampled.dtype],
            factor=1.0,
            extremes=extreme,
            norm=norm,
            part=found.part,
            call=found.call,
        )
        for found, value, extreme, norm in zip(sent.returned, values, extremes, norms, strict=True)
    ]


def _half_of(sent: Sent, scale: float | None) -> str | None:
    """Returns the half format that the step's gradients pass through; None where it computes in none, or none is seen.

    It is that of what modules return, or of the gradients themselves; else fp16 where there is a loss scale.
    """
    seen = {FORMATS[one.sampled.dtype] for one in sent.returned} | {
        FORMATS[row.dtype] for row in sent.sampled if row.dtype in HALF
    }
    return next((half for half in ("fp16", "bf16") if half in seen), None if scale is None else "fp16")


def _arrived(sent: Sent, sections: Sections, scale: float | None, half: str | None) -> list[TensorReading]:
    return [
        tensor_reading(
            "activation_gradient",
            found.sampled,
            values,
            half=half,
            factor=1.0,
            scale=scale,
            part=found.part,
            call=found.call,
        )
        for found, values in zip(sent.arrived, sections.get("arrived", ()), strict=True)
    ]


def _gradient_norm(sent: Sent, sections: Sections, scale: float | None) -> float | None:
    if sent.clips.parts:
        totals = _numbers(sections, "clip")
        scaled = [part.scaled for part in sent.clips.parts]
        return math.hypot(*(_divided(n, scale if s else None) for n, s in zip(totals, scaled, strict=True)))
    norms = _numbers(sections, "norms")
    return _divided(math.hypot(*norms), None if sent.unscaled else scale) if norms else None


def _kept_by_clipping(sent: Sent, sections: Sections) -> float | None:
    """Returns what clipping has multiplied the gradients by, as torch computes it; None where that is not known."""
    if not sent.clips.clipped:
        return 1.0
    if sent.clips.only is None:
        return None
    seen = _first(sections, "clip")
    if seen is None:  # it was of some of them, or of more
        return None
    kept = min(sent.clips.only.clip.max_norm / (seen + 1e-6), 1.0)
    return kept if kept > 0.0 else None


def _skipped(sent: Sent, sections: Sections) -> bool | None:
    flags = _numbers(sections, "found_inf")
    return any(flags) if sent.skipped is None and flags else sent.skipped


def _scale(sent: Sent, sections: Sections) -> float | None:
    return sent.scale if sent.scale is not None else _first(sections, "scale")


def _divided(number: float, scale: float | None) -> float:
    return number / scale if scale else number


def _numbers(sections: Sections, key: str) -> list[float]:
    return [number for section in sections.get(key, ()) for number in section.tolist()]


def _first(sections: Sections, key: str) -> float | None:
    return next(iter(_numbers(sections, key)), None)


def _joined(sections: Sections, key: str) -> Tensor:
    parts = list(sections.get(key, ()))
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")
