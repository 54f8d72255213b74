"""`LoopWatch`: stands beside a training loop, records each step, and says when one is not finite."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic  # a script may put another in its place
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ampdoctor.hooks.backwards import inside_own_step
from ampdoctor.hooks.callbacks import OptimizerHooks, told_of_scalers
from ampdoctor.hooks.process_state import RandomState, refused
from ampdoctor.hooks.program import Program
from ampdoctor.hooks.scaler_events import raised_by_scaler
from ampdoctor.hooks.torch_internals import under_fake_tensors, unseen
from ampdoctor.live.recording.programs import KeptUpdate
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.probes.user_code import own_line, user_frames

# What is called from inside somebody's loop, and raises nothing into it.


class MayFail(Protocol):
    """Something that watches.

    Attributes:
        broken: Whether it has failed, and watches no more.
    """

    broken: bool

    def failed(self, error: Exception) -> None:
        """It has failed: `broken` is true from now on."""


P = ParamSpec("P")
W = TypeVar("W", bound=MayFail)


def harmless(method: Callable[Concatenate[W, P], Any]) -> Callable[Concatenate[W, P], Any]:
    """What fails inside is ours: it is told once, and the loop goes on unwatched. A broken one does nothing."""

    @functools.wraps(method)
    def guarded(self: W, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.failed(error)
            return None

    return guarded  # type: ignore[return-value]  # a method stays one


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An update that is about to be made, or that a scaler has held back.

    Attributes:
        step: Its number among the optimizer's own, from 0.
        optimizer: The optimizer.
        name: Its name: "optimizer", then "optimizer2" and so on.
        scaler: What steps it; None without one.
        micro_steps: Backwards since its last update.
        seconds: Since its last update; None for the first.
        unscaled_by: The scaler that the loop has had its gradients unscaled by, where no scaler steps it; None else.
    """

    step: int
    optimizer: torch.optim.Optimizer
    name: str
    scaler: Any
    micro_steps: int
    seconds: float | None
    unscaled_by: Any = None

    @property
    def is_called_either_way(self) -> bool:
        """A scaler calls the optimizer whatever it has found: a fused one skips by itself, on its device."""
        return self.scaler is not None and getattr(self.optimizer, "grad_scale", None) is not None


def _weakly(scaler: Any) -> Callable[[], Any]:
    """Returns what gives a scaler as long as it lives; of a class without weak references nothing."""
    try:
        return weakref.ref(scaler)
    except TypeError:
        return lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """An optimizer steps once more on the gradients of its last update, or its scaler does: no step of its own.

    Attributes:
        step: The number of that update.
        name: The optimizer's name.
        scaled: A scaler has made that update, or skipped it.
        held_back: It has skipped it.
        line: The user's line that makes the call, as Python names it.
    """

    step: int
    name: str
    scaled: bool
    held_back: bool
    line: tuple[str, int] | None


class LoopListener(Protocol):
    """Told of a loop's updates; what it raises ends the loop, and nothing else of it does."""

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler is about to divide an optimizer's gradients by its scale."""

    def about_to_step(self, attempt: Attempt, losses: list[torch.Tensor]) -> None:
        """An update is about to be made, and its weights are as they were."""

    def held_back(self, attempt: Attempt, losses: list[torch.Tensor]) -> None:
        """A scaler has skipped an update, and its weights are as they were."""

    def attempted(self, attempt: Attempt, *, skipped: bool | None) -> None:
        """The update was made, or skipped; None where only a device knows."""

    def refused(self, method: str, optimizer: Any, error: Exception) -> None:
        """A scaler has refused a call of "unscale_", "step" or "update", for this optimizer or None."""

    def stepping_again(self, again: Again) -> None:
        """An optimizer is about to step on gradients that it has used, or its scaler has skipped that."""

    def failed(self, error: Exception) -> None:
        """The watch itself has failed: nothing more is told."""


@dataclass(slots=True)
class _Known:
    """What is known of an optimizer, and of the one that it has taken the place of.

    Attributes:
        there: The optimizer.
        trained: Its parameters, by their id.
        name: Its name.
        attempts: Its updates so far.
        last: When the last of them ended.
        scaled: A scaler has made the last of them, or skipped it.
        held_back: It has skipped it.
        unscaled: How often autograd's engine had run when the loop had its gradients unscaled, and by which scaler.
    """

    there: weakref.ref[Any]
    trained: dict[int, weakref.ref[torch.Tensor]]
    name: str
    attempts: int = 0
    last: float | None = None
    scaled: bool = False
    held_back: bool = False
    unscaled: tuple[int, Callable[[], Any]] | None = None


@dataclass(slots=True)
class ScalerFacts:
    """What a loop has asked of its scalers.

    Attributes:
        knows_scale: It has asked for a scale, and may scale and unscale in its own code.
        updates: Calls of `update` so far.
        scaled_by: The scaler that has scaled a loss last.
    """

    knows_scale: bool = False
    updates: int = 0
    scaled_by: Callable[[], Any] | None = None

    @property
    def last(self) -> Any:
        """The scaler that has scaled a loss last; None where it is gone, or none has."""
        return None if self.scaled_by is None else self.scaled_by()


class _Call:
    """The loop's own call, which runs once: what fails beside it must not make it run again."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._result: Any = None
        self._made = self.raised = False

    def __call__(self) -> Any:
        if not self._made:
            self._made = True
            try:
                self._result = self._run()
            except BaseException:
                self.raised = True
                raise
        return self._result


class LoopWatch:
    """Watches the loops of this process for as long as `watching` lasts.

    Scalers and optimizers are told apart by their own hooks. An update through a scaler that skips it is seen by the
    optimizer not being called; a closure is judged after it has run, and before the update that it is for.

    Args:
        listener: Told of the updates.

    Attributes:
        recorder: Records the steps.
        scalers: What the loop has asked of its scalers.
        broken: Whether the watch itself has failed.
    """

    def __init__(self, listener: LoopListener) -> None:
        self.recorder = StepRecorder()
        self.scalers = ScalerFacts()
        self._listener = listener
        self._optimizers: dict[int, _Known] = {}
        self._names = 0
        self._here = _OfThread()
        # by id: those that hold another optimizer and do not step it
        self._by_themselves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._telling = threading.RLock()  # the listener is told by one thread at a time
        self._busy = self.broken = False
        self._process = os.getpid()

    @contextmanager
    def watching(self, *scalers: Any) -> Iterator[None]:
        """Hooks are in place inside, and gone afterwards whatever happens.

        Args:
            scalers: Known beforehand; torch's own need not be.
        """
        with ExitStack() as stack:
            stack.enter_context(self.recorder.watching())
            stack.enter_context(told_of_scalers(self, *scalers))
            hooks = OptimizerHooks(self._before_step, self._after_step)
            stack.callback(hooks.remove)
            hooks.hang()
            self.recorder.stay = hooks.hang
            stack.callback(self._over)
            yield

    def _over(self) -> None:
        """Whoever has wrapped what was in torch's place may go on calling it."""
        self._busy = self.recorder.away = True
        self._here = _OfThread()  # an update that has raised is in it

    def meet(self, model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """The loop has these parts, which it would show only when it uses them."""
        if model is not None:
            self.recorder.models.meet(model)
        for optimizer in optimizers:
            self._known_as(optimizer)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Inside, nothing that runs is the loop's, and a collective raises `CollectiveError`: the others run none.

        Random states are afterwards as they were: what writes a report in colours draws numbers as well.
        """
        busy, away = self._busy, self.recorder.away
        self._busy = self.recorder.away = True
        random = RandomState.capture()
        try:
            with self.recorder.pausing(), refused():
                yield
        finally:
            random.restore()
            self._busy, self.recorder.away = busy, away

    def program(self, attempt: Attempt) -> Program:
        """The step that an update is for, as it was recorded."""
        return self.recorder.program(attempt.optimizer, name=attempt.name, scaler=attempt.scaler, step=attempt.step)

    def keepable(self, attempt: Attempt) -> KeptUpdate:
        """The same, to be kept behind the update."""
        return self.recorder.keepable(attempt.optimizer, name=attempt.name, scaler=attempt.scaler, step=attempt.step)

    def name_of(self, optimizer: Any) -> str:
        """The name of an optimizer in the log; "" for one that has made no update yet."""
        known = self._optimizers.get(id(optimizer))
        return known.name if known is not None and known.there() is optimizer else ""

    def whose(self, name: str) -> str | None:
        """What the loop calls the optimizer of this name, and of what kind it is; None where it steps no others."""
        living = {known.name: there for known in self._optimizers.values() if (there := known.there()) is not None}
        if name not in living or len(living) == 1:
            return None
        kind, variable = type(living[name]).__name__, _variable_of(living[name])
        return f"{name} ({kind})" if variable in (None, name) else f"{variable} ({kind}, {name} in the log)"

    # -- scalers -----------------------------------------------------------------------------------------------------

    def scaler_called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        """As in `ScalerListener`."""
        if self._is_not_ours():
            return run()
        self.recorder.stays()
        call = _Call(run)
        try:
            return self._heard(scaler, method, argument, call)
        except Exception as error:
            if call.raised:
                raise
            self.failed(error)
            return call()

    def _heard(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        if method in ("get_scale", "state_dict"):
            # which asks for the scale: a checkpoint is no arithmetic
            self.scalers.knows_scale |= method == "get_scale" and not self._here.saving
            self._here.saving = method == "state_dict"
            try:
                return run()
            finally:
                self._here.saving = False
        if method == "scale":
            self.scalers.scaled_by = _weakly(scaler)
            result = self.recorder.scaled(argument, run)
            # a number, to learn the scale
            self.scalers.knows_scale |= isinstance(result, torch.Tensor) and not result.requires_grad
            return result
        if method == "update":
            self.scalers.updates += 1
        inside = self._here.scaler is not None  # a step unscales by itself
        try:
            return self._called(scaler, method, argument, run)
        except Exception as error:
            if not inside and raised_by_scaler(error):
                self._listener.refused(method, argument if hasattr(argument, "param_groups") else None, error)
            raise

    def _called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        if method == "unscale_":
            self._listener.unscaling(argument)
            self.recorder.unscaling(argument)
            again = hasattr(argument, "param_groups") and self.recorder.used.are_used(argument)
            with self.recorder.pausing():
                result = run()
            self.recorder.unscaled(argument)
            if again:
                self.recorder.used.unscaled(argument)
            if self._here.scaler is None and hasattr(argument, "param_groups"):  # a step unscales by itself
                known = self._known_as(self._innermost(argument))
                known.unscaled = self.recorder.used.runs, _weakly(scaler)
                self.recorder.reads.listen()
            return result
        if method != "step":
            return run()
        here = self._here
        here.scaler, here.made = scaler, False
        self.recorder.reads.rest()
        try:
            with self.recorder.pausing():
                result = run()
        finally:
            here.scaler = None
        if not here.made and hasattr(argument, "param_groups"):
            with self._telling:
                if self._steps_again(self._innermost(argument)):
                    return result
                attempt, losses = self._attempt_of(self._innermost(argument), scaler)
                self._listener.held_back(attempt, losses)
                self._ended(attempt, skipped=True)
        return result

    # -- optimizers --------------------------------------------------------------------------------------------------

    @harmless
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_not_ours():
            return None
        here = self._here
        here.made, here.passed = True, None
        if self._innermost(optimizer) is not optimizer:
            here.passed = optimizer
            return None
        if (
            here.attempt is not None
            and here.attempt.optimizer is not optimizer
            and _share(here.attempt.optimizer, optimizer)
        ):
            return None  # a part of a step that is judged already
        scaler = here.scaler
        closure = next((value for value in (*args, *kwargs.values()) if callable(value)), None)
        if closure is None:
            self._judge(optimizer, scaler)
            return None

        def judged(*inner: Any, **named: Any) -> Any:
            result = closure(*inner, **named)
            self._judge(optimizer, scaler, inside=1)
            return result

        return (
            tuple(judged if value is closure else value for value in args),
            {key: judged if value is closure else value for key, value in kwargs.items()},
        )

    @harmless
    def _judge(self, optimizer: Any, scaler: Any, *, inside: int = 0) -> None:
        self.recorder.rest()
        with self._telling:
            if self._steps_again(optimizer, inside=inside):
                self._here.again = optimizer
                return
            attempt, losses = self._attempt_of(optimizer, scaler)
            self._here.attempt = attempt
            if _holds_back(optimizer):
                self._listener.held_back(attempt, losses)
            else:
                self._listener.about_to_step(attempt, losses)

    @harmless
    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._is_not_ours():
            return
        attempt, passed = self._here.attempt, self._here.passed
        if self._here.again is optimizer:
            self._here.again = None
            self.recorder.used.used(optimizer)
            self.recorder.updated(optimizer)
        if passed is optimizer:
            self._by_themselves[id(optimizer)] = optimizer
        if attempt is not None and attempt.optimizer is optimizer:
            self._here.attempt = None
            with self._telling:
                self._ended(attempt, skipped=_holds_back(optimizer))

    def _ended(self, attempt: Attempt, *, skipped: bool | None) -> None:
        known = self._optimizers[id(attempt.optimizer)]
        first = known.attempts == 0
        known.attempts += 1
        known.last = monotonic()
        known.scaled, known.held_back, known.unscaled = attempt.scaler is not None, bool(skipped), None
        self.recorder.used.used(attempt.optimizer)
        self._listener.attempted(attempt, skipped=skipped)
        self.recorder.updated(attempt.optimizer)
        try:
            self._find_models(attempt, first=first)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.recorder.fail(error)

    def _steps_again(self, optimizer: Any, *, inside: int = 0) -> bool:
        """Whether an optimizer is about to use gradients once more; if so, and it is no part of a step, that is told.

        `inside` is how many of its calls are running: 1 where a closure is asked.
        """
        known = self._optimizers.get(id(optimizer))
        if known is None or known.there() is not optimizer or not self.recorder.used.are_used(optimizer):
            return False
        if not inside_own_step(optimizer, known=inside):
            self._listener.stepping_again(
                Again(
                    step=known.attempts - 1,
                    name=known.name,
                    scaled=known.scaled,
                    held_back=known.held_back,
                    line=own_line(),
                )
            )
        return True

    def _find_models(self, attempt: Attempt, *, first: bool) -> None:
        models = self.recorder.models
        if first and not models.is_root_of(_trained(attempt.optimizer)):
            models.miss(_trained(attempt.optimizer))
            models.search()  # its models were not seen yet: the next step shows them
        elif models.searching and (not first or models.roots):
            models.settle()

    def _innermost(self, optimizer: Any) -> Any:
        """The optimizer of torch's that a wrapper of one, or of another wrapper, steps: the attempts are its own."""
        seen: list[Any] = []
        # to ask an object for its `__dict__` makes one: the collector then frees what is in it in another order
        while not type(optimizer).__module__.startswith("torch.optim.") and id(optimizer) not in self._by_themselves:
            seen.append(optimizer)
            held = getattr(optimizer, "__dict__", {}).values()
            inner = (
                one
                for one in held
                if isinstance(one, torch.optim.Optimizer) and all(one is not other for other in seen)
            )
            found = next((one for one in inner if _share(optimizer, one)), None)
            if found is None:
                break
            optimizer = found
        return optimizer

    def _attempt_of(self, optimizer: Any, scaler: Any) -> tuple[Attempt, list[torch.Tensor]]:
        """What is about to happen, and the losses that it comes of, as far as they are known."""
        known, recorded = self._known_as(optimizer), self.recorder.trains()
        attempt = Attempt(
            step=known.attempts,
            optimizer=optimizer,
            name=known.name,
            scaler=scaler,
            micro_steps=self.recorder.micro_steps(optimizer),
            seconds=None if known.last is None else monotonic() - known.last,
            unscaled_by=None if scaler is not None else self._unscaled_by(known),
        )
        return attempt, self.recorder.losses(optimizer) if recorded else []

    def _unscaled_by(self, known: _Known) -> Any:
        """Whoever has unscaled the gradients that an optimizer holds, at the loop's own call; None for nobody."""
        return None if known.unscaled is None or known.unscaled[0] != self.recorder.used.runs else known.unscaled[1]()

    def _known_as(self, optimizer: Any) -> _Known:
        known = self._optimizers.get(id(optimizer))
        if known is None or known.there() is not optimizer:
            there = weakref.ref(optimizer)
            trained = {id(p): weakref.ref(p) for group in optimizer.param_groups for p in group["params"]}
            known = self._followed_by(trained)
            if known is None:
                name = f"optimizer{self._names + 1}" if self._names else "optimizer"
                self._names += 1
                known = _Known(there, trained, name)
            known.there, known.trained = there, trained
            self._optimizers[id(optimizer)] = known
        return known

    def _followed_by(self, trained: dict[int, weakref.ref[torch.Tensor]]) -> _Known | None:
        """Who has trained these parameters before: a loop that unfreezes a layer makes a new optimizer, and goes on.

        Two that take turns over the same parameters are both met in the first turn.
        """
        for known in self._optimizers.values():
            shared = (there for key, there in known.trained.items() if key in trained)
            if known.attempts > 1 and any((p := there()) is not None and trained[id(p)]() is p for there in shared):
                return known
        return None

    def failed(self, error: Exception) -> None:
        """As in `MayFail`."""
        self.broken = True
        self._over()
        self._listener.failed(error)

    def _is_not_ours(self) -> bool:
        """What runs is our own look, a forked child of the loop's, or on tensors without values."""
        return self.broken or self._busy or os.getpid() != self._process or under_fake_tensors()


class _OfThread(threading.local):
    """What runs on this thread.

    Attributes:
        scaler: The scaler whose step runs.
        made: The optimizer was called in it.
        attempt: The update that is about to be made.
        passed: A wrapper whose step runs, as long as that of what it holds does not.
        again: An optimizer that is stepping once more on the gradients of its last update.
        saving: A scaler's state is being taken.
    """

    def __init__(self) -> None:
        self.scaler: Any = None
        self.made = False
        self.attempt: Attempt | None = None
        self.passed: Any = None
        self.again: Any = None
        self.saving = False


def _share(here: Any, there: Any) -> bool:
    """Whether two optimizers have a parameter in common; what only looks like one may have no groups yet."""
    groups = [getattr(one, "param_groups", ()) for one in (here, there)]
    mine, other = ({id(p) for group in one for p in group["params"]} for one in groups)
    return not mine.isdisjoint(other)


def _holds_back(optimizer: Any) -> bool | None:
    """Whether a fused optimizer, which a scaler calls either way, will skip by itself; None where a device knows."""
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, torch.Tensor):
        return False
    if found.device.type != "cpu":
        return None
    with unseen():
        return bool(found)


def _variable_of(optimizer: Any) -> str | None:
    for frame in user_frames():
        for variables in (frame.f_globals, frame.f_locals):
            for variable, value in variables.items():
                if value is optimizer:
                    return variable
    return None


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is not None]
