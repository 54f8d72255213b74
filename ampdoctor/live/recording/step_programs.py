"""The program of one optimizer's running step, from all that was recorded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.program import Backward, Call, Clipped, Ended, Given, Held, Program, references
from ampdoctor.live.recording.gradients import Gradients, parameters_of
from ampdoctor.live.recording.journal import Journal
from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.live.recording.naming import renumbered, together
from ampdoctor.live.recording.slicing import leads_to, sliced
from ampdoctor.probes.ops.source import user_line

_APART = (
    "the optimizer steps tensors of its own, as master weights are: what the loop makes of the models' gradients for "
    "them, and their update, are not run again"
)
_BY_CLOSURE = (
    "the optimizer calls the loop's closure itself, as often as it likes: the last backward is run again, and not the "
    "update"
)


class StepPrograms:
    """Finds what an optimizer's gradients came of.

    Args:
        journal: What was recorded.
        gradients: Whose gradients add up.
        models: The loop's.
    """

    def __init__(self, journal: Journal, gradients: Gradients, models: OutermostModels) -> None:
        self._journal, self._gradients, self._models = journal, gradients, models

    def program(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        name: str,
        scaler: Any,
        step: int,
        root: torch.Tensor | None,
        failed: str | None,
        raised: Call | None = None,
    ) -> Program:
        """As `StepRecorder.program`, with all buffers of the models that it calls; no device is waited for.

        `raised` is a call that has not returned, to which the program leads up; `failed` is what has ended the
        recording, None where nothing has.
        """
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
        chosen = sliced(instructions, wanted)
        indices: dict[int, int] = {}
        for one in chosen:
            for taken in references(one):
                if isinstance(taken, Given):
                    indices.setdefault(taken.index, len(indices))
        given = [tape.given[index] for index in indices]
        calls = [one for one in chosen if isinstance(one, Call)]
        buffers: dict[str, torch.Tensor] = {}
        for call in reversed(calls):  # of each model, what it has before its own first call
            inside = f"{call.model}." if call.model else ""
            before = self._journal.buffers_before(call)
            buffers.update((key, value) for key, value in before.items() if key.startswith(inside))
        self._gradients.find_edited()
        edited = (name for key, name in tape.names.items() if self._gradients.is_edited(key))
        doubts = list(self._doubts(model, indices, calls, failed))
        if optimizer is not None and _needs_closure(optimizer):
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
        """Yields what of a step its instructions do not hold.

        Args:
            model: Of the program.
            given: Which of the given tensors it takes.
            calls: Those that it makes.
            failed: What has ended the recording.
        """
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
        """Whether a backward can reach what an optimizer holds: a parameter of a model, or a leaf of the loop's ops."""
        held, tape = {id(p) for p in parameters_of(optimizer)}, self._journal.tape
        return any(id(one) in held for one in (*tape.given.values(), *(t for _, t in tape.held())))

    def wanted(self, optimizer: Any) -> list[int]:
        """The places of the backwards that an optimizer's gradients come of, and of what was done to them."""
        journal, tape = self._journal, self._journal.tape
        model = together(self._models.roots)
        if optimizer is None:
            trained = {id(p) for p in model.parameters() if p.requires_grad}
            begun = self._gradients.began(trained, None)
            return [
                place for place, one in journal.placed() if isinstance(one, Backward) and journal.moment(one) >= begun
            ]
        held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
        names = {name for key, name in tape.names.items() if key in held}
        modules = dict(model.named_modules())

        def holds(call: Call) -> bool:
            module = modules.get(call.model)  # none for one that the loop holds no more: it may have had any
            return module is None or any(id(p) in held for p in module.parameters())

        def adds(place: int, one: Backward) -> bool:
            if one.inputs:
                return any(isinstance(taken, Held) and taken.name in names for taken in one.inputs)
            return leads_to(tape.instructions[:place], one, tape.grad, holds)

        begun = self._gradients.began(held, optimizer)
        return [
            place
            for place, one in journal.placed()
            if journal.moment(one) >= begun
            and (
                (isinstance(one, Backward) and adds(place, one))
                or journal.unscales(one, optimizer)
                or (isinstance(one, Clipped) and any(parameter.name in names for parameter in one.parameters))
            )
        ]


def with_changed_buffers(program: Program) -> Program:
    """The program with those of its buffers that are others now; a device is waited for."""
    now = dict(program.model.named_buffers())
    changed = {key: value for key, value in program.buffers.items() if key in now and not _same(now[key], value)}
    return replace(program, buffers=changed)


def _same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)


def _needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer cannot step without a closure, as LBFGS."""
    taken = inspect.signature(type(optimizer).step).parameters.get("closure")
    return taken is not None and taken.default is inspect.Parameter.empty
