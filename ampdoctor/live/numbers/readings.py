"""A step whose numbers are still on the device, and the readings made from them on the host for the run's log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ampdoctor.evidence.log_records import DetailLine, TensorDetail
from ampdoctor.hooks.callbacks import Clip
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.activations import HALF, NO_BATCH, Activation, AtModule, BatchReading, batch_of
from ampdoctor.live.numbers.async_reader import PackedTensors
from ampdoctor.live.numbers.norms_and_samples import Moved, Sampled, Updates, cut, moved
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.probes.formats_seen import FORMATS

Role = Literal["parameter", "gradient", "activation", "activation_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """One step of one optimizer, taken or skipped."""

    step: int  # number of the attempted step
    optimizer: str  # its name
    losses: tuple[float, ...] = ()  # one for each backward since the last step, in order, unscaled
    gradient_norm: float | None = None  # L2 norm of all gradients, unscaled; not finite where a gradient is not
    norm_local: bool = False  # the norm of this process's shards alone
    norm_clipped: bool = False  # taken after a clipping of other gradients than exactly these, or by another norm
    max_norm: float | None = None  # the limit of clipping, in the units of the gradients that it clipped
    loss_scale: float | None = None  # the factor that the gradients had or still have; None without a scaler
    skipped: bool | None = None  # None where that is not known
    growth_tracker: int | None = None  # the scaler's count of steps since its scale last changed
    sick: tuple[str, ...] = ()  # names of gradients with a non-finite norm, where norms were computed here
    batch: BatchReading = NO_BATCH

    @property
    def micro_steps(self) -> int:
        """The number of its backwards."""
        return len(self.losses)

    @property
    def loss(self) -> float | None:
        """The sum of the losses, which the gradients belong to; None where no loss was seen."""
        return sum(self.losses) if self.losses else None


def tensor_detail(
    role: Role,
    row: Sampled,
    values: Tensor,
    index: int,
    *,
    half: str | None = None,
    factor: float | None = None,
    extremes: Tensor | None = None,
    norm: float | None = None,
    scale: float | None = None,
    update: Moved | None = None,
    part: str = "",
    call: int = 0,
) -> TensorDetail:
    """Returns a tensor's figures by its sample; `factor` multiplied its numbers when they passed `half`."""
    counted = count(values.to(row.dtype))  # exact: the values were widened from this dtype
    times = factor if factor is not None and 0.0 < factor < math.inf else None
    amax = _amax(counted, extremes)
    largest = None if amax is None else count(torch.tensor([amax], dtype=torch.float64, device="cpu"))
    return TensorDetail(
        tensor=index,
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
        log2_headroom=None if half is None or largest is None or times is None else largest.headroom(half, times),
        update_ratio=None if update is None else update.ratio,
        unmoved_share=None if update is None else update.unmoved,
        histogram=None if role == "activation" else counted.to_dict(),  # they are many
    )


def _amax(counted: Histogram, extremes: Tensor | None) -> float | None:
    """Returns the largest known finite magnitude; None where nothing is finite and nonzero."""
    exact = math.nan if extremes is None else float(extremes.abs().amax())
    return (exact or None) if math.isfinite(exact) else counted.amax


# -- clipping --


@dataclass(slots=True, eq=False)
class ClipEvent:
    """A clipping since the last step; `scaled` where the gradients carried the loss scale at the time."""

    clip: Clip
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The clippings of an optimizer's gradients."""

    whole: ClipEvent | None = None  # the first, if it clipped exactly these gradients by their L2 norm
    clipped: bool = False  # some of the gradients were clipped
    only: ClipEvent | None = None  # the clipping, if there was exactly one


class ClipLog:
    """The clippings that no step has used yet."""

    def __init__(self) -> None:
        self._events: list[ClipEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, clip: Clip) -> None:
        """Called before a clipping."""
        self._events.append(ClipEvent(clip))

    def carry_scale(self, gradients: AbstractSet[int]) -> None:
        """Marks the clippings of these gradients so far: the gradients were still scaled."""
        for event in self._events:
            if event.clip.gradients & gradients:
                event.scaled = True

    def forget(self, gradients: AbstractSet[int] | None = None) -> None:
        """Drops clippings of gradients (None: all) that a step has used or that are cleared: ids may be reused."""
        self._events = [h for h in self._events if gradients is not None and not h.clip.gradients & gradients]

    def norm_of(self, gradients: AbstractSet[int]) -> Norm:
        """Returns the clippings of these gradients; of two clippings of the same gradients the first counts."""
        mine = [event for event in self._events if event.clip.gradients & gradients]
        first = mine[0] if mine and mine[0].clip.gradients == gradients else None
        whole = first if first is not None and first.clip.norm_type in {2.0, None} else None
        return Norm(whole=whole, clipped=bool(mine), only=mine[0] if len(mine) == 1 else None)


# -- from numbers to readings --

Sections = Mapping[str, Sequence[Tensor]]

_SICK = 16
"""Most names in `StepReading.sick`."""


@dataclass(slots=True, kw_only=True, eq=False)
class PendingReading:
    """The host's data about a step whose numbers have not arrived. A section is a list of tensors in the parcel."""

    number: int  # of the attempted step
    optimizer: str  # its name
    reason: str | None  # why single tensors are looked at; None where they are not
    clips: Norm
    unscaled: bool  # the gradients were divided by the loss scale
    scale: float | None = None  # the loss scale, where it is a number and not a tensor
    shards: bool = False  # some gradients are distributed
    skipped: bool | None = None  # as in `StepReading`
    norms: tuple[str, ...] = ()  # names of gradients, in the order of the section "norms"
    weights: tuple[str, ...] = ()  # names of parameters, in the order of "weights"
    sampled: tuple[Sampled, ...] = ()  # gradients, in the order of "gradients"
    extremes: tuple[str, ...] = ()  # names of gradients, in the order of the pairs in "extremes"
    updates: Updates | None = None  # parameters, in the order of "parameters" and "changes"
    returned: tuple[Activation, ...] = ()  # in the order of "returned", "returned_extremes" (pairs), "returned_norm"
    arrived: tuple[AtModule, ...] = ()  # in the order of "arrived"
    batches_are_numbers: bool = False  # "batches" holds numbers, not ids
    batch_elements: int = 0  # elements of the batches that "batches" is a sample of
    parcel: PackedTensors = field(default_factory=PackedTensors)


def step_of(sent: PendingReading, sections: Sections) -> StepReading:
    """Returns a step's reading from its numbers, which are on the CPU."""
    scale = _scale(sent, sections)
    norms = _numbers(sections, "norms")
    tracker = _first(sections, "growth_tracker")
    first = sent.clips.whole or sent.clips.only
    return StepReading(
        step=sent.number,
        optimizer=sent.optimizer,
        losses=tuple(_numbers(sections, "losses")),
        gradient_norm=_gradient_norm(sent, sections, scale),
        norm_local=sent.shards,
        norm_clipped=sent.clips.clipped and sent.clips.whole is None,
        max_norm=None if first is None else first.clip.max_norm,
        loss_scale=scale,
        skipped=_skipped(sent, sections),
        growth_tracker=None if tracker is None else int(tracker),
        sick=tuple(name for name, n in zip(sent.norms, norms, strict=True) if not math.isfinite(n))[:_SICK],
        batch=batch_of(sections.get("batches", ()), elements=sent.batch_elements, numbers=sent.batches_are_numbers),
    )


IndexOf = Callable[[str], int]
"""Returns the index of a tensor's or module's name in the log."""


_Seen = tuple[Role, Sampled, Tensor, dict[str, Any]]
"""A sampled tensor with its values, and the keywords of `tensor_detail`."""


@unseen()
def detail_of(sent: PendingReading, sections: Sections, optimizers: Mapping[str, int], index_of: IndexOf) -> DetailLine:
    """Returns the line of a step's samples, which are on the CPU; counting takes some 0.2 ms a tensor."""
    scale = _scale(sent, sections)
    half = _half_of(sent, scale)
    seen = (
        *_gradients(sent, sections, scale, half),
        *_parameters(sent, sections),
        *_returned(sent, sections),
        *_arrived(sent, sections, scale, half),
    )
    tensors = tuple([tensor_detail(role, row, values, index_of(row.name), **more) for role, row, values, more in seen])
    optimizer = optimizers.get(sent.optimizer, 0)
    return DetailLine(
        step=sent.number, reason=sent.reason or "", optimizer=optimizer, loss_scale=scale, tensors=tensors
    )


def _gradients(sent: PendingReading, sections: Sections, scale: float | None, half: str | None) -> Iterator[_Seen]:
    norms = dict(zip(sent.norms, _numbers(sections, "norms"), strict=True))
    extremes = dict(zip(sent.extremes, _joined(sections, "extremes").reshape(-1, 2), strict=True))
    carried = None if sent.unscaled else scale
    kept = _kept_by_clipping(sent, sections)
    factor = None if kept is None else (1.0 if carried is not None else scale or 1.0) / kept
    shared = {"half": half, "factor": factor, "scale": carried}
    for row, values in zip(sent.sampled, cut(sent.sampled, _joined(sections, "gradients")), strict=True):
        yield "gradient", row, values, {**shared, "extremes": extremes.get(row.name), "norm": norms.get(row.name)}


def _parameters(sent: PendingReading, sections: Sections) -> Iterator[_Seen]:
    if sent.updates is None:
        return
    rows = [row for samples in sent.updates.before for row in samples.plan]
    norms = dict(zip(sent.weights, _numbers(sections, "weights"), strict=True))
    before = cut(rows, _joined(sections, "parameters"))
    updates: list[Moved | None] = [None] * len(rows)
    if "changes" in sections and not _skipped(sent, sections):
        changes = cut(rows, _joined(sections, "changes"))
        random = sent.updates.random
        updates = [moved(values, change, random=random) for values, change in zip(before, changes, strict=True)]
    for row, values, update in zip(rows, before, updates, strict=True):
        yield "parameter", row, values, {"norm": norms.get(row.name), "update": update}


def _returned(sent: PendingReading, sections: Sections) -> Iterator[_Seen]:
    values, norms = sections.get("returned", ()), _numbers(sections, "returned_norm")
    extremes = _joined(sections, "returned_extremes").reshape(-1, 2)
    for found, value, extreme, norm in zip(sent.returned, values, extremes, norms, strict=True):
        place = {"half": FORMATS[found.sampled.dtype], "factor": 1.0, "part": found.part, "call": found.call}
        yield "activation", found.sampled, value, {**place, "extremes": extreme, "norm": norm}


def _half_of(sent: PendingReading, scale: float | None) -> str | None:
    """Returns the half format of the modules' outputs or gradients; else fp16 where there is a loss scale, or None."""
    seen = {FORMATS[one.sampled.dtype] for one in sent.returned} | {
        FORMATS[row.dtype] for row in sent.sampled if row.dtype in HALF
    }
    return next((half for half in ("fp16", "bf16") if half in seen), None if scale is None else "fp16")


def _arrived(sent: PendingReading, sections: Sections, scale: float | None, half: str | None) -> Iterator[_Seen]:
    for found, values in zip(sent.arrived, sections.get("arrived", ()), strict=True):
        place = {"half": half, "factor": 1.0, "part": found.part, "call": found.call}
        yield "activation_gradient", found.sampled, values, {**place, "scale": scale}


def _gradient_norm(sent: PendingReading, sections: Sections, scale: float | None) -> float | None:
    clip = sent.clips.whole
    if clip is not None and (total := _first(sections, "clip")) is not None:
        return _divided(total, scale if clip.scaled else None)
    norms = _numbers(sections, "norms")
    return _divided(math.hypot(*norms), None if sent.unscaled else scale) if norms else None


def _kept_by_clipping(sent: PendingReading, sections: Sections) -> float | None:
    """Returns the factor by which clipping multiplied the gradients, computed as torch does; None if unknown."""
    if not sent.clips.clipped:
        return 1.0
    if sent.clips.only is None:
        return None
    seen = _first(sections, "clip")
    if seen is None:  # it clipped only some of them, or others too
        return None
    kept = min(sent.clips.only.clip.max_norm / (seen + 1e-6), 1.0)
    return kept if kept > 0.0 else None


def _skipped(sent: PendingReading, sections: Sections) -> bool | None:
    flags = _numbers(sections, "found_inf")
    return any(flags) if sent.skipped is None and flags else sent.skipped


def _scale(sent: PendingReading, sections: Sections) -> float | None:
    return sent.scale if sent.scale is not None else _first(sections, "scale")


def _divided(number: float, scale: float | None) -> float:
    return number / scale if scale else number


def _numbers(sections: Sections, key: str) -> list[float]:
    return [number for section in sections[key] for number in section.tolist()] if key in sections else []


def _first(sections: Sections, key: str) -> float | None:
    return next(iter(_numbers(sections, key)), None)


def _joined(sections: Sections, key: str) -> Tensor:
    parts = list(sections.get(key, ()))
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")
