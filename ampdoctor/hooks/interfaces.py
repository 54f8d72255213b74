"""Interfaces of a run that is traced, of its probes, of marked loops, and the exceptions between them. No torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ampdoctor.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.hooks.backwards import Backwards


# What a trace needs to know of the run that it watches.


class Calls(Protocol):
    """Which part of a step is running."""

    @property
    def part(self) -> str | None:
        """Return "optimizer" in an optimizer's step, "scaler" in a scaler's method, else None."""
        ...

    def scale(self) -> float | None:
        """Return the run's loss scale now; None where no scaler is enabled."""
        ...

    @property
    def backwards(self) -> Backwards:
        """Tells the scale of the gradients that are on their way."""
        ...


class Watched(Protocol):
    """A run whose steps are traced.

    The protocol is here because a trace is the same for a replay (a `Session`), whose parts are known before its first
    step, and for somebody else's loop, whose parts are met one by one.
    """

    @property
    def model(self) -> nn.Module:
        """The model whose parameters, buffers and modules are the run's."""
        ...

    @property
    def module_names(self) -> Mapping[str, str]:
        """Maps names of `model.named_modules()` to the names to show."""
        ...

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        ...

    @property
    def events(self) -> Calls:
        """Tells which part of the step is running."""
        ...

    @property
    def micro_batch(self) -> int:
        """The micro-batch's index inside an accumulated step."""
        ...

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the weights that the run's own code keeps beside the model: averages, teachers."""
        ...

    def parameter_names(self) -> dict[int, str]:
        """Names by `id(parameter)`; "NAME.group0.param0" for one that only the optimizer NAME holds."""
        ...

    def clean_name(self, name: str) -> str:
        """Return the name to show for a parameter's or a buffer's name."""
        ...

    def current_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, tensor) for the batches that the running step was given."""
        ...


# The interface between a replay and its probes.
#
# It lets `probes/` be written, tested and switched on one by one, and lets the engine know nothing of what they look
# for.


class Probe(Protocol):
    """Watches a replay."""

    def attach(self, run: Watched) -> AbstractContextManager[None]:
        """Install hooks; they live as long as this context and are gone afterwards, also after an exception."""
        ...

    def during(self, step: int) -> AbstractContextManager[None]:
        """Surround one step; modes that must see every op are entered here."""
        ...

    def finish(self, step: int, loss: Any) -> None:
        """End a step; a host sync belongs here.

        Args:
            step: The step.
            loss: What the step returned: a 0-dim tensor, a number or None. If the user's code ended the step with an
                exception, perhaps because it saw a non-finite value: that `UserCodeError`.
        """
        ...


# The exception with which a probe ends a step.


class StepHalted(BaseException):
    """A probe has seen enough and ends the running step; the rest of the step need not run.

    It is not an `Exception`, so that a user's `except Exception` in a forward or around a step does not swallow it.
    Whoever attached the probe catches it, and restores the snapshot that the step began with.
    """


# Describes an exception of training code, and tells whether memory ran out.


_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_MAX_MESSAGE = 300
"""Maximum number of characters of an exception's own text in one sentence; the rest is in the traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Did Python, the CPU's allocator or an accelerator's run out of memory?

    torch's CPU allocator raises a plain RuntimeError, which only its text identifies.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def describe(error: BaseException) -> str:
    """Returns type and message of an exception in one line: "ValueError: no such file"."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 a user's broken __str__ must not hide the error that it belongs to
        lines = []
    message = lines[0].strip() if lines else ""
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, what it was raised from, and what was being handled then, once each."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def code_of(error: BaseException | None) -> int:
    """With what Python ends a process that nothing but this has ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


# `ampdoctor.steps`: says in a script which of its loops is the training loop. No torch.


_Told = Callable[[FrameType], None]
_listening: list[_Told] = []


def steps(iterable: Iterable[Any] | None = None) -> Iterable[Any]:
    """Mark the loop `for batch in ampdoctor.steps(loader):` as the one whose body is a training step.

    Where ampdoctor runs the script, that loop is the one that is replayed; in a training of your own this is nothing
    but the iterable.

    Args:
        iterable: What the loop runs over; None for a loop without an end, over 0, 1, 2 ...

    Returns:
        The iterable itself.
    """
    for told in _listening:
        told(sys._getframe(1))  # noqa: SLF001 the caller's line says which loop it is
    return itertools.count() if iterable is None else iterable


@contextmanager
def told_of_marks(tell: _Told) -> Iterator[None]:
    """Call `tell` with the frame of each mark that is come to inside."""
    _listening.append(tell)
    try:
        yield
    finally:
        _listening.remove(tell)
