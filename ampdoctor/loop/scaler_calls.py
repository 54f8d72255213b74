"""The calls of torch's GradScaler, told as they are made, without looking at a value.

`scaler_events` asks each scaler for its scale, which waits for a GPU; a loop that only is watched must not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch

from ampdoctor.loop.hooks.scaler_classes import wrapped_in_each_class
from ampdoctor.loop.torch_internals import replaced

_METHODS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict")


class ScalerListener(Protocol):
    """Told of the calls on enabled scalers."""

    def scaler_called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        """Make the call by `run()` and return what it returned.

        Args:
            scaler: The scaler.
            method: "scale", "unscale_", "step", "update", "get_scale" or "state_dict".
            argument: The first argument: what is scaled, the optimizer, the new scale or None.
            run: Makes the call.
        """


@contextmanager
def told_of_scalers(listener: ScalerListener, *others: Any) -> Iterator[None]:
    """Inside, each call on an enabled `torch.amp.GradScaler`, or on one of a subclass, is told once.

    Args:
        listener: Told of the calls.
        others: Scalers of other classes that have its methods; torch's own may be among them.
    """
    running: list[tuple[int, int, str]] = []
    told: ScalerListener | None = listener

    def wrapped(original: Callable[..., Any], method: str) -> Callable[..., Any]:
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            key = (threading.get_ident(), id(scaler), method)
            hears = told
            if hears is None or key in running or not _is_enabled(scaler):
                return original(scaler, *args, **kwargs)
            argument = args[0] if args else next(iter(kwargs.values()), None)
            running.append(key)
            try:
                return hears.scaler_called(scaler, method, argument, lambda: original(scaler, *args, **kwargs))
            finally:
                running.remove(key)

        call.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return call

    with ExitStack() as stack:
        stack.enter_context(wrapped_in_each_class(_METHODS, wrapped))
        for scaler in others:
            if not isinstance(scaler, torch.amp.GradScaler):
                for method in filter(partial(hasattr, scaler), _METHODS):
                    call = wrapped(_unbound(getattr(scaler, method)), method)
                    try:
                        stack.enter_context(replaced(scaler, method, MethodType(call, scaler)))
                    except AttributeError:  # it has slots, and its class is told of
                        original = getattr(type(scaler), method)
                        stack.enter_context(replaced(type(scaler), method, wrapped(original, method)))
        try:
            yield
        finally:
            told = None


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(_scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _is_enabled(scaler: Any) -> bool:
    asked = getattr(scaler, "is_enabled", None)
    return asked is None or bool(asked())
