"""`LoopWatch`: watches a training loop, records each step, and reports a step whose numbers are not finite."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic  # bound here, because a script may patch it
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampdoctor.hooks.backwards import inside_own_step, parameters_of
from ampdoctor.hooks.callbacks import on_scaler_call
from ampdoctor.hooks.interfaces import harmless_until
from ampdoctor.hooks.process_state import RandomState, refused
from ampdoctor.hooks.program import Program
from ampdoctor.hooks.scaler_events import raised_by_scaler
from ampdoctor.hooks.torch_internals import under_fake_tensors, unseen
from ampdoctor.live.recording.programs import KeptUpdate
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.probes.user_code import user_frames

harmless = harmless_until("broken", "failed")
"""For methods of a watcher: `failed` handles its first error and sets `broken`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAttempt:
    """An update that is about to be made, or that a scaler has held back."""

    step: int  # counts this optimizer's updates, from 0
    optimizer: torch.optim.Optimizer
    name: str  # "optimizer", then "optimizer2" and so on
    scaler: Any  # the scaler that steps it, or None
    micro_steps: int  # backwards since its last update
    seconds: float | None  # since its last update; None for the first
    unscaled_by: Any = None  # the scaler that unscaled its gradients, where no scaler steps it

    @property
    def is_called_either_way(self) -> bool:
        """Whether the scaler calls the optimizer even after an overflow: a fused optimizer skips on its device."""
        return self.scaler is not None and getattr(self.optimizer, "grad_scale", None) is not None


@dataclass(slots=True)
class _Known:
    """The record of an optimizer, and of the optimizer that it has replaced."""

    there: weakref.ref[Any]
    trained: dict[int, weakref.ref[torch.Tensor]]  # its parameters, by id
    name: str
    attempts: int = 0  # its updates so far
    last: float | None = None  # when the last update ended
    scaled: bool = False  # a scaler made the last update, or skipped it
    held_back: bool = False  # the scaler skipped it
    # at the loop's own `unscale_`: how many times autograd's engine had run, and the scaler
    unscaled: tuple[int, Any] | None = None


@dataclass(slots=True)
class ScalerFacts:
    """The loop's calls on its scalers."""

    knows_scale: bool = False  # the loop has read a scale, so its own code may scale and unscale
    updates: int = 0  # calls of `update` so far
    last: Any = None  # the scaler that last scaled a loss


class _Call:
    """The loop's own call. It runs once, even if our code around it fails and calls it again."""

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
    """Watches the loops of this process while `watching` lasts, by hooks, and tells a `TrainingWatcher`."""

    def __init__(self, listener: Any) -> None:
        self.recorder = StepRecorder()
        self.scalers = ScalerFacts()
        self._listener = listener
        self._optimizers: dict[int, _Known] = {}
        self._names = 0
        self._here = _OfThread()
        # by id: wrappers that do not call the step of the optimizer inside
        self._by_themselves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._telling = threading.RLock()  # one thread at a time calls the listener
        self._busy = self.broken = False
        self._process = os.getpid()

    @contextmanager
    def watching(self, *scalers: Any) -> Iterator[None]:
        """Installs the hooks, and removes them on any exit; the known `scalers` need not be torch's."""
        with ExitStack() as stack:
            stack.enter_context(self.recorder.watching())
            stack.enter_context(on_scaler_call(self.scaler_called, *scalers))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(self._over)
            yield

    def _over(self) -> None:
        """Stops all work: other code may have wrapped our hooks, and may call them later."""
        self._busy = self.recorder.away = True
        self._here = _OfThread()  # an update that has raised is in it
        self.scalers = ScalerFacts()
        for known in self._optimizers.values():
            known.unscaled = None

    def meet(self, model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Registers parts of the loop before the loop uses them."""
        if model is not None:
            self.recorder.models.meet(model)
        for optimizer in optimizers:
            self._known_as(optimizer)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Does not watch inside; a collective raises `CollectiveError`, and random states are restored afterwards."""
        busy, away = self._busy, self.recorder.away
        self._busy = self.recorder.away = True
        random = RandomState.capture()
        try:
            with self.recorder.pausing(), refused():
                yield
        finally:
            random.restore()
            self._busy, self.recorder.away = busy, away

    def program(self, attempt: UpdateAttempt) -> Program:
        """Returns the recorded step that an update is for."""
        return self.recorder.program(attempt.optimizer, name=attempt.name, scaler=attempt.scaler, step=attempt.step)

    def keepable(self, attempt: UpdateAttempt) -> KeptUpdate:
        """Returns the same step in a form that can be kept after the update."""
        return self.recorder.keepable(attempt.optimizer, name=attempt.name, scaler=attempt.scaler, step=attempt.step)

    def name_of(self, optimizer: Any) -> str:
        """Returns the optimizer's name in the log; "" for one that has made no update yet."""
        known = self._optimizers.get(id(optimizer))
        return known.name if known is not None and known.there() is optimizer else ""

    def whose(self, name: str) -> str | None:
        """Returns the loop's variable and the class of the optimizer of this name; None where it is the only one."""
        living = {known.name: there for known in self._optimizers.values() if (there := known.there()) is not None}
        if name not in living or len(living) == 1:
            return None
        kind, variable = type(living[name]).__name__, _variable_of(living[name])
        return f"{name} ({kind})" if variable in (None, name) else f"{variable} ({kind}, {name} in the log)"

    # -- scalers -----------------------------------------------------------------------------------------------------

    def scaler_called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        """As in `ScalerCall`."""
        if self._is_not_ours():
            return run()
        call = _Call(run)
        try:
            return self._observed(scaler, method, argument, call)
        except Exception as error:
            if call.raised:
                raise
            self.failed(error)
            return call()

    def _observed(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        if method in ("get_scale", "state_dict"):
            # `state_dict` calls `get_scale`: saving a checkpoint is no use of the scale in arithmetic
            self.scalers.knows_scale |= method == "get_scale" and not self._here.saving
            self._here.saving = method == "state_dict"
            try:
                return run()
            finally:
                self._here.saving = False
        if method == "scale":
            self.scalers.last = scaler
            result = self.recorder.scaled(argument, run)
            # the loop scales a plain number to get the scale
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
                known.unscaled = self.recorder.used.runs, scaler
                self.recorder.reads.listen()
            return result
        if method != "step":
            return run()
        here = self._here
        here.scaler, here.made = scaler, False
        self.recorder.stop_observing()
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
            return None  # part of a step that is judged already
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

    def _ended(self, attempt: UpdateAttempt, *, skipped: bool | None) -> None:
        known = self._optimizers[id(attempt.optimizer)]
        first = known.attempts == 0
        known.attempts += 1
        known.last = monotonic()
        known.scaled, known.held_back, known.unscaled = attempt.scaler is not None, bool(skipped), None
        self.recorder.used.used(attempt.optimizer)
        self._listener.attempted(attempt, skipped=skipped)
        self.recorder.updated(attempt.optimizer)
        try:
            models = self.recorder.models
            held = parameters_of(attempt.optimizer)
            searched = first and models.search_for(p for p in held if p.requires_grad and p.grad is not None)
            if not searched and models.searching and not models.always and (not first or models.roots):
                models.settle()
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.recorder.fail(error)

    def _steps_again(self, optimizer: Any, *, inside: int = 0) -> bool:
        """Whether an optimizer uses its gradients again; reports that. `inside`: its running calls (1 in a closure)."""
        known = self._optimizers.get(id(optimizer))
        if known is None or known.there() is not optimizer or not self.recorder.used.are_used(optimizer):
            return False
        if not inside_own_step(optimizer, known=inside):
            step = known.attempts - 1  # the number of its last update
            self._listener.stepping_again(step, known.name, scaled=known.scaled, held_back=known.held_back)
        return True

    def _innermost(self, optimizer: Any) -> Any:
        """Returns torch's optimizer inside one or more wrappers: the attempts are counted for it."""
        seen: list[Any] = []
        # reading `__dict__` creates it, and changes the order in which the garbage collector frees its contents
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

    def _attempt_of(self, optimizer: Any, scaler: Any) -> tuple[UpdateAttempt, list[torch.Tensor]]:
        """Returns the coming update, and the recorded losses that its gradients come from."""
        known, recorded = self._known_as(optimizer), self.recorder.trains()
        unscaled = known.unscaled or (-1, None)
        attempt = UpdateAttempt(
            step=known.attempts,
            optimizer=optimizer,
            name=known.name,
            scaler=scaler,
            micro_steps=self.recorder.micro_steps(optimizer),
            seconds=None if known.last is None else monotonic() - known.last,
            unscaled_by=unscaled[1] if scaler is None and unscaled[0] == self.recorder.used.runs else None,
        )
        return attempt, self.recorder.losses(optimizer) if recorded else []

    def _known_as(self, optimizer: Any) -> _Known:
        known = self._optimizers.get(id(optimizer))
        if known is None or known.there() is not optimizer:
            there = weakref.ref(optimizer)
            trained = {id(p): weakref.ref(p) for p in parameters_of(optimizer)}
            known = self._followed_by(trained)
            if known is None:
                name = f"optimizer{self._names + 1}" if self._names else "optimizer"
                self._names += 1
                known = _Known(there, trained, name)
            known.there, known.trained = there, trained
            self._optimizers[id(optimizer)] = known
        return known

    def _followed_by(self, trained: dict[int, weakref.ref[torch.Tensor]]) -> _Known | None:
        """Returns the record of an optimizer that this one replaces (it trained these parameters before), or None."""
        for known in self._optimizers.values():
            shared = (there for key, there in known.trained.items() if key in trained)
            if known.attempts > 1 and any((p := there()) is not None and trained[id(p)]() is p for there in shared):
                return known
        return None

    def failed(self, error: Exception) -> None:
        """Handles its own failure: it does nothing from now on."""
        self.broken = True
        self._over()
        self._listener.failed(error)

    def _is_not_ours(self) -> bool:
        """Whether this call is not the loop's: our own look, a forked child, or fake tensors without values."""
        return self.broken or self._busy or os.getpid() != self._process or under_fake_tensors()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.scaler: Any = None  # its `step` is running
        self.made = False  # the scaler's `step` has called the optimizer
        self.attempt: UpdateAttempt | None = None  # about to be made
        self.passed: Any = None  # a wrapper whose step runs, until the step of the optimizer inside it runs
        self.again: Any = None  # an optimizer that steps again on the gradients of its last update
        self.saving = False  # a scaler's `state_dict` is running


def _share(here: Any, there: Any) -> bool:
    """Whether two optimizers share a parameter; an object that only looks like an optimizer may have no groups yet."""
    groups = [getattr(one, "param_groups", ()) for one in (here, there)]
    mine, other = ({id(p) for group in one for p in group["params"]} for one in groups)
    return not mine.isdisjoint(other)


def _holds_back(optimizer: Any) -> bool | None:
    """Whether a fused optimizer, which the scaler calls either way, will skip; None where the flag is on a device."""
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
