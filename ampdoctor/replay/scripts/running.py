"""Runs a script, as `python FILE` would, to its first training step, or to a loop whose body becomes a function."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from traceback import format_exception_only, walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.interfaces import StepHalted, describe, on_marked_loop
from ampdoctor.hooks.process_state import are_joined
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.replay.factory import Environment
from ampdoctor.replay.frameworks.adapters import ADAPTERS
from ampdoctor.replay.reachable_state import PLAIN, is_installed
from ampdoctor.replay.scripts.files import Files, nothing_at_exit, out_of_the_records, registrations_of
from ampdoctor.replay.scripts.loop_hooks import Body, Items, LoopHooks, OnArrival, StopScript
from ampdoctor.replay.scripts.loops import (
    CreatedObjects,
    LoopPlace,
    lines_of,
    loops_at,
    loops_of,
    marks_a_loop,
    on_optimizer_step,
    on_training_call,
    those_left_by,
)
from ampdoctor.replay.scripts.rewriting import Edits, MainModule
from ampdoctor.replay.scripts.trying import Loop
from ampdoctor.replay.snapshot import process_settings
from ampdoctor.replay.user_code import prints_to_nobody, shown_once, trimmed_traceback, user_code
from ampdoctor.replay.user_files import is_users_file, users_line
from ampdoctor.replay.user_modules import factories_in, syntax_sentence

# -- the model and its names, among the variables of the loop --

_LOOKED_AT = 20_000  # limit of the walk: objects near the loop come first, and a data set is not walked to its end


def seen_from(frame: FrameType) -> list[tuple[str, Any]]:
    """Returns the variables that a loop's frame sees: its own, its module's, then those of its callers."""
    found: list[tuple[str, Any]] = []
    at: FrameType | None = frame
    while at is not None:
        if is_users_file(at.f_code.co_filename):
            found += (pair for pair in (*at.f_locals.items(), *at.f_globals.items()) if not pair[0].startswith("__"))
        at = at.f_back
    return found


class Variables:
    """The objects that some variables reach, with their names in the user's code; the first name counts."""

    def __init__(self, seen: Iterable[tuple[str, Any]]) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self._names: dict[int, str] = {}
        known, ahead = set[int](), deque(seen)
        for _ in range(_LOOKED_AT):
            if not ahead:
                break
            name, value = ahead.popleft()
            if isinstance(value, PLAIN) or id(value) in known:
                continue
            known.add(id(value))
            self._names.setdefault(id(value), name)
            if isinstance(value, nn.Module):
                self.modules.append((name, value))
            else:
                ahead.extend(_within(name, value))

    def name_of(self, value: Any, otherwise: str) -> str:
        """Returns an object's name, with dots replaced."""
        return self._names.get(id(value), otherwise).replace(".", "_")


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        inner = vars(value).get("optimizer")  # of a wrapper (Accelerate's), which gets the same name
        if inner is not None:
            yield name, inner
    elif isinstance(value, Mapping):
        yield from ((key, item) for key, item in value.items() if isinstance(key, str))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}{place}", item) for place, item in enumerate(value[:64]))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__") and not is_installed(type(value).__module__):
        yield from list(vars(value).items())


def model_of(variables: Variables, optimizers: Sequence[torch.optim.Optimizer], where: str) -> nn.Module:
    """Returns the model that the optimizers train: the outermost module, or a parent of several."""
    trained = {id(p) for one in optimizers for p in parameters_of(one)}
    holds = {id(module): {id(p) for p in module.parameters()} & trained for _, module in variables.modules}
    inside = {id(part) for _, module in variables.modules for part in module.modules() if part is not module}
    outermost = [(name, module) for name, module in variables.modules if id(module) not in inside]
    chosen: list[tuple[str, nn.Module]] = []
    left = set(trained)
    for name, module in sorted(outermost, key=lambda pair: -len(holds[id(pair[1])])):
        if holds[id(module)] & left:
            chosen.append((name, module))
            left -= holds[id(module)]
    if not chosen:
        kinds = ", ".join(sorted({type(one).__name__ for one in optimizers}))
        raise FactoryError(
            f"the loop at {where} steps {kinds}, but sees no torch.nn.Module with their parameters: hand the run over "
            f"as a function that returns a TrainingRun"
        )
    if len(chosen) == 1:
        return chosen[0][1]
    order = {id(module): place for place, (_, module) in enumerate(variables.modules)}
    return _together(sorted(chosen, key=lambda pair: order[id(pair[1])]))


def _together(named: Sequence[tuple[str, nn.Module]]) -> nn.Module:
    together = nn.Module()
    for name, module in named:
        free = name.replace(".", "_") or "module"
        while hasattr(together, free):
            free += "_"
        together.add_module(free, module)
    return together


class _EndedError(FactoryError):
    """The script ended the program."""


@dataclass(slots=True)
class ScriptRun:
    """A run of the script, and what it recorded."""

    main: MainModule
    seam: LoopHooks
    made: CreatedObjects = field(default_factory=CreatedObjects)
    arrived: Loop | None = None
    loops: tuple[LoopPlace, ...] = ()
    entered: list[Any] = field(default_factory=list)
    ended: FactoryError | None = None
    """Why it ended before its first training step; `loops` are then those in which it last called what it trains."""
    called: tuple[tuple[str, int], ...] = ()
    """Lines that led to the last training call of a module that its optimizers train."""

    output: ExitStack = field(default_factory=ExitStack)
    """Drops what the script prints from its first training call on: the first step prints it again."""

    def note_call(self, module: torch.nn.Module, frame: FrameType) -> None:
        """Record a call of a module in training mode."""
        lines = lines_of(walk_stack(frame))
        if lines != self.called and self.made.training(module):
            if not self.called:
                self.output.enter_context(prints_to_nobody(unless_it_raises=True))
            self.called = lines

    def is_left(self) -> bool:
        """Has it reached what it was run for?"""
        return bool(self.arrived is not None or self.loops or self.entered)

    @property
    def loop(self) -> Loop:
        """The loop that it has reached."""
        if self.arrived is None:
            raise AssertionError("a run is only handed on if it came to its loop")
        return self.arrived


class Runner:
    """Runs a script repeatedly, each time in a process with the first run's initial state; output is shown once."""

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
        shown: set[object],
    ) -> None:
        self.name, self.path, self.files = name, path, files
        self._environment, self._arguments = environment, arguments
        self._file, self._package = file, package
        self._process: Callable[[], None] | None = None
        self._main: MainModule | None = None
        self.shown = shown
        self._registered = registrations_of(str(file))

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """Surrounds the script's code, see `LoadedFactory.user_code`; the modules are those of its last run."""
        with ExitStack() as stack:
            stack.enter_context(self._environment())
            stack.enter_context(user_code(str(self._file), what=what, path=self.path, arguments=self._arguments))
            stack.enter_context(out_of_the_records())
            stack.enter_context(nothing_at_exit())
            stack.enter_context(self._registered.watching())
            stack.enter_context(self.files.asked_to_save())
            if self._main is not None:
                stack.enter_context(self._main.in_place())
            yield

    def to_first_step(self) -> ScriptRun:
        """Run the unchanged script until an optimizer steps in the user's loop, or a framework's entry is called.

        One that ends before a step, as at a non-finite loss, has shown its loop by calling a model in training mode.
        """
        marked = marks_a_loop(self._file)

        def step(_optimizer: Any, frame: FrameType) -> None:
            if not marked:
                run.loops = run.loops or loops_of(frame)
            if run.loops:
                raise StopScript

        def mark(frame: FrameType) -> None:
            run.loops = loops_of(frame, marked=True)
            if run.loops:
                raise StopScript
            raise FactoryError(f"ampdoctor.steps(...) stands in the head of the loop that it marks{users_line()}")

        def entry(made: object) -> None:
            run.entered.append(made)
            raise StopScript

        run = self._new({}, lambda *_: None, Edits(everywhere=True))
        with ExitStack() as stack:
            for adapter in ADAPTERS:
                stack.enter_context(adapter.at_entry(entry))
            stack.enter_context(on_optimizer_step(step))
            stack.enter_context(on_training_call(run.note_call))
            stack.enter_context(on_marked_loop(mark))
            stack.enter_context(run.made.watching())
            try:
                self._execute(run)
            except (UserCodeError, _EndedError) as error:
                run.ended = error
        if not run.is_left():
            self._shown_by_calls(run, () if marked else run.called)
        return run

    def _shown_by_calls(self, run: ScriptRun, called: Sequence[tuple[str, int]]) -> None:
        """Take the loops in which the script ended, around its last training call; raises FactoryError without one."""
        loops = loops_at(called)
        if run.ended is None:
            run.ended = FactoryError(no_loop(self.name, factories_in(self._file)))
        else:
            loops = those_left_by(run.ended.__cause__, loops)
        if not loops:
            raise run.ended
        run.loops = loops

    def to_loop(self, place: LoopPlace, visit: int, around: LoopPlace | None = None) -> ScriptRun:
        """Run the script to its loop `place`, after `visit` earlier visits; `around` is the loop that repeats it."""
        visits = itertools.count()

        def arrives(items: Items | None, body: Body, frame: FrameType) -> None:
            if run.arrived is None and next(visits) < visit:
                return
            if run.arrived is None:
                run.arrived = Loop(items, body, seen_from(frame), run.made.anew(around, frame))
            raise StopScript

        run = self._new(place.edits, arrives)
        with run.made.watching():
            self._execute(run)
        if run.arrived is None:
            raise FactoryError(f"{self.name} did not come to its loop at {place} when it was run again")
        return run

    def _new(self, edits: Mapping[str, Edits], arrives: OnArrival, otherwise: Edits | None = None) -> ScriptRun:
        if self._process is None:
            self._process = process_settings()
        self._process()
        self._registered.undo()
        if are_joined():  # by an earlier run of the script: torch refuses a second process group
            torch.distributed.destroy_process_group()
        seam = LoopHooks(arrives, self.files.closed)
        run = ScriptRun(MainModule(self._file, edits, seam, self._package, otherwise), seam)
        self._main = run.main
        return run

    def _execute(self, run: ScriptRun) -> None:
        """Run the script to its end, or until it is left; errors after that do not matter."""
        try:
            with (
                self.user_code(f"the script {self.name}"),
                eagerly(),
                quiet_threads(),
                shown_once(self.shown, "script"),
                run.output,
                self.files.guarded(run.is_left),
            ):
                try:
                    run.main.run()
                except SystemExit as error:
                    if error.code or not run.is_left():
                        raise _EndedError(_ended(self.name, error)) from error
                except ModuleNotFoundError as error:
                    said = f"the script {self.name} raised {describe(error)} (is it installed where ampdoctor runs?)"
                    raise UserCodeError(said, trimmed_traceback(error), describe(error)) from error
                except SyntaxError as error:
                    if error.filename != str(self._file):
                        raise
                    raise UserCodeError(syntax_sentence(error), "".join(format_exception_only(error))) from error
        except (FactoryError, StepHalted):
            if not run.is_left():
                raise


def no_loop(name: str, factories: Sequence[str] = ()) -> str:
    """Returns the message for a script without a training loop; `factories` are its functions that may make a run."""
    instead = f" (is {name}:{factories[0]} what makes the run?)" if factories else ""
    return f"{name} ended without a training step: no loop of its own was come to in which an optimizer steps{instead}"


def _ended(name: str, error: SystemExit) -> str:
    code = "" if error.code is None else str(error.code).strip().partition("\n")[0]
    return (
        f"the script {name} ended with sys.exit({code}) before a training step; its arguments follow --, as in "
        f"'ampdoctor bisect-nan {name} -- ARGUMENTS'"
    )


def quiet_threads() -> AbstractContextManager[None]:
    """Inside, a thread that leaves the script prints no traceback."""
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not StopScript:
            original(arguments)

    return replaced(threading, "excepthook", hook)


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled code runs uncompiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
