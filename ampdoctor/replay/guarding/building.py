"""Stops the user's code where it begins to train or to write, though it was called only to build a run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.replay.guarding.changes import told_of_changes, users_line

_FACTORY = (
    "a factory builds a fresh model with its batches, loss and optimizer and returns them as a TrainingRun; the "
    "training itself, and what it writes, stay out of it"
)
_SCRIPT = 'what trains at its top level goes below `if __name__ == "__main__":`'


class _Stopped(StepHalted):
    """Ends what the user's code has begun; their `except Exception` does not swallow it."""


@contextmanager
def building(
    what: str, folders: Iterable[str | Path], *, imports: bool = False, may_step: bool = False
) -> Iterator[None]:
    """Stop the body at the first step of an optimizer, or before it changes the user's files below the folders.

    A step with a learning rate of 0 trains nothing: so torch itself makes an optimizer's state. What counts as a change
    is said at `told_of_changes`. What the body makes of the stop, in whichever thread, it is an error in the end.

    Args:
        what: What runs; the subject of the error's sentence.
        folders: The working folder, and that of the user's file.
        imports: A file is imported, and not a factory called.
        may_step: Steps are let be: the body says that it makes a run, and needs them for the run's state.

    Raises:
        FactoryError: The body was stopped; the sentence says what a factory is.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stopped: list[str] = []
    thread = threading.get_ident()

    def stop(did: str, _place: object = None) -> None:
        advice = f"{_SCRIPT}; {_FACTORY}" if imports else _FACTORY
        stopped.append(f"{what} {did}, and was stopped there: {advice}")
        raise _Stopped if threading.get_ident() == thread else SystemExit  # which ends a thread without a traceback

    def on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            stop(f"steps an optimizer{users_line()}")

    try:
        with ExitStack() as stack:
            if not may_step:
                stack.callback(register_optimizer_step_pre_hook(on_step).remove)
            stack.enter_context(told_of_changes(folders, stop))
            yield
    except (Exception, SystemExit, _Stopped):
        if not stopped:
            raise
    if stopped:
        raise FactoryError(stopped[0])
