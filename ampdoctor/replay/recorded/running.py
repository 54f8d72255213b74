"""The program of a recorded step, in place or elsewhere, as the step of a `TrainingRun`."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from pathlib import Path

import torch
from torch import nn

from ampdoctor.hooks.nested import iter_kind
from ampdoctor.hooks.program import Call, Given, Line, Op, Program, Reference
from ampdoctor.replay.recorded.stepping import RecordedStep, mode_of
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
    step = RecordedStep(program)
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
    casts = [mode.autocast[1] for one in program.instructions if (mode := mode_of(one)) and mode.autocast is not None]
    halves = [_FORMATS[dtype] for dtype in casts if dtype in _FORMATS]
    if halves:
        return ("fp16" if "fp16" in halves else "bf16"), True
    numbers: Counter[torch.dtype] = Counter()
    for parameter in program.model.parameters():
        numbers[parameter.dtype] += parameter.numel()
    most = max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)
    return _FORMATS.get(most, "fp32"), False
