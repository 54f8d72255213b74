"""Runs a script, as `python FILE` would: to its first training step, or to a loop whose body is had alone."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception_only, walk_stack
from types import FrameType
from typing import Any

import torch

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.hooks.interfaces import StepHalted, describe, told_of_marks
from ampdoctor.replay.factory import Environment
from ampdoctor.replay.frameworks.table import ADAPTERS
from ampdoctor.replay.guarding.changes import users_line
from ampdoctor.replay.scripts.copies import Copies
from ampdoctor.replay.scripts.files import Files, nothing_at_exit, out_of_the_records
from ampdoctor.replay.scripts.made import Made
from ampdoctor.replay.scripts.parts import seen_from
from ampdoctor.replay.scripts.registrations import registrations_of
from ampdoctor.replay.scripts.seam import Arrival, Body, Items, Left, Seam
from ampdoctor.replay.scripts.source.finding import (
    LoopPlace,
    lines_of,
    loops_at,
    loops_of,
    marks_a_loop,
    those_left_by,
    told_of_steps,
    told_of_training_calls,
)
from ampdoctor.replay.scripts.source.main_module import MainModule
from ampdoctor.replay.scripts.source.rewriting import Edits
from ampdoctor.replay.scripts.trying import Loop
from ampdoctor.replay.snapshot import ProcessState
from ampdoctor.replay.user_code import prints_to_nobody, trimmed_traceback, user_code


class _EndedError(FactoryError):
    """The script ended the program."""


@dataclass(slots=True)
class ScriptRun:
    """A run of the script, and what was seen in it."""

    main: MainModule
    seam: Seam
    made: Made = field(default_factory=Made)
    arrived: Loop | None = None
    loops: tuple[LoopPlace, ...] = ()
    entered: list[Any] = field(default_factory=list)
    ended: FactoryError | None = None
    """Why it ended before its first training step; its loops are then those in which it last called what it trains."""

    called: tuple[tuple[str, int], ...] = ()
    """Lines that led to the last call of what its optimizers train."""

    def note_call(self, module: torch.nn.Module, frame: FrameType) -> None:
        """Note a call of a module in training mode."""
        lines = lines_of(walk_stack(frame))
        if lines != self.called and self.made.training(module):
            self.called = lines

    def is_left(self) -> bool:
        """Has it come to what it was run for?"""
        return bool(self.arrived is not None or self.loops or self.entered)

    @property
    def loop(self) -> Loop:
        """The loop that it has come to."""
        if self.arrived is None:
            raise AssertionError("a run is only handed on if it came to its loop")
        return self.arrived


class Runner:
    """Runs a script again and again, each time in a process as it was before the first; what it prints is heard once.

    Args:
        name: As the user wrote it; for errors.
        file: The file.
        package: The package that it is run in, as by `python -m`; None for a file of its own.
        arguments: What follows it in `sys.argv`.
        path: Folders that are first on `sys.path` while its code runs.
        environment: Makes the context manager around its code.
        files: What it writes.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        *,
        package: str | None,
        arguments: tuple[str, ...],
        path: tuple[str, ...],
        environment: Environment,
        files: Files,
    ) -> None:
        self.environment, self.files = environment, files
        self._name, self._file, self._package = name, file, package
        self._arguments, self._path = arguments, path
        self._process: ProcessState | None = None
        self._main: MainModule | None = None
        self._heard = False
        self._registered = registrations_of(str(file))

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """Surrounds the script's code, as of `LoadedFactory`; the modules are those of its last run.

        Args:
            what: What runs; the subject of an error's sentence.

        Raises:
            UserCodeError: The code raised.
        """
        with ExitStack() as stack:
            stack.enter_context(self.environment())
            stack.enter_context(user_code(str(self._file), what=what, path=self._path, arguments=self._arguments))
            stack.enter_context(out_of_the_records())
            stack.enter_context(nothing_at_exit())
            stack.enter_context(self._registered.watching())
            stack.enter_context(self.files.asked_to_save())
            if self._main is not None:
                stack.enter_context(self._main.in_place())
            yield

    def to_first_step(self) -> ScriptRun:
        """Run the script, as it is, to where an optimizer steps in a loop of the user's own, or a framework begins.

        One that ends before, as at a loss that is not finite, has shown its loop where it has called a model of its
        optimizers' in training mode.

        Raises:
            FactoryError: It comes to neither, or would have changed a file before.
            UserCodeError: It raised.
        """
        marked = marks_a_loop(self._file)

        def step(_optimizer: Any, frame: FrameType) -> None:
            if not marked:
                run.loops = run.loops or loops_of(frame)
            if run.loops:
                raise Left

        def mark(frame: FrameType) -> None:
            run.loops = loops_of(frame, marked=True)
            if run.loops:
                raise Left
            raise FactoryError(f"ampdoctor.steps(...) stands in the head of the loop that it marks{users_line()}")

        def entry(made: object) -> None:
            run.entered.append(made)
            raise Left

        run = self._new({}, lambda *_: None, Edits(everywhere=True))
        with ExitStack() as stack:
            for adapter in ADAPTERS:
                stack.enter_context(adapter.at_entry(entry))
            stack.enter_context(told_of_steps(step))
            stack.enter_context(told_of_training_calls(run.note_call))
            stack.enter_context(told_of_marks(mark))
            stack.enter_context(run.made.watching())
            try:
                self._execute(run)
            except (UserCodeError, _EndedError) as error:
                run.ended = error
        if not run.is_left():
            self._shown_by_calls(run, () if marked else run.called)
        return run

    def _shown_by_calls(self, run: ScriptRun, called: Sequence[tuple[str, int]]) -> None:
        """Take the loops of a script that has ended before a step: those around a call, which it was still in.

        Raises:
            FactoryError: There are none.
        """
        loops = loops_at(called)
        if run.ended is None:
            run.ended = FactoryError(no_loop(self._name))
        else:
            loops = those_left_by(run.ended.__cause__, loops)
        if not loops:
            raise run.ended
        run.loops = loops

    def to_loop(self, place: LoopPlace, visit: int, around: LoopPlace | None = None) -> ScriptRun:
        """Run the script to its loop, the `visit`-th time that it comes there.

        Args:
            place: The loop.
            visit: How often it has come there before.
            around: The loop whose rounds begin it anew; None if nothing does.

        Raises:
            FactoryError: It does not come there, or would have changed a file before.
            UserCodeError: It raised.
        """
        visits = itertools.count()

        def arrives(items: Items | None, body: Body, frame: FrameType) -> None:
            if run.arrived is None and next(visits) < visit:
                return
            if run.arrived is None:
                run.arrived = Loop(
                    items, body, seen_from(frame), run.made.anew(around, frame), Copies.of(place, around, frame, body)
                )
            raise Left

        run = self._new(place.edits, arrives)
        with run.made.watching():
            self._execute(run)
        if run.arrived is None:
            raise FactoryError(f"{self._name} did not come to its loop at {place} when it was run again")
        return run

    def _new(self, edits: Mapping[str, Edits], arrives: Arrival, otherwise: Edits | None = None) -> ScriptRun:
        """Returns a run that is about to begin, in a process as it was before the first."""
        if self._process is None:
            self._process = ProcessState()
        self._process.restore()
        self._registered.undo()
        _leave_process_group()
        seam = Seam(arrives, self.files.closed)
        run = ScriptRun(MainModule(self._file, edits, seam, self._package, otherwise), seam)
        self._main = run.main
        return run

    def _execute(self, run: ScriptRun) -> None:
        """Run the script to its end, or to where it is left; what it makes of being left does not matter.

        Raises:
            FactoryError: It is no Python, it ended the program, or it would have changed a file.
            UserCodeError: It raised.
        """
        try:
            with (
                self.user_code(f"the script {self._name}"),
                eagerly(),
                quiet_threads(),
                prints_to_nobody() if self._heard else contextlib.nullcontext(),
                self.files.guarded(run.is_left),
            ):
                try:
                    run.main.run()
                except SystemExit as error:
                    if error.code or not run.is_left():
                        raise _EndedError(_ended(self._name, error)) from error
                except ModuleNotFoundError as error:
                    said = f"the script {self._name} raised {describe(error)} (is it installed where ampdoctor runs?)"
                    raise UserCodeError(said, trimmed_traceback(error), describe(error)) from error
                except SyntaxError as error:
                    if error.filename != str(self._file):
                        raise
                    raise UserCodeError(_not_python(error), "".join(format_exception_only(error))) from error
        except (FactoryError, StepHalted):
            if not run.is_left():
                raise
        finally:
            self._heard = True


def no_loop(name: str) -> str:
    """Returns the sentence for a script in which no training loop was come to."""
    return f"{name} ended without a training step: no loop of its own was come to in which an optimizer steps"


def _ended(name: str, error: SystemExit) -> str:
    code = "" if error.code is None else str(error.code).strip().partition("\n")[0]
    return (
        f"the script {name} ended with sys.exit({code}) before a training step; its arguments follow --, as in "
        f"'ampdoctor bisect-nan {name} -- ARGUMENTS'"
    )


def _not_python(error: SyntaxError) -> str:
    line = "" if error.lineno is None else f", line {error.lineno}"
    return f"{error.filename or 'the file'}{line} is not valid Python: {error.msg}"


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Inside, a thread that leaves the script prints no traceback."""
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not Left:
            original(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = original


def eagerly() -> AbstractContextManager[Any]:
    """Inside, what is compiled runs as it was written."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _leave_process_group() -> None:
    """Close the group of processes that an earlier run of the script has opened: a second one is refused."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
