"""A script that trains, as a factory: each run of it ends at its training loop, whose body becomes the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.replay.frameworks.table import ADAPTERS, adapter_of
from ampdoctor.replay.scripts.finding import LoopPlace, loops_of, told_of_steps
from ampdoctor.replay.scripts.made import Made
from ampdoctor.replay.scripts.main_module import MainModule
from ampdoctor.replay.scripts.parts import Variables, model_of, seen_from
from ampdoctor.replay.scripts.seam import Body, Items, Left, Seam
from ampdoctor.replay.scripts.taking import take
from ampdoctor.replay.scripts.trying import ENOUGH, Lesson, Loop, tried
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import user_code

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

    @property
    def loop(self) -> Loop:
        """What it has come to."""
        if self.arrived is None:
            raise AssertionError("a run is only handed on if it came to its loop")
        return self.arrived


@dataclass(slots=True, kw_only=True, eq=False)
class Script:
    """A script, in the place of a factory.

    Attributes:
        name: As the user wrote it; for reports and errors.
        file: The file.
        arguments: What follows it in `sys.argv`.
        path: Folders that are first on `sys.path` while its code runs.
        environment: Makes the context manager around its code.
    """

    name: str
    file: Path
    arguments: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    environment: Environment = contextlib.nullcontext
    _main: MainModule | None = None
    _place: LoopPlace | None = None
    _visit: int = 0
    _lesson: Lesson | None = None

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """As that of `LoadedFactory`; the modules are those of the script's last run.

        Args:
            what: What runs; the subject of an error's sentence.

        Raises:
            UserCodeError: The code raised.
        """
        with ExitStack() as stack:
            stack.enter_context(self.environment())
            stack.enter_context(user_code(str(self.file), what=what, path=self.path, arguments=self.arguments))
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
        if self._place is None or self._lesson is None:
            entered = self._learn()
            if entered is not None:
                return entered
        return self._run_of(self._started(self._place, self._visit))

    # -- learning what the script is -----------------------------------------------------------------------------

    def _learn(self) -> TrainingRun | None:
        """Find the loop and what its steps are made of; returns a run where a framework's entry was come to."""
        before = _random_state()
        found = self._first_step()
        if found.entered:
            return self._of_framework(found.entered[0])
        if not found.loops:
            raise FactoryError(no_loop(self.name))
        lessons: list[tuple[LoopPlace, int, Lesson]] = []
        for place in found.loops:
            before()
            visit, lesson = self._lesson_of(place)
            lessons.append((place, visit, lesson))
            if lesson.items >= ENOUGH and lesson.optimizers:
                break
        else:
            lessons = lessons[:1]
        self._place, self._visit, self._lesson = lessons[-1]
        if not self._lesson.optimizers:
            raise FactoryError(f"the loop at {self._place} ended before one of its optimizers stepped")
        before()
        return None

    def _lesson_of(self, place: LoopPlace) -> tuple[int, Lesson]:
        again = _random_state()
        for visit in range(_VISITS):
            again()
            run = self._started(place, visit)
            with self.user_code(f"the loop at {place}"), eagerly():
                lesson = tried(run.loop, run.seam.around, run.made)
            if lesson.optimizers:
                break
        return visit, lesson

    def _first_step(self) -> _Run:
        """Run the script, as it is, to where an optimizer steps in a loop of the user's own, or a framework begins."""

        def step(_optimizer: Any, frame: FrameType) -> None:
            run.loops = run.loops or loops_of(frame)
            if run.loops:
                raise Left

        def entry(made: object) -> None:
            run.entered.append(made)
            raise Left

        run = self._new({}, lambda *_: None)
        with ExitStack() as stack:
            for adapter in ADAPTERS:
                stack.enter_context(adapter.at_entry(entry))
            stack.enter_context(told_of_steps(step))
            self._execute(run)
        return run

    def _of_framework(self, made: Any) -> TrainingRun:
        adapter = adapter_of(made)
        if adapter is None:
            raise AssertionError("an entry hands over what its adapter claims")
        with self.environment():
            return adapter.run_of(made)

    # -- running it ----------------------------------------------------------------------------------------------

    def _new(self, edits: Mapping[str, Any], arrives: Any) -> _Run:
        seam = Seam(arrives)
        run = _Run(MainModule(self.file, edits, seam), seam)
        self._main = run.main
        return run

    def _started(self, place: LoopPlace | None, visit: int) -> _Run:
        """Run the script to its loop, the `visit`-th time that it comes there."""
        if place is None:
            raise AssertionError("the loop is found first")
        visits = 0

        def arrives(items: Items | None, body: Body, frame: FrameType) -> None:
            nonlocal visits
            visits += 1
            if visits > visit:
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
        """Run the script to its end, or to where it is left.

        Raises:
            FactoryError: It is no Python, or it ended the program.
            UserCodeError: It raised.
        """
        left = False
        try:
            with self.user_code(f"the script {self.name}"), eagerly():
                try:
                    run.main.run()
                except SystemExit as error:
                    left = True
                    if run.arrived is None and not run.loops and not run.entered:
                        raise FactoryError(_ended(self.name, error)) from None
        except Left:
            return
        except UserCodeError as error:
            if isinstance(error.__cause__, SyntaxError) and not left:
                raise UserCodeError(_not_python(error.__cause__), error.traceback_text) from error.__cause__
            raise

    def _run_of(self, run: _Run) -> TrainingRun:
        """Returns the run whose step is the loop's body."""
        place, lesson, arrived = self._place, self._lesson, run.loop
        if place is None or lesson is None:
            raise AssertionError("the loop is known by now")
        variables = Variables(arrived.seen)
        optimizers = [run.made.at(number) for number in lesson.optimizers]
        scalers = [run.made.at(number) for number in lesson.scalers]
        if not all(one is not None for one in (*optimizers, *scalers)):
            raise FactoryError(f"{self.name} makes other optimizers in each run: hand it over as a function")
        model = model_of(variables, optimizers, str(place))
        named: dict[str, Any] = {}
        for one in optimizers:
            name = variables.name_of(one, "optimizer")
            named[name if name not in named else f"{name}{len(named)}"] = one
        autocast = lesson.autocast is not None
        over: list[bool] = []
        return TrainingRun(
            model=model,
            batches=partial(_steps, arrived.items, lesson.together, over),
            optimizer=next(iter(named.values())) if len(named) == 1 else named,
            precision=lesson.autocast or _format_of(model),
            autocast=autocast or _format_of(model) == "fp32",
            scaler=scalers[0] if scalers else None,
            step=partial(take, arrived.body, run.seam.around, tuple(scalers[:1]), over),
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


def _random_state() -> Callable[[], None]:
    """Returns what puts the generators back to where they are now."""
    from ampdoctor.replay.snapshot import RandomState

    return RandomState.capture().restore
