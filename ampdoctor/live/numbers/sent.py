"""A step whose numbers are on their way, and what is read from them when they have arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.activations import HALF, Returned
from ampdoctor.live.numbers.batch import batch_of
from ampdoctor.live.numbers.heard import Norm
from ampdoctor.live.numbers.incoming import Arrived
from ampdoctor.live.numbers.parcel import Parcel
from ampdoctor.live.numbers.readings import DetailReading, StepReading, TensorReading, tensor_reading
from ampdoctor.live.numbers.sampling import Sampled, cut
from ampdoctor.live.numbers.updates import Moved, Updates, moved
from ampdoctor.probes.measures.module_facts import FORMATS

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
