"""Runs the program of a recorded step on a model: its calls, the ops around them, its backwards and its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import ReplayError
from ampdoctor.hooks.nested import iter_tensors, map_kind
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    Given,
    Held,
    Instruction,
    Made,
    Mode,
    Op,
    Program,
    Reference,
    Scaled,
    Unscaled,
    called_as_recorded,
    recorded_at,
    references,
    results,
)


def mode_of(instruction: Instruction) -> Mode | None:
    """Returns how torch computes while an instruction runs; None for one that says nothing of it."""
    return instruction.mode if isinstance(instruction, Call | Op | Backward) else None


class RecordedStep:
    """Runs the instructions of a step and its update; what none of the later ones takes is let go of."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._last: dict[int, int] = {}
        for place, one in enumerate(program.instructions):
            for reference in (*references(one), *results(one)):
                if isinstance(reference, Made):
                    self._last[reference.index] = place

    def run(self, model: nn.Module, given: list[torch.Tensor], scaler: Any) -> torch.Tensor | None:
        """Run the step; returns the sum of its losses, unscaled, 0-dim; None without any."""
        program = self._program
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        made: dict[int, torch.Tensor] = {}

        def named(reference: Reference) -> torch.Tensor:
            if isinstance(reference, Given):
                return given[reference.index]
            if isinstance(reference, Held):
                return held[reference.name]
            if reference.index not in made:
                raise ReplayError(
                    "what the recorded step takes next, the model does not return here: its forward is another"
                )
            return made[reference.index]

        with torch.no_grad():
            for name, value in program.buffers.items():
                held[name].copy_(value)
        model.zero_grad(set_to_none=True)
        run = _Run(model, scaler, program, named)
        for place, instruction in run.in_their_modes(program.instructions):
            made.update(run.one(instruction))
            for index in [index for index in made if self._last.get(index, place) <= place]:
                del made[index]
        if program.optimizer is not None:
            with recorded_at(program.line):
                scaler.step(program.optimizer)
                scaler.update()
        return run.loss


class _Run:
    """One run of the instructions.

    Attributes:
        loss: The sum of what was differentiated so far; or what the loop looked at when it ended.
    """

    def __init__(
        self, model: nn.Module, scaler: Any, program: Program, named: Callable[[Reference], torch.Tensor]
    ) -> None:
        self._model, self._scaler, self._named = model, scaler, named
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._program = program
        self.loss: torch.Tensor | None = None
        self._losses: dict[Made, torch.Tensor] = {}

    def in_their_modes(self, instructions: tuple[Instruction, ...]) -> Iterator[tuple[int, Instruction]]:
        """Yields each instruction under the autocast that it was recorded under, entered once for those in a row."""
        with ExitStack() as stack:
            entered: Mode | None = None
            for place, one in enumerate(instructions):
                mode = mode_of(one)
                if mode != entered:
                    stack.close()
                    entered = mode
                    if mode is not None:
                        stack.enter_context(_in_mode(mode, self._device))
                yield place, one

    def one(self, instruction: Instruction) -> Mapping[int, torch.Tensor]:
        """Run one instruction; returns the tensors that it makes, by their numbers."""
        with recorded_at(instruction.line):
            match instruction:
                case Call() | Op():
                    return self._called(instruction)
                case Scaled():
                    loss = self._named(instruction.loss)
                    scaled = self._scaler.scale(loss)
                    self._losses[instruction.result] = loss.detach()
                    return {instruction.result.index: scaled}
                case Backward():
                    self._backward(instruction)
                case Unscaled():
                    if self._program.optimizer is not None:
                        self._scaler.unscale_(self._program.optimizer)
                case Clipped():
                    self._clip(instruction)
                case Ended():
                    self._end(self._named(instruction.value).detach())
            return {}

    def _called(self, instruction: Call | Op) -> Mapping[int, torch.Tensor]:
        args, kwargs = (map_kind(Reference, self._named, part) for part in (instruction.args, instruction.kwargs))
        if instruction.random is not None:
            instruction.random.restore()
        if isinstance(instruction, Op):
            output = called_as_recorded(instruction.function, args, kwargs)
        else:
            module = self._model.get_submodule(instruction.model)
            if module.training != instruction.training:
                module.train(instruction.training)
            output = called_as_recorded(module, args, kwargs)
        tensors = dict(iter_tensors(output))
        return {made.index: tensors[path] for path, made in instruction.results.items() if path in tensors}

    def _backward(self, instruction: Backward) -> None:
        roots = [self._named(root) for root in instruction.roots]
        seeds = [
            None if seed is None else self._named(seed).to(root.dtype)
            for seed, root in zip(instruction.seeds, roots, strict=True)
        ]
        inputs = [self._named(one) for one in instruction.inputs]
        torch.autograd.backward(roots, seeds, retain_graph=instruction.kept, inputs=inputs or None)
        for reference, root in zip(instruction.roots, roots, strict=True):
            if root.numel() == 1:
                loss = self._losses.get(reference, root.detach()) if isinstance(reference, Made) else root.detach()
                # halves are summed as their numbers are, not as halves
                wide = torch.promote_types(loss.dtype, torch.float32)
                self.loss = loss if self.loss is None else self.loss.to(wide) + loss.to(wide)

    def _end(self, value: torch.Tensor) -> None:
        """A number stands for the loss; of more than that the step ends with an error, as it did in the loop.

        Raises:
            FloatingPointError: They are not all finite.
        """
        if value.numel() == 1:
            self.loss = value
        elif not math.isfinite(value.abs().amax().item()):
            raise FloatingPointError("the loop's own code ended the step where this was not finite")

    def _clip(self, instruction: Clipped) -> None:
        parameters = [self._named(parameter) for parameter in instruction.parameters]
        torch.nn.utils.clip_grad_norm_(parameters, instruction.max_norm, instruction.norm_type)


@contextmanager
def _in_mode(mode: Mode, device: str) -> Iterator[None]:
    """Autocast is that of the device that the model is on now: a step of a GPU's may be run on a CPU."""
    kind, dtype = mode.autocast if mode.autocast is not None else ("cpu", torch.bfloat16)
    kind = "cpu" if device == "cpu" else kind
    with (
        torch.set_grad_enabled(mode.gradients),
        torch.autocast(kind, dtype, enabled=mode.autocast is not None, cache_enabled=mode.cached),
    ):
        yield
