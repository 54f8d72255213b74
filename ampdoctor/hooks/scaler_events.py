"""The calls of a step on its scaler and its optimizers, observed in their methods, never in the step's source text."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from ampdoctor.evidence.location import Source
from ampdoctor.evidence.trace import StepEvent
from ampdoctor.hooks.backwards import PLAIN, Backwards, inside_own_step
from ampdoctor.hooks.callbacks import NumberReads, is_enabled, on_scaler_call

# -- the running part of a step --

Part = Literal["optimizer", "scaler"]


_METHODS = ("scale", "unscale_", "step", "update")


class StepEvents:
    """Records a step's calls on scalers and `optimizers`, and which part runs; `scaler` is the run's own, or None."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: Any = None,
        called: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._tell = called
        self._watching = False
        self._parts: list[Part | None] = []  # that run, nested; None for the user's own code
        self._last: Any = None  # the scaler that last scaled a loss, in any step
        self.backwards = Backwards(parameters, on_kept_graph=self._on_kept_graph)
        self.called_at: Callable[[], Source | None] = lambda: None  # the line of the running call
        self._reads = NumberReads()
        self.clear()

    def clear(self) -> None:
        """Forgets the last step."""
        self.events: list[StepEvent] = []
        self._reads.rest()
        self._parts.clear()
        self.backwards.clear()
        self._unscaled: dict[str, Any] = {}  # by optimizer: the scaler that unscaled
        self._asked_for: dict[str, int] = {}  # by optimizer: the engine's runs before the loop's own `unscale_`
        self._scaled_by: Any = None
        self._stepping: Any = None  # the scaler whose `step` was called last
        self._running: list[tuple[int, str]] = []
        self._held_back: set[str] = set()  # optimizers whose last update was skipped by their scaler
        self.refused: str | None = None  # the scaler's method in which torch raised: it was called out of turn

    @property
    def part(self) -> Part | None:
        """The running part: "optimizer" in an optimizer's step, "scaler" in a scaler's method, else None."""
        return self._parts[-1] if self._parts else None

    @property
    def enabled(self) -> bool:
        """Whether the run has a scaler of its own that is enabled."""
        return self._own is not None and is_enabled(self._own)

    def scale(self) -> float | None:
        """Returns the run's own loss scale now; None where no scaler is enabled. Synchronises on CUDA."""
        return self._scale_of(self._own)

    @property
    def _own(self) -> Any:
        return self._last if self._scaler is None else self._scaler

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks optimizers and wraps the scalers' methods inside, once even if nested."""
        if self._watching:
            yield
            return
        with ExitStack() as stack:
            self._watching = True
            stack.callback(setattr, self, "_watching", False)
            stack.callback(self._reads.rest)
            stack.enter_context(self.backwards.watched())
            for name, optimizer in self._optimizers.items():
                before = partial(self._before_step, name)  # a wrapper may share the hooks of its optimizer
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(on_scaler_call(self._called, self._scaler, methods=_METHODS, disabled=True))
            yield

    def _before_step(self, name: str, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments of an optimizer's step with closures wrapped, which count as user code."""
        self._parts.append("optimizer")
        self._reads.rest()
        # a fused optimizer unscales and skips by itself: the scaler always calls it, and sets `found_inf`
        if not bool(getattr(optimizer, "found_inf", False)):
            anew = any(map(callable, (*args, *kwargs.values())))  # a closure computes the gradients anew
            self._note(self._of_step(optimizer, name, anew=anew))
        outside = self._outside
        return tuple(map(outside, args)), {key: outside(value) for key, value in kwargs.items()}

    def _outside(self, argument: Any) -> Any:
        """Wraps an optimizer's closure (LBFGS, SAM): its forward and backward are not part of the optimizer."""
        if not callable(argument) or isinstance(argument, torch.optim.Optimizer):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._parts)
            self._parts.append(None)
            try:
                return argument(*args, **kwargs)
            finally:
                del self._parts[depth:]

        return closure

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self.part == "optimizer":
            self._parts.pop()
        self.backwards.used.used(optimizer)

    def _of_step(self, optimizer: Any, name: str, *, anew: bool) -> StepEvent:
        inside = getattr(optimizer, "grad_scale", None) is not None
        scaler = self._stepping if inside else self._scaled_by
        scale = self._scale_of(scaler if scaler is not None else self._own)
        late = name in self._unscaled and not inside
        asked = any(method == "step" for _, method in self._running)  # the optimizer may unscale by itself
        taken_in = scale if inside and scale is not None else PLAIN
        used = self.backwards.used
        again = not anew and used.are_used(optimizer) and not inside_own_step(optimizer)
        unasked = not (asked or anew or again or self._reads.any)
        past = unasked and scale is not None and self._asked_for.get(name) == used.runs
        return StepEvent(
            kind="optimizer_step",
            optimizer=name,
            scale=scale,
            edited=self.backwards.edited(optimizer),
            unscaled=inside or self._scaled_by is None or name in self._unscaled,
            misscaled=self.backwards.misscaled(optimizer, taken_in) if late or inside else 0,
            scales=self.backwards.scales(optimizer),
            casts_kept=torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
            again=again,
            held_back=again and name in self._held_back,
            past_scaler=past,
            source=self.called_at(),
        )

    def _called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        optimizer = argument if method in ("unscale_", "step") else None
        self._tell(scaler)
        made = len(self.events)
        used = method == "unscale_" and optimizer is not None and self.backwards.used.are_used(optimizer)
        if method != "scale" and is_enabled(scaler):
            self._record(scaler, method, optimizer)
        twice = method == "scale" and self.backwards.scaled_twice(argument)
        result = self._call(scaler, method, optimizer, run)
        if used:
            self.backwards.used.unscaled(optimizer)
        if method == "step" and hasattr(optimizer, "param_groups"):
            name = self._name_of(optimizer)
            if any(event.kind == "optimizer_step" and event.optimizer == name for event in self.events[made:]):
                self._held_back.discard(name)
            else:  # the scaler has skipped the step
                self._held_back.add(name)
                self.backwards.used.used(optimizer)
        if method == "scale" and is_enabled(scaler):  # checked after the call: a replay in fp32 disables it inside
            self._scaled_by = self._last = scaler
            self._note(StepEvent(kind="scale", twice=self._scale_of(scaler) if twice else None))
            self.backwards.watch_scaled(result, self._scale_of(scaler) or PLAIN)
        return result

    def _call(self, scaler: Any, method: str, optimizer: Any, original: Callable[[], Any]) -> Any:
        self._reads.rest()
        depth = len(self._parts)
        self._parts.append("scaler")
        self._running.append((id(scaler), method))
        try:
            return original()
        except Exception as error:
            self.refused = method if raised_by_scaler(error) else None
            raise
        finally:
            self._running.remove((id(scaler), method))
            del self._parts[depth:]  # also those inside, after an exception
            if method == "unscale_" and optimizer is not None:
                self.backwards.unscaled(optimizer)  # unscaling writes to the gradients, and is no edit by the loop
                if is_enabled(scaler) and not self._running:  # a step unscales by itself
                    self._asked_for[self._name_of(optimizer)] = self.backwards.used.runs
                    self._reads.listen()

    def _record(self, scaler: Any, method: str, optimizer: Any) -> StepEvent:
        scale = self._scale_of(scaler)
        if method == "update":
            self._unscaled = {name: other for name, other in self._unscaled.items() if other is not scaler}
            return self._note(StepEvent(kind="update", scale=scale))
        name = self._name_of(optimizer)
        if method == "step":
            self._stepping = scaler
            return self._note(StepEvent(kind="step", optimizer=name, scale=scale))
        event = StepEvent(kind="unscale", optimizer=name, scale=scale)
        if optimizer is not None:
            event = replace(
                event,
                edited=self.backwards.edited(optimizer),
                misscaled=self.backwards.misscaled(optimizer, scale or PLAIN),
                scales=self.backwards.scales(optimizer),
                clipped=self.backwards.clipped(optimizer),
            )
        self._unscaled[name] = scaler
        return self._note(event)

    def _note(self, event: StepEvent) -> StepEvent:
        self.events.append(event)
        return event

    def _name_of(self, optimizer: Any) -> str:
        return next((name for name, known in self._optimizers.items() if known is optimizer), "")

    def _on_kept_graph(self) -> None:
        self._note(StepEvent(kind="grad", scale=self._scale_of(self._scaled_by)))

    def _scale_of(self, scaler: Any) -> float | None:
        if scaler is None or not is_enabled(scaler):
            return None
        return float(scaler.get_scale())


def raised_by_scaler(error: BaseException) -> bool:
    """Returns whether a line of torch's scaler modules itself raised this, and not a function that they called."""
    frames = traceback.extract_tb(error.__traceback__)
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")  # FSDP's, if the program has imported it
    return bool(frames) and frames[-1].filename in (torch.amp.grad_scaler.__file__, getattr(sharded, "__file__", None))
