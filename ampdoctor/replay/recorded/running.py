"""Runs the program of a recorded step, in place or elsewhere, as the step of a `TrainingRun`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import ReplayError
from ampdoctor.loop.nested import iter_kind, iter_tensors, map_kind
from ampdoctor.loop.recorded.line import called_as_recorded, recorded_at
from ampdoctor.loop.recorded.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    Given,
    Held,
    Instruction,
    Line,
    Made,
    Mode,
    Op,
    Program,
    Reference,
    Scaled,
    Unscaled,
    references,
    results,
)
from ampdoctor.replay.training_run import TrainingRun

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def run_of(program: Program) -> TrainingRun:
    """Returns a run of one step, which is the program's.

    Its one batch is the tensors that were given to the step, so that a change of precision casts them as any batch;
    each is called what first takes it. The step clears the gradients, and puts back the buffers that its calls have
    changed, before it begins.
    """
    optimizer = None if program.optimizer is None else {program.optimizer_name: program.optimizer}
    precision, autocast = format_of(program)
    step = _Step(program)
    return TrainingRun(
        model=program.model,
        batches=[dict(zip(_names_of_given(program), program.given, strict=True))],
        optimizer=optimizer,
        precision=precision,
        autocast=autocast,
        scaler=program.scaler,
        step=lambda model, batch, scaler: step.run(model, list(batch.values()), scaler),
        first_step=program.step,
    )


def _names_of_given(program: Program) -> list[str]:
    names: dict[int, str] = {}
    taken: set[str] = set()
    for one in program.instructions:
        if not isinstance(one, Call | Op):
            continue
        for path, reference in iter_kind(Reference, (one.args, one.kwargs)):
            if isinstance(reference, Given) and reference.index not in names:
                name = f"{_argument(program.model, one, path)}{_at(one.line)}"
                number = 1 + sum(known == name or known.startswith(f"{name}, ") for known in taken)
                names[reference.index] = name if number == 1 else f"{name}, {number}"
                taken.add(names[reference.index])
    return [names.get(index, str(index)) for index in range(len(program.given))]


def _argument(model: nn.Module, one: Call | Op, path: str) -> str:
    """What takes a tensor, in words; of a call the argument as the forward names it."""
    if isinstance(one, Op):
        return f"what {getattr(one.function, '__name__', 'an op')} takes"
    kind, _, rest = path.partition(".")
    first, _, inside = rest.partition(".")
    if kind == "0":
        names = list(signature(model.get_submodule(one.model).forward).parameters)
        first = names[int(first)] if int(first) < len(names) else f"argument {first}"
    return f"{first}.{inside}" if inside else first


def _at(line: Line) -> str:
    return "" if line is None else f" at {Path(line[0]).name}:{line[1]}"


def format_of(program: Program) -> tuple[str, bool]:
    """Returns the format that a step computes in ("fp16", "bf16", "fp32"), and whether by autocast."""
    casts = [mode.autocast[1] for one in program.instructions if (mode := _mode_of(one)) and mode.autocast is not None]
    halves = [_FORMATS[dtype] for dtype in casts if dtype in _FORMATS]
    if halves:
        return ("fp16" if "fp16" in halves else "bf16"), True
    numbers: Counter[torch.dtype] = Counter()
    for parameter in program.model.parameters():
        numbers[parameter.dtype] += parameter.numel()
    most = max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)
    return _FORMATS.get(most, "fp32"), False


def _mode_of(instruction: Instruction) -> Mode | None:
    return instruction.mode if isinstance(instruction, Call | Op | Backward) else None


class _Step:
    """Runs the instructions; what none of the later ones takes is let go of."""

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
                mode = _mode_of(one)
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
                    self.loss = self._named(instruction.value).detach()
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
                self.loss = loss if self.loss is None else self.loss + loss

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
