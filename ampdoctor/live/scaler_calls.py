"""The GradScalers of a loop that is somebody else's: seen at their own methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from ampdoctor.loop.phases import Phases

_METHODS = ("scale", "unscale_", "step", "update")


class ScalerWatch(Protocol):
    """Told what enabled scalers do."""

    def scaled(self, scale: float) -> None:
        """A loss was scaled."""
        ...

    def stepping(self, optimizer: Any, scale: float) -> Callable[[], None]:
        """A step is asked for; what is returned is called when the scaler has made or skipped it."""
        ...


@contextmanager
def watched_scalers(watch: ScalerWatch, phases: Phases, other: Any = None) -> Iterator[None]:
    """Wrap the methods of torch's GradScaler while the context lives.

    Args:
        watch: Told of them.
        phases: Says "scaler" while one of them runs.
        other: A scaler with methods of its own, which is wrapped as well.
    """
    calls = _Calls(watch, phases)
    with ExitStack() as stack:
        for method in _METHODS:
            original = getattr(torch.amp.GradScaler, method)
            _replace(stack, torch.amp.GradScaler, method, _of_class(calls, method, original))
            if other is not None and getattr(type(other), method, None) is not original:
                bound = getattr(other, method)
                wrapped = _of_one(calls, method, other, bound)
                setattr(other, method, wrapped)
                stack.callback(other.__dict__.pop, method, None)
        yield


def _replace(stack: ExitStack, owner: Any, method: str, wrapped: Callable[..., Any]) -> None:
    original = getattr(owner, method)
    setattr(owner, method, wrapped)
    stack.callback(setattr, owner, method, original)


def _of_class(calls: _Calls, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.call(scaler, method, original.__get__(scaler), args, kwargs)

    return wrapped


def _of_one(calls: _Calls, method: str, scaler: Any, bound: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return calls.call(scaler, method, bound, args, kwargs)

    return wrapped


class _Calls:
    """Each call of a scaler's method once, however many wrappers it goes through."""

    def __init__(self, watch: ScalerWatch, phases: Phases) -> None:
        self._watch = watch
        self._phases = phases
        self._running: list[tuple[int, str]] = []

    def call(
        self, scaler: Any, method: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if (id(scaler), method) in self._running or not scaler.is_enabled():
            return original(*args, **kwargs)
        done = None
        if method == "step":
            optimizer = args[0] if args else kwargs.get("optimizer")
            done = self._watch.stepping(optimizer, float(scaler.get_scale()))
        depth = self._phases.enter("scaler")
        self._running.append((id(scaler), method))
        try:
            result = original(*args, **kwargs)
        finally:
            self._running.remove((id(scaler), method))
            self._phases.leave(depth)
        if method == "scale":
            self._watch.scaled(float(scaler.get_scale()))
        if done is not None:
            done()
        return result
