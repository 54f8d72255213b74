"""What a step does to its scaler and its optimizers: seen from their own methods, never from the step's source text."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ampdoctor.evidence.of_runs.trace import StepEvent
from ampdoctor.loop.backwards import PLAIN, Backwards
from ampdoctor.loop.phases import Part, Phases
from ampdoctor.loop.scaler_state import ScalerSnapshot

if TYPE_CHECKING:
    from torch import nn

_SCALER_METHODS = ("scale", "unscale_", "step", "update")


@dataclass(frozen=True, slots=True)
class _Known:
    """A scaler's scale, as long as its tensor is not written to."""

    tensor: torch.Tensor  # kept, so that its id stays its own
    version: int
    scale: float


class StepEvents:
    """Records one step's calls and tells which part of the step is running.

    The run's own scaler is watched, and every other GradScaler that the step makes or holds itself.

    Args:
        model: Its parameters' gradients are watched for edits between backward and unscaling.
        optimizers: By name.
        scaler: A GradScaler, enabled or not.

    Attributes:
        other_scalers: The other GradScalers, as they were when a step first called them.
        backwards: What is known of the step's backwards.
        refused: The scaler's method that torch itself ended the step in, because it is not its turn; None else.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], scaler: Any) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._watching = False
        self._phases = Phases()
        self.other_scalers: WeakKeyDictionary[Any, ScalerSnapshot] = WeakKeyDictionary()
        self.backwards = Backwards(model, on_kept_graph=self._on_kept_graph)
        self.clear()

    def clear(self) -> None:
        """Forget the last step."""
        self.events: list[StepEvent] = []
        self._phases.clear()
        self.backwards.clear()
        self._unscaled: dict[str, Any] = {}  # by the scaler that did it
        self._scaled_by: Any = None
        self._stepping: Any = None  # the scaler whose `step` was called last
        self._scales: dict[int, _Known] = {}
        self._running: list[tuple[int, str]] = []
        self.refused: str | None = None

    @property
    def part(self) -> Part | None:
        """What is running: "optimizer" in an optimizer's step, "scaler" in a scaler's method, else None."""
        return self._phases.part

    @property
    def enabled(self) -> bool:
        """The run's own scaler is there and does not pass everything through."""
        return self._scaler is not None and _is_enabled(self._scaler)

    def scale(self) -> float | None:
        """The run's own loss scale now; None where no scaler is enabled. Synchronises on CUDA."""
        return _scale_of(self._scaler)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks and wrapped methods are in place inside, once however nested, and gone afterwards."""
        if self._watching:
            yield
            return
        with ExitStack() as stack:
            self._watching = True
            stack.callback(setattr, self, "_watching", False)
            stack.enter_context(self.backwards.watched())
            for name, optimizer in self._optimizers.items():
                stack.callback(optimizer.register_step_pre_hook(self._before_step(name)).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
            for method in _SCALER_METHODS:
                self._wrap_class(method, stack)
                if self._scaler is not None:
                    self._wrap_own(method, stack)  # it need not be torch's, and a subclass may have methods of its own
            yield

    def _before_step(self, name: str) -> Callable[..., Any]:
        def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._phases.enter("optimizer")
            note(optimizer)
            outside = self._phases.outside
            return tuple(map(outside, args)), {key: outside(value) for key, value in kwargs.items()}

        def note(optimizer: Any) -> None:
            # a fused optimizer unscales and skips by itself: the scaler calls it either way and says what it found
            if bool(getattr(optimizer, "found_inf", False)):
                return
            inside = getattr(optimizer, "grad_scale", None) is not None
            scaler = self._stepping if inside else self._scaled_by
            scale = self._scale_of(scaler if scaler is not None else self._scaler)
            late = name in self._unscaled and not inside
            self.events.append(
                StepEvent(
                    kind="optimizer_step",
                    optimizer=name,
                    scale=scale,
                    edited=self.backwards.edited(optimizer),
                    unscaled=inside or self._scaled_by is None or name in self._unscaled,
                    misscaled=self.backwards.misscaled(optimizer, scale if inside and scale is not None else PLAIN)
                    if late or inside
                    else 0,
                    scales=self.backwards.scales(optimizer),
                )
            )

        return before

    def _after_step(self, *_: Any) -> None:
        self._phases.leave_optimizer()

    def _wrap_own(self, method: str, stack: ExitStack) -> None:
        scaler = self._scaler
        original = getattr(scaler, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._called(scaler, method, original, args, kwargs)

        had = method in vars(scaler)
        setattr(scaler, method, wrapped)
        stack.callback(lambda: setattr(scaler, method, original) if had else delattr(scaler, method))

    def _wrap_class(self, method: str, stack: ExitStack) -> None:
        original = getattr(torch.amp.GradScaler, method)

        def wrapped(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            return self._called(scaler, method, original.__get__(scaler), args, kwargs)

        setattr(torch.amp.GradScaler, method, wrapped)
        stack.callback(setattr, torch.amp.GradScaler, method, original)

    def _called(
        self, scaler: Any, method: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A scaler's method, recorded once however many wrappers it has."""
        call = (id(scaler), method)
        if call in self._running:
            return original(*args, **kwargs)
        if scaler is not self._scaler and scaler not in self.other_scalers:
            self.other_scalers[scaler] = ScalerSnapshot.of(scaler)
        if method != "scale":
            self._record(scaler, method, args)
        depth = self._phases.enter("scaler")
        self._running.append(call)
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            self.refused = method if _raised_by_torch(error) else None
            raise
        finally:
            self._running.remove(call)
            self._phases.leave(depth)
            if method == "unscale_" and args:
                self.backwards.unscaled(args[0])  # unscaling is an edit of its own; what comes after it is not
        if method == "scale" and _is_enabled(scaler):  # asked afterwards: a replay in fp32 switches it off on the way
            self._scaled_by = scaler
            self.events.append(StepEvent(kind="scale"))
            self.backwards.watch_scaled(result, self._scale_of(scaler) or PLAIN)
        return result

    def _record(self, scaler: Any, method: str, args: tuple[Any, ...]) -> None:
        if not _is_enabled(scaler):
            return
        if method == "update":
            self.events.append(StepEvent(kind="update", scale=self._scale_of(scaler)))
            self._unscaled = {name: other for name, other in self._unscaled.items() if other is not scaler}
            return
        optimizer = args[0] if args else None
        name = self._names.get(id(optimizer), "")
        if method == "step":
            self._stepping = scaler
            self.events.append(StepEvent(kind="step", optimizer=name, scale=self._scale_of(scaler)))
            return
        event = StepEvent(kind="unscale", optimizer=name, scale=self._scale_of(scaler))
        if optimizer is not None:
            event = replace(
                event,
                edited=self.backwards.edited(optimizer),
                misscaled=self.backwards.misscaled(optimizer, event.scale or PLAIN),
                scales=self.backwards.scales(optimizer),
            )
        self.events.append(event)
        self._unscaled[name] = scaler

    def _on_kept_graph(self) -> None:
        self.events.append(StepEvent(kind="grad", scale=self._scale_of(self._scaled_by)))

    def _scale_of(self, scaler: Any) -> float | None:
        """As `_scale_of`, but asked for once as long as the scaler keeps its scale: asking synchronises on CUDA."""
        tensor = getattr(scaler, "_scale", None)
        if not isinstance(tensor, torch.Tensor) or not _is_enabled(scaler):
            return _scale_of(scaler)
        version = tensor._version  # noqa: SLF001 torch has no public way to ask
        known = self._scales.get(id(tensor))
        if known is None or known.version != version:
            known = self._scales[id(tensor)] = _Known(tensor, version, float(scaler.get_scale()))
        return known.scale


def _raised_by_torch(error: Exception) -> bool:
    """Raised by a line of GradScaler itself, not by something that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == torch.amp.grad_scaler.__file__


def _is_enabled(scaler: Any) -> bool:
    return bool(scaler.is_enabled())


def _scale_of(scaler: Any) -> float | None:
    return float(scaler.get_scale()) if scaler is not None and _is_enabled(scaler) else None
