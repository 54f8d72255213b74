"""A step as a program: its model calls, the ops around them, its backwards, its scaler's and clipping's operations."""

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
"""File and line of the user's code, as Python names them."""


@dataclass(frozen=True, slots=True)
class InputRef:
    """A tensor from outside the program: the index into `Program.given`."""

    index: int


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter or a buffer of the program's models, by its name in `Program.model`."""

    name: str


@dataclass(frozen=True, slots=True)
class ResultRef:
    """A tensor that an instruction has made; numbers are unique in a recording and rise."""

    index: int


Reference = InputRef | ParamRef | ResultRef
_REFERENCES = frozenset({InputRef, ParamRef, ResultRef})


@dataclass(frozen=True, slots=True)
class Mode:
    """torch's settings while an instruction runs."""

    autocast: tuple[str, torch.dtype] | None = None  # device type ("cpu", "cuda") and dtype; None where it is off
    cached: bool = True  # autocast caches the casts of weights
    gradients: bool = True  # autograd records


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an outermost model, or of a submodule that the loop calls itself; argument tensors are references."""

    model: str  # its name in `Program.model`; "" for that itself
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Mapping[str, ResultRef]  # the tensors of its output, by their path there ("logits", "0")
    mode: Mode  # at its start, as is `random`
    random: RandomState
    training: bool
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A torch function on tensors that come from a call, or on weights; fields as in `Call`."""

    function: Callable[..., Any]  # as `__torch_function__` gets it
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Mapping[str, ResultRef]
    mode: Mode
    random: RandomState | None  # None for a function that draws nothing
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A scaler has scaled a loss."""

    loss: Reference
    result: ResultRef
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward that adds to `.grad`."""

    roots: tuple[Reference, ...]
    seeds: tuple[Reference | None, ...]  # the initial gradient, or None, for each root
    inputs: tuple[Reference, ...]  # only these get gradients; all leaves if empty
    kept: bool  # the graph is retained
    line: Line
    mode: Mode = Mode()  # inside autocast, a backward casts as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """A scaler has unscaled the gradients of the program's optimizer."""

    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Gradients were clipped by their total norm."""

    parameters: tuple[ParamRef, ...]  # those in the models whose gradients were clipped
    max_norm: float
    norm_type: float
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The loop's own code has ended the training at a non-finite value."""

    value: Reference  # a number that the loop read, used as the step's loss; or an output of a model or of an op
    line: Line


Instruction = Call | Op | Scaled | Backward | Unscaled | Clipped | Ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """One optimizer's step, from the inputs of its models up to its update."""

    model: nn.Module  # the model, or a module that has several as children
    optimizer: torch.optim.Optimizer | None  # None where the loop ended before the update
    optimizer_name: str  # in the loop
    scaler: Any  # steps the optimizer; None without one
    instructions: tuple[Instruction, ...]  # in the loop's order
    given: tuple[torch.Tensor, ...]  # the tensors from outside, with leaves that require a gradient
    buffers: Mapping[str, torch.Tensor]  # of those that have changed, the values before the first instruction
    step: int  # the attempted step in the training, from 0
    line: Line  # where the optimizer steps
    edited: tuple[str, ...] = ()  # parameters whose gradient the loop changed, other than by clipping or a scaler
    unexplained: tuple[str, ...] = ()  # parts of the step that the instructions lack, in sentences
    settings: tuple[Mapping[str, Any], ...] = ()  # of each of the optimizer's groups, if they may have changed since

    @property
    def calls_models(self) -> bool:
        """Whether there is anything to run again."""
        return any(isinstance(one, Call) for one in self.instructions)


def references(instruction: Instruction) -> list[Reference]:
    """Returns an instruction's inputs in order; a tensor may occur more than once."""
    if isinstance(instruction, Call | Op):
        found = _references_in((instruction.args, instruction.kwargs))
        return list({id(reference): reference for reference in found}.values())  # as the general walk: each once
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


def _references_in(value: Any) -> list[Reference]:
    kind = type(value)
    if kind in _REFERENCES:
        return [value]
    if kind is tuple or kind is list or kind is dict:  # most arguments; the general walk costs ten times as much
        return [found for item in (value.values() if kind is dict else value) for found in _references_in(item)]
    return [found for _, found in iter_kind(Reference, value)]


def results(instruction: Instruction) -> tuple[ResultRef, ...]:
    """Returns an instruction's results."""
    if isinstance(instruction, Call | Op):
        return tuple(instruction.results.values())
    return (instruction.result,) if isinstance(instruction, Scaled) else ()


# -- earlier updates: with a checkpoint, they give the weights of a recorded step --

if TYPE_CHECKING:
    EarlierStep = tuple[str, Callable[[nn.Module, Any], None]]
    """A step that is run again before a run's own: its description, and a function of model and scaler."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriorSteps:
    """The recorded updates before a step; its weights and its optimizer's state come from a checkpoint."""

    steps: tuple[Program, ...] = ()  # the last updates, oldest first, without gaps
    losses: tuple[float | None, ...] = ()  # the sum of each update's losses in the training
    made: int | None = None  # updates of the optimizer before the step, by the count in its state
    left_out: tuple[str, ...] = ()  # why there are no more updates, in sentences


def updates_made(optimizer: torch.optim.Optimizer) -> int | None:
    """Returns the largest count of updates in an optimizer's state; None without one. Waits for a device."""
    counted = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    return max((number for one in counted if (number := _whole(one)) is not None), default=None)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not one finite number
        return None


# -- the recorded user line of an instruction that runs again without its loop --

_LINE: ContextVar[tuple[str, int] | None] = ContextVar("_LINE", default=None)


@contextmanager
def recorded_at(line: tuple[str, int] | None) -> Iterator[None]:
    """Code that runs inside, without a user's frame, is reported at this recorded line (file, number)."""
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)


def recorded_line() -> tuple[str, int] | None:
    """Returns the recorded line; None where nothing recorded runs."""
    return _LINE.get()


def called_as_recorded(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls the function; the search for the user's frame takes this frame for the recorded user line."""
    return function(*args, **kwargs)
