"""A script that trains, used as a factory: each run of it ends at its training loop, whose body becomes the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.hooks.backwards import scaled_within
from ampdoctor.hooks.callbacks import on_scaler_call
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.torch_internals import Backward, replaced, seen_backwards, unseen
from ampdoctor.replay.frameworks.adapters import adapter_of
from ampdoctor.replay.scripts.files import COPY, Files
from ampdoctor.replay.scripts.loop_hooks import Body, Turn, bound_by, entered, read_by
from ampdoctor.replay.scripts.loops import SCALER_EACH_ROUND, Anew, LoopPlace
from ampdoctor.replay.scripts.running import Runner, ScriptRun, Variables, eagerly, model_of
from ampdoctor.replay.scripts.trying import (
    ENOUGH,
    LoopShape,
    RecordedEpochs,
    loaders_of,
    passed,
    set_counters,
    steps,
    tried,
)
from ampdoctor.replay.snapshot import format_of_weights
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import prints_to_nobody, shown_once

# -- one step of a run: the body of the user's loop, once per item of the step --


@dataclass(slots=True, eq=False)
class Stepping:
    """The state that all steps of a run share."""

    scalers: tuple[Any, ...]
    files: Files
    seen: Any  # variables of the functions around the loop: kept alive as long as this
    anew: Anew
    over: list[bool]  # not empty after the loop has ended


def take(body: Body, around: Sequence[Callable[[], Any]], stepping: Stepping, batch: Any) -> Any:
    """Take one step with the items in `batch`; `around` make the contexts around the loop's body.

    Body and contexts are separate arguments, so that what they reach counts as reached by the step.

    Returns the unscaled losses on which the step called `backward`: one loss, the sum of several, or the first
    non-finite one, as a sum would hide the origin. Without a backward, as when the loop skips a non-finite loss, it is
    the last loss among the body's variables.
    """
    losses: list[Any] = []
    with _backwards_in(losses, stepping), stepping.files.saving_nothing(), entered(around):
        for item in batch:
            if item is Turn.NEXT_ROUND:
                if stepping.anew.scaled:
                    stepping.files.note("scaler", SCALER_EACH_ROUND)
                stepping.anew()
                continue
            said = body(item)
            if said is not None:
                stepping.over.append(True)
                break
    if not losses:
        bound = [one for one in bound_by(body) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
        return next((one.detach() for one in reversed(bound) if _is_scalar(one)), None)
    if len(losses) == 1:
        return losses[0]
    with unseen():
        numbers = [float(loss) for loss in losses]
        ill = next((loss for loss, number in zip(losses, numbers, strict=True) if not math.isfinite(number)), None)
        return sum(numbers) if ill is None else ill


@contextmanager
def _backwards_in(losses: list[Any], stepping: Stepping) -> Iterator[None]:
    unscaled: dict[int, tuple[Any, Any]] = {}
    depth = 0

    def seen(backward: Backward, run: Callable[[], Any]) -> Any:
        nonlocal depth
        if backward.accumulated and not depth:
            losses.extend(_loss(root, unscaled) for root in backward.roots if _is_scalar(root))
        depth += 1
        try:
            return run()
        finally:
            depth -= 1

    def scaled(_scaler: Any, _method: str, losses: Any, run: Callable[[], Any]) -> Any:
        outputs = run()
        if isinstance(outputs, torch.Tensor):
            unscaled[id(outputs)] = (outputs, losses)
        return outputs

    with ExitStack() as stack:
        stack.enter_context(seen_backwards(seen))
        stack.enter_context(on_scaler_call(scaled, *stepping.scalers, methods=("scale",)))
        stack.enter_context(_told_of_new_scalers(stepping))
        yield


def _told_of_new_scalers(stepping: Stepping) -> AbstractContextManager[None]:
    original = torch.amp.GradScaler.__init__

    def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            stepping.files.note("scaler", SCALER_EACH_ROUND)

    return replaced(torch.amp.GradScaler, "__init__", init)


def _is_scalar(root: Any) -> bool:
    return isinstance(root, torch.Tensor) and root.numel() == 1


def _loss(root: Any, unscaled: dict[int, tuple[Any, Any]]) -> Any:
    if id(root) in unscaled:
        return unscaled[id(root)][1].detach()
    if unscaled and scaled_within(root):  # computed from a scaled loss
        outputs, loss = next(reversed(unscaled.values()))
        with unseen():
            scaled = float(outputs)
            return float(root) * (float(loss) / scaled) if scaled and math.isfinite(scaled) else float(loss)
    return root.detach()


_VISITS = 8  # visits of a loop until an optimizer steps in it: it may run an evaluation before


@dataclass(frozen=True, slots=True)
class _Learnt:
    place: LoopPlace
    visit: int
    lesson: LoopShape
    around: LoopPlace | None


class Script:
    """A script in place of a factory."""

    instead = COPY

    def __init__(self, runner: Runner) -> None:
        self.name, self.path = runner.name, runner.path
        self._runner, self._files, self._shown = runner, runner.files, runner.shown
        self._learnt: _Learnt | None = None
        self.autocast_on: str | None = None  # device type that its autocast names

    def user_code(self, what: str) -> AbstractContextManager[None]:
        """See `LoadedFactory.user_code`."""
        return self._runner.user_code(what)

    def make(self, arguments: Mapping[str, Any] | None = None, *, batches: Any = None, loss: Any = None) -> TrainingRun:
        """Run the script up to its training loop and return a fresh run."""
        given = {"--arg": bool(arguments), "--batches": batches is not None, "--loss": loss is not None}
        extra = [option for option, is_given in given.items() if is_given]
        if extra:
            raise FactoryError(f"{self.name} is a script and no factory: leave out {' and '.join(extra)}")
        if self._learnt is None:
            again = RandomState.capture().restore
            found = self._runner.to_first_step()
            if found.entered:
                return self._of_framework(found.entered[0])
            self._learnt = self._lessons(found.loops, again, found.ended)
            again()
        return self._run_of(
            self._learnt, self._runner.to_loop(self._learnt.place, self._learnt.visit, self._learnt.around)
        )

    def _lessons(self, loops: Sequence[LoopPlace], again: Callable[[], None], ended: FactoryError | None) -> _Learnt:
        """Returns the innermost loop with enough items, else the innermost; `loops` start with the innermost."""
        learnt: list[_Learnt] = []
        for place, around in zip(loops, (*loops[1:], None), strict=True):
            learnt.append(self._lesson(place, again, around=around, never_steps=ended is not None))
            if learnt[-1].lesson.items >= ENOUGH:
                return learnt[-1]
        if not learnt[0].lesson.optimizers:
            raise ended or FactoryError(f"the loop at {loops[0]} ended before one of its optimizers stepped")
        return learnt[0]

    def _lesson(
        self, place: LoopPlace, again: Callable[[], None], *, around: LoopPlace | None, never_steps: bool
    ) -> _Learnt:
        for visit in range(_VISITS):
            again()
            run = self._runner.to_loop(place, visit)
            files = self._files
            with (
                self.user_code(f"the loop at {place}"),
                eagerly(),
                files.saving_nothing(),
                prints_to_nobody(unless_it_raises=True),  # the first step prints it
            ):
                lesson = tried(run.loop, run.seam.around, run.made, never_steps=never_steps)
            if lesson.optimizers:
                break
        return _Learnt(place, visit, lesson, around)

    def _next_round(self, learnt: _Learnt) -> bool:
        if learnt.around is not None:
            self._files.note(
                "rounds",
                f"the loop at {learnt.place} has come to its end and begins anew; what {self.name} does between two "
                "rounds of it is not replayed",
            )
        return learnt.around is not None

    def _of_framework(self, made: Any) -> TrainingRun:
        adapter = adapter_of(made)
        if adapter is None:
            raise AssertionError("an entry hands over what its adapter claims")
        what = f"the start of {adapter.name}'s training"
        with self.user_code(what), self._files.guarded(lambda: False):
            return adapter.run_of(made)

    def _run_of(self, learnt: _Learnt, run: ScriptRun) -> TrainingRun:
        lesson, loop = learnt.lesson, run.loop
        self.autocast_on = lesson.autocast_on
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
        own = format_of_weights(model)
        stepping = Stepping(scalers, self._files, loop.seen, loop.anew, [])
        step = partial(take, loop.body, tuple(run.seam.around), stepping)
        with self.user_code(f"the loop at {learnt.place}"), eagerly(), shown_once(self._shown, "before the first step"):
            behind = passed(loop.items, lesson.before, step)
        read = read_by(loop.items)
        rounds = RecordedEpochs(
            items=loop.items,
            behind=behind,
            loaders=loaders_of(read, learnt.place.file),
            next_round=partial(self._next_round, learnt),
            say=partial(self._files.note, "order"),
        )
        return TrainingRun(
            model=model,
            batches=partial(steps, rounds, read, lesson, stepping.over),
            optimizer=next(iter(named.values())) if len(named) == 1 else named,
            precision=lesson.autocast or own,
            autocast=lesson.autocast is not None or own == "fp32",
            scaler=scalers[0] if scalers else None,
            step=step,
            counters=partial(set_counters, loop.body),
            move=lambda batch, _device: batch,
        )
