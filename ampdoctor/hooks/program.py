"""A step as a program: its model calls, the ops around them, its backwards and what its scaler and clipping did.

A training loop is Python that nobody can run again. What it does with tensors can be: the calls of its outermost
models with what entered them, and the ops on what came out, up to the loss. The program names tensors by where they
come from, so that it can be run in place or, once written to a file, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.hooks.nested import iter_kind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.hooks.process_state import RandomState


Line = tuple[str, int] | None
"""File and line of the user's, as Python names them."""


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor from outside the program: the index into `Program.given`."""

    index: int


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or a buffer of the program's models, by its name in `Program.model`."""

    name: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an instruction has made; numbers are unique in a recording and rise."""

    index: int


Reference = Given | Held | Made


@dataclass(frozen=True, slots=True)
class Mode:
    """How torch computes while an instruction runs.

    Attributes:
        autocast: The kind of device ("cpu", "cuda") and the dtype that autocast casts to; None where it is off.
        cached: Autocast keeps the casts of weights.
        gradients: Autograd records.
    """

    autocast: tuple[str, torch.dtype] | None = None
    cached: bool = True
    gradients: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an outermost model, or of the part of one that the loop calls itself.

    Attributes:
        model: Its name in `Program.model`; "" for that itself.
        args: What it was called with, tensors as references.
        kwargs: The same by keyword.
        results: References to the tensors of what it returned, by their path there ("logits", "0").
        mode: As of its begin.
        random: The generators' states at its begin.
        training: The model's mode.
        line: The loop's line.
    """

    model: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Mapping[str, Made]
    mode: Mode
    random: RandomState
    training: bool
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A function of torch's on tensors that came of a call, or on weights.

    Attributes:
        function: The function, as `__torch_function__` is told of it.
        args: What it was called with, tensors as references.
        kwargs: The same by keyword.
        results: References to the tensors of what it returned, by their path there.
        mode: As in `Call`.
        random: As in `Call`; None for a function that draws nothing.
        line: The loop's line.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Mapping[str, Made]
    mode: Mode
    random: RandomState | None
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A scaler has scaled a loss.

    Attributes:
        loss: What it was given.
        result: What it returned.
        line: The loop's line.
    """

    loss: Reference
    result: Made
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward that adds to `.grad`.

    Attributes:
        roots: What is differentiated.
        seeds: The gradients that it begins with, or None, one for each root.
        inputs: Tensors whose gradients alone are wanted; none for all leaves.
        kept: The graph is kept for another one.
        mode: As in `Call`: inside autocast, a backward casts as well.
        line: The loop's line.
    """

    roots: tuple[Reference, ...]
    seeds: tuple[Reference | None, ...]
    inputs: tuple[Reference, ...]
    kept: bool
    line: Line
    mode: Mode = Mode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """A scaler has unscaled the gradients of the program's optimizer."""

    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Gradients were clipped by their total norm.

    Attributes:
        parameters: Those whose gradients were, as far as the models hold them.
        max_norm: The norm that they have afterwards at most.
        norm_type: Of the norm.
        line: The loop's line.
    """

    parameters: tuple[Held, ...]
    max_norm: float
    norm_type: float
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The loop's own code has ended the training: what was not finite then.

    Attributes:
        value: A number that it looked at, which stands for the step's loss; or what a model, or an op behind one, has
            returned.
        line: The loop's line.
    """

    value: Reference
    line: Line


Instruction = Call | Op | Scaled | Backward | Unscaled | Clipped | Ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """One optimizer's step, from what entered its models up to its update.

    Attributes:
        model: The model, or a module that has several as children.
        optimizer: The optimizer that steps; None where the loop ended before.
        optimizer_name: Its name in the loop.
        scaler: The scaler that it is stepped by; None without one.
        instructions: In the order of the loop.
        given: The tensors that come from outside; leaves that require a gradient are such.
        buffers: Buffers of the model as they were before the first instruction, of those that have changed since.
        step: The attempted step in the training, from 0.
        line: Where the optimizer steps.
        edited: Parameters whose gradient the loop has changed between its backward and its step, other than by clipping
            and by a scaler.
        unexplained: What of the step the instructions do not hold, in sentences.
        settings: Those of each of the optimizer's groups for this update, where they may be others by now.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    optimizer_name: str
    scaler: Any
    instructions: tuple[Instruction, ...]
    given: tuple[torch.Tensor, ...]
    buffers: Mapping[str, torch.Tensor]
    step: int
    line: Line
    edited: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()

    @property
    def calls_models(self) -> bool:
        """Whether there is anything to run again."""
        return any(isinstance(one, Call) for one in self.instructions)


def references(instruction: Instruction) -> list[Reference]:
    """Returns what an instruction takes, in its order; a tensor may occur more than once."""
    if isinstance(instruction, Call | Op):
        return [found for _, found in iter_kind(Reference, (instruction.args, instruction.kwargs))]
    if isinstance(instruction, Scaled):
        return [instruction.loss]
    if isinstance(instruction, Ended):
        return [instruction.value]
    if isinstance(instruction, Clipped):
        return list(instruction.parameters)
    if isinstance(instruction, Backward):
        seeds = (seed for seed in instruction.seeds if seed is not None)
        return [*instruction.roots, *seeds, *instruction.inputs]
    return []


def results(instruction: Instruction) -> tuple[Made, ...]:
    """Returns what an instruction makes."""
    if isinstance(instruction, Call | Op):
        return tuple(instruction.results.values())
    return (instruction.result,) if isinstance(instruction, Scaled) else ()


# What leads up to a recorded step whose weights are not known: a checkpoint from before it, and the updates since.


if TYPE_CHECKING:
    EarlierStep = tuple[str, Callable[[nn.Module, Any], None]]
    """A step that is made again before those of a run: what it is, and what makes it, of model and scaler."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leading:
    """The recorded updates before a step; its weights and its optimizer's state are those of a checkpoint.

    Attributes:
        steps: The programs of the last updates before it, oldest first, none left out.
        losses: The sum of each one's losses in the training; None where it is not known.
        made: How many updates its optimizer had made before it, as its state counts them; None where it does not.
        left_out: Why there are no more of them, in sentences.
    """

    steps: tuple[Program, ...] = ()
    losses: tuple[float | None, ...] = ()
    made: int | None = None
    left_out: tuple[str, ...] = ()


def updates_made(optimizer: torch.optim.Optimizer) -> int | None:
    """Returns how many updates an optimizer has made, as its state counts them; None where it counts none.

    That of the parameter with the most: some have no gradient in every step. A device is waited for.
    """
    counted = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    return max((number for one in counted if (number := _whole(one)) is not None), default=None)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, not finite, or several
        return None


# The line of the user's that was recorded for what runs now, where a recorded step is run again without its loop.


_LINE: ContextVar[tuple[str, int] | None] = ContextVar("_LINE", default=None)


@contextmanager
def recorded_at(line: tuple[str, int] | None) -> Iterator[None]:
    """What runs inside and has no user's frame of its own was at this line (file, number) when it was recorded."""
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)


def recorded_line() -> tuple[str, int] | None:
    """The line; None where nothing recorded runs."""
    return _LINE.get()


def called_as_recorded(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function in the place of the line: what looks for the user's frame takes this one for it."""
    return function(*args, **kwargs)
