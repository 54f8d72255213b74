"""The numbers of each step of a loop that is somebody else's: taken on the device, told when they have arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ampdoctor.hooks.callbacks import Clip, hearing
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.activations import Activations, Arrived, arrived, drawn_from, is_numbers
from ampdoctor.live.numbers.async_reader import Later
from ampdoctor.live.numbers.norms_and_samples import Updates, local, norms_of, sample, total
from ampdoctor.live.numbers.readings import Clippings, DetailReading, Sent, StepReading, detail_of, step_of
from ampdoctor.numerics import extremes_of_each
from ampdoctor.numerics.tensors import Unseen

# Puts the numbers of a step into its parcel, on the device.


Named = Sequence[tuple[str, Tensor]]
"""Tensors and their names."""


def add_norms(sent: Sent, gradients: Named, *, fused: bool, check: bool) -> Tensor | None:
    """Adds the gradients' norms: what clipping has computed, and their own where it has not or single ones are wanted.

    Args:
        sent: The step.
        gradients: Those that there are.
        fused: As in `norms_of`.
        check: As there.

    Returns:
        The norm of all, 0-dim and on their device, as clipping saw it or as they are; None where it is in parts.
    """
    parts = sent.clips.parts
    sent.shards = any(hasattr(gradient, "to_local") for _, gradient in gradients)
    for part in parts:
        sent.parcel.add("clip", part.clip.total)
    if parts and sent.reason is None:
        return _one([local(part.clip.total) for part in parts])
    every = norms_of(gradients, fused=fused, check=check)
    for norms in every:
        sent.norms += norms.names
        sent.parcel.add("norms", norms.vector)
        if norms.off is not None:
            sent.parcel.add("off", norms.off)
    if parts:
        return _one([local(part.clip.total) for part in parts])
    return _one([total(norms.vector) for norms in every])


def _one(norms: list[Tensor]) -> Tensor | None:
    """Returns the norm of all, from those of parts; None without a part, or where they lie on several devices."""
    if len(norms) < 2 or len({norm.device for norm in norms}) > 1:
        return norms[0] if len(norms) == 1 else None
    with Unseen(norms[0]):
        return total(torch.stack([norm.to(torch.float32) for norm in norms]))


def add_gradients(sent: Sent, gradients: Named) -> None:
    """Adds samples and extremes of the gradients.

    Args:
        sent: The step.
        gradients: Those that there are.
    """
    elements = [(name, local(gradient)) for name, gradient in gradients]
    for samples in sample(elements):
        sent.sampled += samples.plan
        sent.parcel.add("gradients", samples.buffer)
    full = [(name, part) for name, part in elements if part.numel()]
    for (name, _), (low, high) in zip(full, extremes_of_each(part for _, part in full), strict=True):
        sent.extremes += (name,)
        sent.parcel.add("extremes", low)
        sent.parcel.add("extremes", high)


def add_parameters(sent: Sent, parameters: Named, *, fused: bool, updates: Updates | None) -> None:
    """Adds norms and samples of the parameters before the step.

    Args:
        sent: The step.
        parameters: All of the optimizer's.
        fused: As in `norms_of`.
        updates: Of the same step, announced before; None for the first time.
    """
    sent.updates = Updates(parameters) if updates is None else updates
    for samples in sent.updates.before:
        sent.parcel.add("parameters", samples.buffer)
    for norms in norms_of(parameters, fused=fused):
        sent.weights += norms.names
        sent.parcel.add("weights", norms.vector)


def add_changes(sent: Sent) -> None:
    """Adds what the step has added to the parameters, what modules have returned, and what has come back to outputs."""
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


EVERY = 100
"""Steps from one look at single tensors to the next."""
MOST_INCOMING = 256
"""Gradients of outputs that are kept of a step; a loop that never steps an optimizer would have no end of them."""
SAMPLED = "sampled"
"""Why most of them are made."""
AGREE = 1e-3
"""Relative difference of norms from which `torch._foreach_norm` is not believed any more: float32 sums of a billion
squares differ by less, and what was wrong in pytorch#140066 was wrong by factors."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _harmless(method: Method) -> Method:
    """The method raises nothing into the loop: at the first error the numbers end, with one sentence in `failed`.

    It does nothing where what it does would become a part of a compiled or captured graph.
    """

    @functools.wraps(method)
    def guarded(self: StepNumbers, *args: Any, **kwargs: Any) -> Any:
        if self.failed is not None or torch.compiler.is_compiling() or _capturing():
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self._fail(error)
            return None

    return cast("Method", guarded)


class StepNumbers:
    """Takes the numbers of a loop's steps; whoever watches the loop tells it what happens.

    Nothing waits for a device until `finish`, nothing is changed, and nothing raises. On a CPU a reading is told before
    `stepped` returns; on a device at a later `stepped` or `poll`, in the order of the steps.

    Args:
        on_step: Sent each step.
        on_detail: Sent each look at single tensors, as a function that counts them, on any thread.
        every: Steps between looks; 0 for none but those that are asked for.
        later: Where readings wait.

    Attributes:
        failed: The error that ended the numbers; None while all is well.
        fused: Norms are taken by `torch._foreach_norm`; False once that was seen to be wrong.
        hears_clips: This torch lets clippings be heard.
    """

    def __init__(
        self,
        on_step: Callable[[StepReading], None],
        on_detail: Callable[[Callable[[], DetailReading]], None],
        *,
        every: int = EVERY,
        later: Later[Sent] | None = None,
    ) -> None:
        self._on_step, self._on_detail = on_step, on_detail
        self._every = every
        self._later: Later[Sent] = Later() if later is None else later
        self._clips = Clippings()
        self._losses: list[Tensor] = []
        self._batches: list[tuple[Tensor, bool, int]] = []
        self._incoming: list[Arrived] = []
        self._activations = Activations(self._fail)
        self._open: dict[str, Sent] = {}  # by optimizer: steps that are about to be taken
        self._checked: set[str] = set()
        self._step = 0
        self._asked, self._asked_for = 0, SAMPLED
        self._reason: str | None = None
        self.failed: str | None = None
        self.fused = True
        self.hears_clips = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Clippings are heard inside; what is still on its way is waited for at the end."""
        with hearing(self._clip) as heard:
            self.hears_clips = heard
            try:
                yield
            finally:
                self.finish()

    @property
    def lost(self) -> int:
        """Readings that never arrive, because the host was too far ahead of its device."""
        return self._later.lost

    @property
    def looking(self) -> bool:
        """Whether single tensors are looked at in this step: gradients of activations are worth their hooks."""
        return self._reason is not None and self.failed is None

    def look(self, reason: str, steps: int = 1) -> None:
        """Look at single tensors in the next steps, and in this one as far as it goes, because of something that fired.

        Args:
            reason: What fired, for the reading.
            steps: How many of the next.
        """
        self._asked, self._asked_for = max(self._asked, steps), reason
        self._reason = self._reason or reason

    @_harmless
    def begin_step(self, step: int) -> None:
        """A step begins, before its first forward; what an earlier one has left behind is forgotten.

        A step that another thread is about to take is not: it goes when its optimizer is about to step again.

        Args:
            step: Number of the attempted step, from 0.
        """
        self._step = step
        self._losses.clear()
        self._batches.clear()
        self._incoming.clear()
        self._activations.begin_step()
        self._clips.forget()
        regular = self._every > 0 and step % self._every == 0
        self._reason = self._asked_for if self._asked else SAMPLED if regular else None
        self._asked = max(self._asked - 1, 0)

    @_harmless
    def loss(self, tensor: Tensor, scale: Tensor | float | None = None) -> None:
        """A backward begins.

        Args:
            tensor: Its root; what has more than one element is no loss.
            scale: What it was multiplied by; a tensor is divided by on the device.
        """
        if tensor.numel() != 1 or not tensor.is_floating_point() or tensor.is_meta:
            return
        own = local(tensor)
        with Unseen(own):
            value = own.detach().reshape(1).to(torch.promote_types(own.dtype, torch.float32), copy=True)
            if isinstance(scale, Tensor):
                if scale.device != value.device and "cpu" in {scale.device.type, value.device.type}:
                    return  # a copy between the two would wait, or race
                scale = scale.detach().reshape(1).to(value.device, non_blocking=True)
            self._losses.append(value if scale is None else value / scale)

    @_harmless
    def batch(self, tensor: Tensor) -> None:
        """A model was called with this batch, the first of its micro-step."""
        if (drawn := drawn_from(tensor)) is not None:
            self._batches.append((drawn, is_numbers(tensor), tensor.numel()))

    @_harmless
    def unscaling(self, parameters: Iterable[Tensor]) -> None:
        """A scaler is about to divide gradients by its scale: clippings so far saw them scaled."""
        self._clips.carry_scale({id(p.grad) for p in parameters if p.grad is not None})

    @_harmless
    def cleared(self, parameters: Iterable[Tensor], by_hand: bool) -> None:  # noqa: FBT001 - as it is told
        """Gradients are about to be cleared, or were: what clipping heard of them is no step's.

        Args:
            parameters: Theirs.
            by_hand: They were, and may be gone: others may have their ids from here on.
        """
        if self._clips:
            gradients = {id(p.grad) for p in parameters if p.grad is not None}
            self._clips.forget(None if by_hand and not gradients else gradients)

    def entering(self, name: str, model: nn.Module) -> None:
        """A model of the loop's is about to be called, in a step that is `looking`."""
        if self.looking:
            self._activations.attach(name, model)

    def left(self) -> None:
        """The call is over, whatever has come of it."""
        self._activations.detach()

    @_harmless
    def returned(self, name: str, model: nn.Module, output: Any) -> None:
        """It has returned, in a step that is `looking`."""
        if self.looking:
            self._activations.returned(name, model, output)

    @_harmless
    def incoming(self, module: str, gradient: Tensor, *, part: str = "output", call: int = 0) -> None:
        """The gradient of a module's output has come back, in a step that is `looking`; arguments as of `arrived`."""
        if not self.looking or len(self._incoming) >= MOST_INCOMING:
            return
        if (found := arrived(module, gradient, part=part, call=call)) is not None:
            self._incoming.append(found)

    @_harmless
    def about_to_step(
        self,
        optimizer: str,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        number: int | None = None,
        scale: Tensor | float | None = None,
        found_inf: Tensor | None = None,
        growth_tracker: Tensor | None = None,
        unscaled: bool = True,
    ) -> Tensor | None:
        """An optimizer is about to use its gradients, or a scaler to skip them; after the closure, where there is one.

        Called again before `stepped` (a closure that is evaluated several times), gradients are those of the last time
        and parameters those of the first.

        Args:
            optimizer: Its name.
            parameters: Name and parameter, all of the optimizer's.
            number: Of its attempted step; None: that of `begin_step`.
            scale: The loss scale of its gradients: `scaler._scale` itself, on its device; None without a scaler.
            found_inf: The scaler's flag, on its device, if it is there already.
            growth_tracker: `scaler._growth_tracker` itself.
            unscaled: The gradients were divided by the scale; False for a fused optimizer, which does so itself.

        Returns:
            The norm of its gradients, 0-dim and on its device, which carries the scale where clipping saw it or they
            still do; None without gradients, or where clipping in parts has computed it in parts.
        """
        parameters = [(name, p) for name, p in parameters if _has_numbers(p)]
        named = [(name, p.grad) for name, p in parameters if p.grad is not None]
        gradients = {id(grad) for _, grad in named}
        if not unscaled and scale is not None:
            self._clips.carry_scale(gradients)
        step = Sent(
            number=self._step if number is None else number,
            optimizer=optimizer,
            reason=self._reason,
            clips=self._clips.norm_of(gradients),
            unscaled=unscaled,
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
        norm = add_norms(step, named, fused=self.fused, check=self.fused and optimizer not in self._checked)
        self._checked.add(optimizer)
        if self._reason is not None:
            again = self._open.get(optimizer)
            add_gradients(step, named)
            add_parameters(step, parameters, fused=self.fused, updates=None if again is None else again.updates)
        step.parcel.pack()
        step.gradients = frozenset(gradients)
        self._open[optimizer] = step
        return norm

    @_harmless
    def guarded(self, optimizer: str, flag: Tensor) -> None:
        """The step that is about to be taken is not, where this flag, on its device, is not 0."""
        step = self._open.get(optimizer)
        if step is not None:
            step.parcel.add("found_inf", flag)
            step.parcel.pack()

    @_harmless
    def stepped(self, optimizer: str, *, skipped: bool | None = None) -> None:
        """The optimizer has stepped, or its step was skipped.

        Args:
            optimizer: Its name.
            skipped: Whether the step was not taken; None where only `found_inf` knows.
        """
        step = self._open.pop(optimizer, None)
        if step is not None:
            step.skipped = skipped
            if step.reason is not None:
                step.arrived, step.returned = tuple(self._incoming), tuple(self._activations.taken)
            add_changes(step)
            step.parcel.pack()
            self._clips.forget(step.gradients)
            self._losses.clear()
            self._batches.clear()
            self._incoming.clear()
            self._activations.begin_step()
            self._later.put(step, step.parcel.tensors)
        self.poll()

    @_harmless
    def poll(self) -> None:
        """Tell the readings that have arrived."""
        self._tell(self._later.ready())

    @_harmless
    def finish(self) -> None:
        """Tell all readings; waits for those that are on their way."""
        self._activations.detach()
        self._tell(self._later.drain())
        self._open.clear()  # of a step that has raised

    def _fail(self, error: Exception) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}".splitlines()[0]

    @_harmless
    def _clip(self, clip: Clip) -> None:
        self._clips.add(clip)

    def _tell(self, readings: Iterable[tuple[Sent, list[Tensor]]]) -> None:
        for step, values in readings:
            with unseen():
                sections = step.parcel.opened(values)
                if step.reason is not None:
                    kept = step.parcel.opened([numbers.clone() for numbers in values])  # the buffers are lent
                off = [difference for found in sections.get("off", []) for difference in found.tolist()]
            if not all(difference <= AGREE for difference in off):
                self.fused = False
            self._on_step(step_of(step, sections))
            if step.reason is not None:
                self._on_detail(functools.partial(detail_of, step, kept))


def _has_numbers(parameter: Tensor) -> bool:
    """Whether a parameter has values, and real or complex ones; a quantised one may be made of bytes."""
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_meta


def _capturing() -> bool:
    """Whether a CUDA graph is being captured: no event may be asked then, and no memory pinned."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
