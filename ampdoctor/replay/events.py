"""What a step does to its scaler and its optimizers: seen from their own methods, never from the step's source text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.trace import StepEvent

if TYPE_CHECKING:
    from torch import nn

_SCALER_METHODS = ("scale", "unscale_", "step", "update")


class StepEvents:
    """Records one step's calls and tells which part of the step is running.

    Args:
        model: Its parameters' gradients are watched for edits between backward and unscaling.
        optimizers: By name.
        scaler: A GradScaler, enabled or not.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], scaler: Any) -> None:
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._watching = False
        self.clear()

    def clear(self) -> None:
        """Forget the last step."""
        self.events: list[StepEvent] = []
        self.phases: list[str | None] = []
        self._versions: dict[int, int] = {}
        self._unscaled: set[str] = set()
        self._scaled = False

    @property
    def part(self) -> str | None:
        """What is running: "optimizer" in an optimizer's step, "scaler" in a scaler's method, else None."""
        return self.phases[-1] if self.phases else None

    @property
    def enabled(self) -> bool:
        """A scaler is there and does not pass everything through."""
        return bool(self._scaler is not None and self._scaler.is_enabled())

    def scale(self) -> float | None:
        """The loss scale now; None where no scaler is enabled. Synchronises on CUDA."""
        return float(self._scaler.get_scale()) if self.enabled else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks and wrapped methods are in place inside, once however nested, and gone afterwards."""
        if self._watching:
            yield
            return
        with ExitStack() as stack:
            self._watching = True
            stack.callback(setattr, self, "_watching", False)
            for parameter in self._model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                    stack.callback(handle.remove)
            for name, optimizer in self._optimizers.items():
                stack.callback(optimizer.register_step_pre_hook(self._before_step(name)).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
            if self._scaler is not None:
                for method in _SCALER_METHODS:
                    self._wrap(method, stack)
            yield

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._versions[id(parameter)] = parameter.grad._version

    def _note_versions(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._on_gradient(parameter)

    def _edited(self, optimizer: Any) -> int:
        return sum(
            parameter.grad is not None and parameter.grad._version != self._versions.get(id(parameter), -1)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._versions
        )

    def _before_step(self, name: str) -> Callable[..., Any]:
        def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.phases.append("optimizer")
            note(optimizer)
            return tuple(map(self._outside, args)), {key: self._outside(value) for key, value in kwargs.items()}

        def note(optimizer: Any) -> None:
            # a fused optimizer unscales and skips by itself: the scaler calls it either way and says what it found
            if bool(getattr(optimizer, "found_inf", False)):
                return
            inside = getattr(optimizer, "grad_scale", None) is not None
            unscaled = inside or not (self.enabled and self._scaled) or name in self._unscaled
            self.events.append(
                StepEvent(
                    kind="optimizer_step",
                    optimizer=name,
                    scale=self.scale(),
                    edited=self._edited(optimizer),
                    unscaled=unscaled,
                )
            )

        return before

    def _outside(self, argument: Any) -> Any:
        """A closure that an optimizer calls (LBFGS, SAM) is forward and backward, none of its own arithmetic."""
        if not callable(argument) or isinstance(argument, torch.optim.Optimizer):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            depth = len(self.phases)
            self.phases.append(None)
            try:
                return argument(*args, **kwargs)
            finally:
                del self.phases[depth:]

        return closure

    def _after_step(self, *_: Any) -> None:
        if self.phases and self.phases[-1] == "optimizer":
            self.phases.pop()

    def _wrap(self, method: str, stack: ExitStack) -> None:
        scaler = self._scaler
        original = getattr(scaler, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._record(method, args)
            self.phases.append("scaler")
            depth = len(self.phases)
            try:
                return original(*args, **kwargs)
            finally:
                del self.phases[depth - 1 :]
                if method == "unscale_" and args:
                    self._note_versions(args[0])  # unscaling is an edit of its own; what comes after it is not

        had = method in vars(scaler)
        setattr(scaler, method, wrapped)
        stack.callback(lambda: setattr(scaler, method, original) if had else delattr(scaler, method))

    def _record(self, method: str, args: tuple[Any, ...]) -> None:
        if not self.enabled:
            return
        if method == "scale":
            self._scaled = True
            self.events.append(StepEvent(kind="scale"))
        elif method == "update":
            self.events.append(StepEvent(kind="update", scale=self.scale()))
            self._unscaled.clear()
        else:
            optimizer = args[0] if args else None
            name = self._names.get(id(optimizer), "")
            kind = "unscale" if method == "unscale_" else "step"
            if kind == "unscale":
                edited = self._edited(optimizer) if optimizer is not None else 0
                self.events.append(StepEvent(kind="unscale", optimizer=name, scale=self.scale(), edited=edited))
                self._unscaled.add(name)
            else:
                self.events.append(StepEvent(kind="step", optimizer=name, scale=self.scale()))
