"""A script that trains, as a factory: each run of it ends at its training loop, whose body becomes the step."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.loop.halt import StepHalted
from ampdoctor.loop.marked import told_of_marks
from ampdoctor.replay.frameworks.table import ADAPTERS, adapter_of
from ampdoctor.replay.guarding.changes import users_line
from ampdoctor.replay.scripts.files import Files, out_of_the_records
from ampdoctor.replay.scripts.finding import LoopPlace, loops_of, marks_a_loop, told_of_steps
from ampdoctor.replay.scripts.made import Made
from ampdoctor.replay.scripts.main_module import MainModule
from ampdoctor.replay.scripts.parts import Variables, model_of, seen_from
from ampdoctor.replay.scripts.rewriting import Edits
from ampdoctor.replay.scripts.seam import Arrival, Body, Items, Left, Seam
from ampdoctor.replay.scripts.taking import Stepping, take
from ampdoctor.replay.scripts.trying import ENOUGH, Lesson, Loop, tried
from ampdoctor.replay.snapshot import ProcessState, RandomState
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import has_user_frames, trimmed_traceback, user_code

Environment = Callable[[], AbstractContextManager[Any]]
_VISITS = 8
"""How often a loop is come to at most before an optimizer steps in it: it may serve an evaluation before."""


@dataclass(slots=True)
class _Run:
    """A run of the script, and what was seen in it."""

    main: MainModule
    seam: Seam
    made: Made = field(default_factory=Made)
    arrived: Loop | None = None
    loops: tuple[LoopPlace, ...] = ()
    entered: list[Any] = field(default_factory=list)

    def is_left(self) -> bool:
        """Has it come to what it was run for?"""
        return bool(self.arrived is not None or self.loops or self.entered)

    @property
    def loop(self) -> Loop:
        """The loop that it has come to."""
        if self.arrived is None:
            raise AssertionError("a run is only handed on if it came to its loop")
        return self.arrived


@dataclass(frozen=True, slots=True)
class _Learnt:
    """Which loop it is, which visit of it, and what its steps are made of."""

    place: LoopPlace
    visit: int
    lesson: Lesson


class Script:
    """A script, in the place of a factory.

    Args:
        name: As the user wrote it; for reports and errors.
        file: The file.
        arguments: What follows it in `sys.argv`.
        path: Folders that are first on `sys.path` while its code runs.
        environment: Makes the context manager around its code.
        notes: Gets what there is to say of its replay.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        *,
        arguments: tuple[str, ...],
        path: tuple[str, ...],
        environment: Environment,
        notes: list[str],
    ) -> None:
        self.name, self.path = name, path
        self._file, self._arguments, self._environment = file, arguments, environment
        self._files = Files(name, (Path.cwd(), *path), notes)
        self._process: ProcessState | None = None
        self._main: MainModule | None = None
        self._learnt: _Learnt | None = None

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """As that of `LoadedFactory`; the modules are those of the script's last run.

        Args:
            what: What runs; the subject of an error's sentence.

        Raises:
            UserCodeError: The code raised.
        """
        with ExitStack() as stack:
            stack.enter_context(self._environment())
            stack.enter_context(user_code(str(self._file), what=what, path=self.path, arguments=self._arguments))
            stack.enter_context(out_of_the_records())
            if self._main is not None:
                stack.enter_context(self._main.in_place())
            yield

    def make(self, arguments: Mapping[str, Any] | None = None, *, batches: Any = None, loss: Any = None) -> TrainingRun:
        """Run the script up to its training loop, for a fresh run.

        Raises:
            FactoryError: It comes to none, or its parts are not found.
            UserCodeError: It raised.
        """
        given = {"--arg": bool(arguments), "--batches": batches is not None, "--loss": loss is not None}
        extra = [option for option, is_given in given.items() if is_given]
        if extra:
            raise FactoryError(f"{self.name} is a script and no factory: leave out {' and '.join(extra)}")
        if self._learnt is None:
            again = RandomState.capture().restore
            found = self._first_step()
            if found.entered:
                return self._of_framework(found.entered[0])
            self._learnt = self._lessons(found.loops, again)
            again()
        return self._run_of(self._learnt, self._started(self._learnt.place, self._learnt.visit))

    # -- learning what the script is -----------------------------------------------------------------------------

    def _first_step(self) -> _Run:
        """Run the script, as it is, to where an optimizer steps in a loop of the user's own, or a framework begins."""
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

        run = self._new({}, lambda *_: None)
        with ExitStack() as stack:
            for adapter in ADAPTERS:
                stack.enter_context(adapter.at_entry(entry))
            stack.enter_context(told_of_steps(step))
            stack.enter_context(told_of_marks(mark))
            self._execute(run)
        if not (run.entered or run.loops):
            raise FactoryError(no_loop(self.name))
        return run

    def _lessons(self, loops: Sequence[LoopPlace], again: Callable[[], None]) -> _Learnt:
        """Returns what was learnt of the innermost loop that has enough items; of the innermost, if none has."""
        learnt: list[_Learnt] = []
        for place in loops:
            learnt.append(self._lesson(place, again))
            if learnt[-1].lesson.items >= ENOUGH:
                return learnt[-1]
        if not learnt[0].lesson.optimizers:
            raise FactoryError(f"the loop at {loops[0]} ended before one of its optimizers stepped")
        return learnt[0]

    def _lesson(self, place: LoopPlace, again: Callable[[], None]) -> _Learnt:
        for visit in range(_VISITS):
            again()
            run = self._started(place, visit)
            with self.user_code(f"the loop at {place}"), eagerly(), self._files.saving_nothing():
                lesson = tried(run.loop, run.seam.around, run.made)
            if lesson.optimizers:
                break
        return _Learnt(place, visit, lesson)

    def _of_framework(self, made: Any) -> TrainingRun:
        adapter = adapter_of(made)
        if adapter is None:
            raise AssertionError("an entry hands over what its adapter claims")
        with self._environment():
            return adapter.run_of(made)

    # -- running it ----------------------------------------------------------------------------------------------

    def _new(self, edits: Mapping[str, Edits], arrives: Arrival) -> _Run:
        """Returns a run that is about to begin, in a process as it was before the first."""
        if self._process is None:
            self._process = ProcessState()
        self._process.restore()
        _leave_process_group()
        seam = Seam(arrives)
        run = _Run(MainModule(self._file, edits, seam), seam)
        self._main = run.main
        return run

    def _started(self, place: LoopPlace, visit: int) -> _Run:
        """Run the script to its loop, the `visit`-th time that it comes there."""
        visits = itertools.count()

        def arrives(items: Items | None, body: Body, frame: FrameType) -> None:
            if run.arrived is None and next(visits) < visit:
                return
            if run.arrived is None:
                run.arrived = Loop(items, body, seen_from(frame))
            raise Left

        run = self._new(place.edits, arrives)
        with run.made.watching():
            self._execute(run)
        if run.arrived is None:
            raise FactoryError(f"{self.name} did not come to its loop at {place} when it was run again")
        return run

    def _execute(self, run: _Run) -> None:
        """Run the script to its end, or to where it is left; what it makes of being left does not matter.

        Raises:
            FactoryError: It is no Python, it ended the program, or it would have changed a file.
            UserCodeError: It raised.
        """
        try:
            with self.user_code(f"the script {self.name}"), eagerly(), self._files.guarded(run.is_left):
                try:
                    run.main.run()
                except SystemExit as error:
                    if error.code or not run.is_left():
                        raise FactoryError(_ended(self.name, error)) from None
                except SyntaxError as error:
                    if error.filename == str(self._file) and not has_user_frames(error):
                        raise UserCodeError(_not_python(error), trimmed_traceback(error)) from error
                    raise
        except (FactoryError, StepHalted):
            if not run.is_left():
                raise

    def _run_of(self, learnt: _Learnt, run: _Run) -> TrainingRun:
        """Returns the run whose step is the loop's body."""
        lesson, loop = learnt.lesson, run.loop
        variables = Variables(loop.seen)
        optimizers = [run.made.at(number) for number in lesson.optimizers]
        scalers = tuple(run.made.at(number) for number in lesson.scalers)
        if any(one is None for one in (*optimizers, *scalers)):
            raise FactoryError(f"{self.name} makes other optimizers each time that it runs: nothing can be run again")
        model = model_of(variables, optimizers, str(learnt.place))
        named: dict[str, Any] = {}
        for one in optimizers:
            name = variables.name_of(one, "optimizer")
            named[name if name not in named else f"{name}{len(named)}"] = one
        own = _format_of(model)
        stepping = Stepping(scalers, self._files, (loop.seen, run.seam.held), [])
        return TrainingRun(
            model=model,
            batches=partial(_steps, loop.items, lesson.together, stepping.over),
            optimizer=next(iter(named.values())) if len(named) == 1 else named,
            precision=lesson.autocast or own,
            autocast=lesson.autocast is not None or own == "fp32",
            scaler=scalers[0] if scalers else None,
            step=partial(take, loop.body, tuple(run.seam.around), stepping),
            move=_as_it_is,
        )


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


def _steps(items: Items | None, together: int, over: Sequence[bool], start: int = 0) -> Iterator[list[Any]]:
    """Yields, for each step, the items that it takes, as the loop draws them."""
    drawn = None if items is None else iter(items())
    for _ in range(start * together):
        if drawn is not None:
            next(drawn, None)
    while not over:
        step: list[Any] = []
        for _ in range(together):
            if drawn is None:
                step.append(None)
                continue
            try:
                step.append(next(drawn))
            except StopIteration:
                return
        yield step


def _as_it_is(batch: Any, _device: Any) -> Any:
    return batch


def _format_of(model: torch.nn.Module) -> str:
    """Returns the format that a model without autocast computes in, by most of its weights."""
    half = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    counts = dict.fromkeys(("fp32", "fp16", "bf16"), 0)
    for parameter in model.parameters():
        counts[half.get(parameter.dtype, "fp32")] += parameter.numel()
    return max(counts, key=lambda name: counts[name])


def eagerly() -> AbstractContextManager[Any]:
    """Inside, what is compiled runs as it was written."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _leave_process_group() -> None:
    """Close the group of processes that an earlier run of the script has opened: a second one is refused."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
