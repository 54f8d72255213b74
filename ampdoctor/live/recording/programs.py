"""Programs of one optimizer's steps: the running step, and the last updates before it."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    InputRef,
    ParamRef,
    PriorSteps,
    Program,
    references,
    updates_made,
)
from ampdoctor.hooks.torch_internals import unseen, version_of
from ampdoctor.live.recording.journal import Gradients, RecordedInstructions, leads_to, renumbered, together
from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.probes.user_code import user_line

_APART = (
    "the optimizer steps tensors of its own, as master weights are: what the loop makes of the models' gradients for "
    "them, and their update, are not run again"
)
_BY_CLOSURE = (
    "the optimizer calls the loop's closure itself, as often as it likes: the last backward is run again, and not the "
    "update"
)


class StepPrograms:
    """Finds the instructions from which an optimizer's gradients were computed."""

    def __init__(self, journal: RecordedInstructions, gradients: Gradients, models: OutermostModels) -> None:
        self._journal, self._gradients, self._models = journal, gradients, models

    def program(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        name: str,
        scaler: Any,
        step: int,
        failed: str | None,
        root: torch.Tensor | None = None,
        raised: Call | None = None,
    ) -> Program:
        """As `StepRecorder.program`, with all buffers; leads up to `raised`, a call that has not returned, if given."""
        tape, roots = self._journal.tape, self._models.roots
        model = together(roots)
        instructions = tape.instructions
        apart = optimizer is not None and bool(roots) and not self.is_reached(optimizer)
        optimizer = None if apart else optimizer
        wanted = self.wanted(optimizer)
        if root is not None:
            instructions = [*instructions, Ended(value=tape.reference(root), line=None)]
            wanted.append(len(instructions) - 1)
        if raised is not None:
            wanted += [place for place, one in enumerate(instructions) if one is raised]
        chosen = self._journal.sliced(wanted, instructions)
        indices: dict[int, int] = {}
        for one in chosen:
            for taken in references(one):
                if isinstance(taken, InputRef):
                    indices.setdefault(taken.index, len(indices))
        given = [tape.given[index] for index in indices]
        calls = [one for one in chosen if isinstance(one, Call)]
        buffers: dict[str, torch.Tensor] = {}
        for call in reversed(calls):  # of each model, the buffers before its first call
            inside = f"{call.model}." if call.model else ""
            before = self._journal.buffers_before(call)
            buffers.update((key, value) for key, value in before.items() if key.startswith(inside))
        self._gradients.find_edited()
        edited = (name for key, name in tape.names.items() if self._gradients.is_edited(key))
        doubts = list(self._doubts(model, indices, calls, failed))
        closure = None if optimizer is None else inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:  # as LBFGS
            optimizer, doubts = None, [_BY_CLOSURE, *doubts]
        return Program(
            model=model,
            optimizer=optimizer,
            optimizer_name=name,
            scaler=scaler,
            instructions=tuple(renumbered(one, indices) for one in chosen),
            given=tuple(given),
            buffers=buffers,
            step=step,
            line=user_line(),
            edited=() if apart else tuple(edited),
            unexplained=(*self._models.unseen, *([_APART] if apart else []), *doubts),
        )

    def _doubts(self, model: nn.Module, given: Iterable[int], calls: list[Call], failed: str | None) -> Iterator[str]:
        """Yields what the instructions of a step leave out; `failed` is what ended the recording."""
        tape, given = self._journal.tape, list(given)
        changed = sum(map(tape.is_changed, given))
        if changed:
            yield f"{changed} of the tensors that entered it were written to afterwards"
        if any((t := tape.given[index]).requires_grad and not t.is_leaf for index in given):
            yield "a tensor that entered it hangs on what was not recorded, and gives no gradient on"
        modules = dict(model.named_modules())
        if any(call.model not in modules for call in calls):
            yield "a module that it calls is gone when the step is made: it cannot be run again"
        if any(self._has_moved(call, modules) for call in calls):
            yield "weights have changed since one of its calls, which is run with what they are now"
        if failed is not None:
            yield f"the recording has ended before it ({failed})"
        if self._journal.dropped:
            yield f"{self._journal.dropped} of its backwards were let go of, to spare memory"
        if not calls:
            yield "no call of a model was recorded"

    def _has_moved(self, call: Call, modules: Mapping[str, nn.Module]) -> bool:
        """Whether an optimizer has updated a model's weights since its call."""
        module = modules.get(call.model)
        held = set() if module is None else {id(p) for p in module.parameters()}
        return self._gradients.have_moved(held, since=self._journal.moment(call))

    def is_reached(self, optimizer: Any) -> bool:
        """Whether a backward can reach an optimizer's parameters: a model's parameters, or leaves of the loop's ops."""
        held, tape = {id(p) for p in parameters_of(optimizer)}, self._journal.tape
        return any(id(one) in held for one in (*tape.given.values(), *(t for _, t in tape.held())))

    def wanted(self, optimizer: Any) -> list[int]:
        """Returns the places of the backwards behind an optimizer's gradients, and of later changes to these."""
        journal, tape = self._journal, self._journal.tape
        model = together(self._models.roots)
        if optimizer is None:
            trained = {id(p) for p in model.parameters() if p.requires_grad}
            begun = self._gradients.began(trained, None)
            return [
                place
                for place, one in enumerate(tape.instructions)
                if isinstance(one, Backward) and journal.moment(one) >= begun
            ]
        held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
        names = {name for key, name in tape.names.items() if key in held}
        modules = dict(model.named_modules())

        def holds(call: Call) -> bool:
            module = modules.get(call.model)  # None if the loop has dropped it: it may have had any parameter
            return module is None or any(id(p) in held for p in module.parameters())

        def adds(place: int, one: Backward) -> bool:
            if one.inputs:
                return any(isinstance(taken, ParamRef) and taken.name in names for taken in one.inputs)
            return leads_to(tape.instructions[:place], one, tape.grad, holds)

        begun = self._gradients.began(held, optimizer)
        return [
            place
            for place, one in enumerate(tape.instructions)
            if journal.moment(one) >= begun
            and (
                (isinstance(one, Backward) and adds(place, one))
                or journal.unscales(one, optimizer)
                or (isinstance(one, Clipped) and any(parameter.name in names for parameter in one.parameters))
            )
        ]


def with_changed_buffers(program: Program) -> Program:
    """Returns the program with only those buffers whose values have changed since; waits for a device."""
    now = dict(program.model.named_buffers())
    changed = {key: value for key, value in program.buffers.items() if key in now and not _same(now[key], value)}
    return replace(program, buffers=changed)


def _same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)


# -- kept updates: they lead from a checkpoint to a step whose numbers arrive late --
#
# All is kept by reference: its memory is that of the batches. The loop's models and optimizers are not kept alive.

_ON_THE_WAY = 16
"""More updates that are kept, because their numbers may still be on a device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptUpdate:
    """The program of an update that was made."""

    program: Program  # its model is an empty module, and it has no optimizer
    roots: tuple[tuple[str, weakref.ref[nn.Module]], ...]  # the loop's models at the time, by the prefix of their names
    optimizer: weakref.ref[torch.optim.Optimizer] | None  # None for a program without one
    versions: tuple[int, ...]  # the given tensors' version counters
    loss: float | None = None  # the sum of its losses, once it has arrived

    @classmethod
    def of(cls, program: Program, roots: Iterable[tuple[str, nn.Module]]) -> KeptUpdate:
        """Keeps a program before its update; `roots` are the loop's models by the prefix of their names."""
        optimizer = program.optimizer
        with unseen():
            # a given tensor would keep its graph alive
            given = tuple(one if one.is_leaf else one.detach() for one in program.given)
            settings = () if optimizer is None else tuple(map(_settings, optimizer.param_groups))
        return cls(
            program=replace(program, model=nn.Module(), optimizer=None, given=given, settings=settings),
            roots=tuple((name, weakref.ref(root)) for name, root in roots),
            optimizer=None if optimizer is None else weakref.ref(optimizer),
            versions=tuple(map(version_of, given)),
        )

    def program_of(self, model: nn.Module, roots: Iterable[tuple[str, nn.Module]]) -> Program | None:
        """Returns the program as it was recorded; None where the loop has other models now, or no such optimizer."""
        optimizer = None if self.optimizer is None else self.optimizer()
        then = [(name, there()) for name, there in self.roots]
        if then != list(roots) or (optimizer is None) != (self.optimizer is None):
            return None
        changed = sum(
            version_of(one) != version for one, version in zip(self.program.given, self.versions, strict=True)
        )
        edited = len(self.program.edited)
        unexplained = (
            *self.program.unexplained,
            *([f"{changed} of the tensors that entered it were written to after its update"] if changed else []),
            *([f"{edited} of its gradients were changed between the backward and the step"] if edited else []),
        )
        return replace(self.program, model=model, optimizer=optimizer, unexplained=unexplained)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yields the `id` and the bytes of each tensor that it holds."""
        for tensor in (*self.program.given, *self.program.buffers.values()):
            yield id(tensor), tensor.numel() * tensor.element_size()


class KeptUpdates:
    """Keeps the last `most` updates whose numbers have arrived, and those on the way, within `max_bytes`."""

    def __init__(self, most: int, max_bytes: int) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._updates: deque[KeptUpdate] = deque()
        self._parts: dict[int, tuple[int, int]] = {}  # by id: how many updates hold it, and its bytes
        self._bytes = 0
        self.crowded_out = False  # some were dropped because of `max_bytes`

    def keep(self, update: KeptUpdate) -> None:
        """Keeps an update that is about to be made."""
        self._updates.append(update)
        for key, size in update.parts():
            holders, _ = self._parts.get(key, (0, size))
            self._parts[key] = holders + 1, size
            self._bytes += 0 if holders else size
        while len(self._updates) > self._most + _ON_THE_WAY:
            self._drop()
        while self._bytes > self._max_bytes:
            self.crowded_out = True
            self._drop()

    def was_sound(self, optimizer: str, step: int, loss: float | None) -> None:
        """Notes that an update's numbers have arrived, in the order of the updates; `loss` is the sum of its losses."""
        told = next((place for place, one in enumerate(self._updates, 1) if _is(one, optimizer, step)), 0)
        if told:
            self._updates[told - 1] = replace(self._updates[told - 1], loss=loss)
        for _ in range(min(told - self._most + 1, told)):
            self._drop()

    def leading_to(
        self, optimizer: str, step: int, program_of: Callable[[KeptUpdate], Program | None]
    ) -> tuple[Program, PriorSteps] | None:
        """Returns the program of a step, and the updates before it; None where it was not kept. Waits for a device."""
        updates = list(self._updates)
        last = next((place for place, one in enumerate(updates) if _is(one, optimizer, step)), None)
        sick = None if last is None else program_of(updates[last])
        if last is None or sick is None or not sick.calls_models:
            return None
        steps: list[Program] = []
        losses: list[float | None] = []
        left_out = ["what was before that was let go of, for what it takes (--bundle-max)"] if self.crowded_out else []
        for update in reversed(updates[:last]):
            one = program_of(update) if update.program.optimizer_name == optimizer else None
            if one is None or one.optimizer is None or one.optimizer is not sick.optimizer or not one.calls_models:
                left_out = ["what was before that is not in it: the loop's models or its optimizer were others there"]
                break
            steps.insert(0, one)
            losses.insert(0, update.loss)
        made = None if sick.optimizer is None else updates_made(sick.optimizer)
        if made is not None:  # the optimizer goes on counting
            made -= sum(one.program.optimizer_name == optimizer for one in updates[last:])
            made = made if made >= len(steps) else None  # it does not count these updates
        return sick, PriorSteps(steps=tuple(steps), losses=tuple(losses), made=made, left_out=tuple(left_out))

    def clear(self) -> None:
        """Drops all kept updates: they lead to nothing any more."""
        self._updates.clear()
        self._parts.clear()
        self._bytes, self.crowded_out = 0, False

    def _drop(self) -> None:
        for key, size in self._updates.popleft().parts():
            holders, _ = self._parts[key]
            if holders > 1:
                self._parts[key] = holders - 1, size
            else:
                del self._parts[key]
                self._bytes -= size


def _is(update: KeptUpdate, optimizer: str, step: int) -> bool:
    return update.program.optimizer_name == optimizer and update.program.step == step


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's settings; a learning rate that is a tensor is copied, because a scheduler writes into it."""
    held = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in held}
