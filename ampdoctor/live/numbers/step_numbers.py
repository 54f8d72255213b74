"""The numbers of each step of a user's loop, taken on the device and reported when they have arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.evidence.log_records import DetailLine
from ampdoctor.hooks.callbacks import Clip, OnClip, on_clip
from ampdoctor.hooks.interfaces import harmless_until
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.activations import Activations, AtModule, arrived, drawn_from, is_numbers
from ampdoctor.live.numbers.async_reader import AsyncReader
from ampdoctor.live.numbers.norms_and_samples import Updates, local, norms_of, sample, total
from ampdoctor.live.numbers.readings import ClipLog, IndexOf, PendingReading, StepReading, detail_of, step_of
from ampdoctor.numerics.tensors import extremes_of_each

# -- filling a step's parcel, on the device --

Named = Sequence[tuple[str, Tensor]]


def add_norms(sent: PendingReading, gradients: Named) -> Tensor | None:
    """Adds the gradients' norms; returns the norm of all, as clipping saw it, or None on several devices."""
    clip = sent.clips.whole
    if clip is not None:
        sent.parcel.add("clip", clip.clip.total)
    if clip is None or sent.reason is not None:
        every = norms_of(gradients)
        for norms in every:
            sent.norms += norms.names
            sent.parcel.add("norms", norms.vector)
        if clip is None:
            return total(every[0].vector) if len(every) == 1 else None
    return local(clip.clip.total)


def add_gradients(sent: PendingReading, gradients: Named) -> None:
    """Adds samples and extremes of the gradients."""
    elements = [(name, local(gradient)) for name, gradient in gradients]
    for samples in sample(elements):
        sent.sampled += samples.plan
        sent.parcel.add("gradients", samples.buffer)
    full = [(name, part) for name, part in elements if part.numel()]
    for (name, _), (low, high) in zip(full, extremes_of_each(part for _, part in full), strict=True):
        sent.extremes += (name,)
        sent.parcel.add("extremes", low)
        sent.parcel.add("extremes", high)


def add_parameters(sent: PendingReading, parameters: Named, updates: Updates | None) -> None:
    """Adds norms and samples of the parameters before the step; `updates` are those of an earlier call for it."""
    sent.updates = Updates(parameters) if updates is None else updates
    for samples in sent.updates.before:
        sent.parcel.add("parameters", samples.buffer)
    for norms in norms_of(parameters):
        sent.weights += norms.names
        sent.parcel.add("weights", norms.vector)


def add_changes(sent: PendingReading) -> None:
    """Adds the parameters' changes, the modules' outputs, and the gradients of outputs."""
    if sent.updates is not None and not sent.skipped:
        for change in sent.updates.changes():
            sent.parcel.add("changes", change)
    for returned in sent.returned:
        sent.parcel.add("returned", returned.values)
        sent.parcel.add("returned_norm", returned.norm)
        for extreme in returned.extremes:
            sent.parcel.add("returned_extremes", extreme)
    for found in sent.arrived:
        sent.parcel.add("arrived", found.values)


MakeDetail = Callable[[Mapping[str, int], IndexOf], DetailLine]
"""Counts single tensors, on any thread; gets the indices of the optimizers and of the tensors in the log."""
EVERY = 100
"""Steps between two looks at single tensors."""
MOST_INCOMING = 256
"""Gradients of outputs that are kept of a step: without a limit, a loop that never steps would keep all of them."""
SAMPLED = "sampled"
"""The reason of regular looks."""


_harmless = harmless_until("failed", "fail")
"""The first error ends the numbers, with one sentence in `failed`."""
_computes = harmless_until("rests", "fail")
"""The same for a method that calls functions of torch's."""


class StepNumbers:
    """Takes the numbers of a loop's steps without waiting before `finish`; `every` is the steps between looks, or 0."""

    def __init__(
        self,
        on_step: Callable[[StepReading], None],
        on_detail: Callable[[MakeDetail], None],
        *,
        every: int = EVERY,
        later: AsyncReader[PendingReading] | None = None,
    ) -> None:
        self._on_step, self._on_detail = on_step, on_detail
        self._every = every
        self._later: AsyncReader[PendingReading] = AsyncReader() if later is None else later
        self._clips = ClipLog()
        self._losses: list[Tensor] = []
        self._batches: list[tuple[Tensor, bool, int]] = []
        self._incoming: list[AtModule] = []
        self._activations = Activations(self.fail)
        self._open: dict[str, PendingReading] = {}  # by optimizer: the steps that are about to be taken
        self._asked, self._asked_for = 0, SAMPLED
        self._reason: str | None = None
        self.failed: str | None = None  # the error that ended the numbers

    @contextmanager
    def watching(self, *others: OnClip) -> Iterator[None]:
        """Observes clippings inside, `others` too, and waits at the end for the numbers that have not arrived."""
        with on_clip(self._clip, *others):
            try:
                yield
            finally:
                self.finish()

    @property
    def lost(self) -> int:
        """Readings that never arrive, because the host was too far ahead of its device."""
        return self._later.lost

    @property
    def in_fp16(self) -> bool:
        """Whether a module's output in fp16 was seen in a step that was `looking`."""
        return self._activations.in_fp16

    @property
    def rests(self) -> bool:
        """Whether something has failed, or its ops would become part of a compiled or captured graph."""
        if self.failed is not None or torch.compiler.is_compiling():
            return True
        # while a CUDA graph is captured, no event may be queried, and no memory pinned
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    @property
    def looking(self) -> bool:
        """Whether single tensors are looked at in this step; only then are hooks on activation gradients useful."""
        return self._reason is not None and self.failed is None

    def look(self, reason: str, steps: int = 1) -> None:
        """Looks at single tensors in the next `steps`, and in the rest of this one; `reason` is what fired."""
        self._asked, self._asked_for = max(self._asked, steps), reason
        self._reason = self._reason or reason

    @_computes
    def begin_step(self, step: int) -> None:
        """Begins a step before its first forward, and drops the remains of an earlier one."""
        self._losses.clear()
        self._batches.clear()
        self._incoming.clear()
        self._activations.begin_step()
        self._clips.forget()
        regular = self._every > 0 and step % self._every == 0
        self._reason = self._asked_for if self._asked else SAMPLED if regular else None
        self._asked = max(self._asked - 1, 0)

    @_computes
    def loss(self, tensor: Tensor) -> None:
        """Called with an unscaled loss of the step; only a tensor of one element is one."""
        if tensor.numel() == 1 and tensor.is_floating_point() and not tensor.is_meta:
            self._losses.append(tensor)

    @_computes
    def batch(self, tensor: Tensor) -> None:
        """Called with the batch of a model's call, the first of its micro-step."""
        if (drawn := drawn_from(tensor)) is not None:
            self._batches.append((drawn, is_numbers(tensor), tensor.numel()))

    @_harmless
    def unscaling(self, parameters: Iterable[Tensor]) -> None:
        """Called before a scaler divides gradients by its scale: clippings so far had scaled gradients."""
        self._clips.carry_scale({id(p.grad) for p in parameters if p.grad is not None})

    @_harmless
    def cleared(self, parameters: Iterable[Tensor], by_hand: bool) -> None:  # noqa: FBT001 - the caller's signature
        """Called before gradients are cleared, or after (`by_hand`): their clippings belong to no step."""
        if self._clips:
            gradients = {id(p.grad) for p in parameters if p.grad is not None}
            self._clips.forget(None if by_hand and not gradients else gradients)

    def entering(self, name: str, model: nn.Module) -> None:
        """Called before a model of the loop runs, in a step that is `looking`."""
        if self.looking:
            self._activations.attach(name, model)

    def left(self) -> None:
        """Called after the model has returned or raised."""
        self._activations.detach()

    @_computes
    def returned(self, name: str, model: nn.Module, output: Any) -> None:
        """Called after the model has returned, in a step that is `looking`."""
        if self.looking:
            self._activations.returned(name, model, output)

    @_computes
    def incoming(self, module: str, gradient: Tensor, *, part: str = "output", call: int = 0) -> None:
        """Called with the gradient of a module's output, in a step that is `looking`; arguments as in `arrived`."""
        if not self.looking or len(self._incoming) >= MOST_INCOMING:
            return
        if (found := arrived(module, gradient, part=part, call=call)) is not None:
            self._incoming.append(found)

    @_computes
    def about_to_step(
        self,
        optimizer: str,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        number: int,
        scale: Tensor | float | None = None,
        found_inf: Tensor | None = None,
        growth_tracker: Tensor | None = None,
        unscaled: bool = True,
    ) -> Tensor | None:
        """Called before an optimizer uses its gradients; returns their norm on their device, or None."""
        held = [gradient for _, p in parameters if (gradient := p.grad) is not None and not gradient.is_meta]
        gradients = set(map(id, held))
        if not unscaled and scale is not None:
            self._clips.carry_scale(gradients)
        step = PendingReading(
            number=number,
            optimizer=optimizer,
            reason=self._reason,
            clips=self._clips.norm_of(gradients),
            unscaled=unscaled,
            shards=any(hasattr(kind, "to_local") for kind in set(map(type, held))),
        )
        if not isinstance(scale, Tensor):
            step.scale = scale
        for key, numbers in (("scale", scale), ("found_inf", found_inf), ("growth_tracker", growth_tracker)):
            if isinstance(numbers, Tensor):
                step.parcel.add(key, numbers)
        for value in self._losses:
            step.parcel.add("losses", value)
        for drawn, numbers, elements in self._batches:
            step.parcel.add("batches", drawn)
            step.batches_are_numbers = numbers
            step.batch_elements += elements
        named: list[tuple[str, Tensor]] = []
        if self._reason is not None or step.clips.whole is None:  # otherwise only the norm of a clipping is wanted
            named = [(name, g) for name, p in parameters if (g := p.grad) is not None and id(g) in gradients]
        norm = add_norms(step, named)
        if self._reason is not None:
            again = self._open.get(optimizer)
            add_gradients(step, named)
            # a quantised parameter may consist of bytes
            real = (one for one in parameters if one[1].is_floating_point() or one[1].is_complex())
            add_parameters(step, [one for one in real if not one[1].is_meta], None if again is None else again.updates)
        step.parcel.pack()
        self._open[optimizer] = step
        return norm

    @_computes
    def guarded(self, optimizer: str, flag: Tensor) -> None:
        """Notes that the step that is about to be taken is skipped where this flag, on its device, is not 0."""
        step = self._open.get(optimizer)
        if step is not None:
            step.parcel.add("found_inf", flag)
            step.parcel.pack()

    @_computes
    def stepped(self, optimizer: str, *, skipped: bool | None = None) -> None:
        """Called after the optimizer has stepped or was skipped; `skipped` is None where only `found_inf` shows it."""
        step = self._open.pop(optimizer, None)
        if step is not None:
            step.skipped = skipped
            if step.reason is not None:
                step.arrived, step.returned = tuple(self._incoming), tuple(self._activations.taken)
            add_changes(step)
            step.parcel.pack()
            self._later.put(step, step.parcel.tensors)
        self._tell(self._later.ready())

    @_computes
    def finish(self) -> None:
        """Reports all readings; waits for those that have not arrived."""
        self._activations.detach()
        self._tell(self._later.drain())
        self._open.clear()  # a step that has raised is still in it

    def fail(self, error: Exception) -> None:
        """Ends the numbers because of this error."""
        self.failed = self.failed or f"{type(error).__name__}: {error}".splitlines()[0]

    @_harmless
    def _clip(self, clip: Clip) -> None:
        self._clips.add(clip)

    def _tell(self, readings: Iterable[tuple[PendingReading, list[Tensor]]]) -> None:
        for step, values in readings:
            with unseen():
                sections = step.parcel.opened(values)
                if step.reason is not None:
                    kept = step.parcel.opened([numbers.clone() for numbers in values])  # the buffers are reused
                reading = step_of(step, sections)
            self._on_step(reading)
            if step.reason is not None:
                self._on_detail(functools.partial(detail_of, step, kept))
