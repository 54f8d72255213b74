"""The calls of torch's GradScaler, told as they are made, without looking at a value.

`scaler_events` asks each scaler for its scale, which waits for a GPU; a loop that only is watched must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from ampdoctor.loop.torch_internals import replaced

_METHODS = ("scale", "unscale_", "step", "update")


class ScalerListener(Protocol):
    """Told of the calls on enabled scalers."""

    def scaler_called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        """Make the call by `run()` and return what it returned.

        Args:
            scaler: The scaler.
            method: "scale", "unscale_", "step" or "update".
            argument: The first argument: what is scaled, the optimizer, the new scale or None.
            run: Makes the call.
        """


@contextmanager
def told_of_scalers(listener: ScalerListener) -> Iterator[None]:
    """Inside, each call on an enabled `torch.amp.GradScaler`, or a subclass that calls on, is told once."""
    running: list[tuple[int, str]] = []

    def wrapped(method: str) -> Callable[..., Any]:
        original = getattr(torch.amp.GradScaler, method)

        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            key = (id(scaler), method)
            if key in running or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            argument = args[0] if args else next(iter(kwargs.values()), None)
            running.append(key)
            try:
                return listener.scaler_called(scaler, method, argument, lambda: original(scaler, *args, **kwargs))
            finally:
                running.remove(key)

        call.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return call

    with ExitStack() as stack:
        for method in _METHODS:
            stack.enter_context(replaced(torch.amp.GradScaler, method, wrapped(method)))
        yield
