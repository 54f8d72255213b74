"""The methods of torch's GradScaler and of its subclasses, those included that do not call on: FSDP's, a user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ampdoctor.loop.torch_internals import replaced

Wraps = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Given a function of a class, which takes the scaler first, and its name; returns what stands in its place."""


@contextmanager
def wrapped_in_each_class(methods: Iterable[str], wraps: Wraps) -> Iterator[None]:
    """Inside, these methods are wrapped in GradScaler and in each subclass that has its own.

    A class that is made later is seen when the first of its scalers is made. A method that calls its class's before it
    runs both wrappers.

    Args:
        methods: Their names.
        wraps: Makes the wrapper of one.
    """
    names, base = tuple(methods), torch.amp.GradScaler
    seen: set[type] = set()
    making: Any = base.__init__
    with ExitStack() as stack:
        watching = [True]
        stack.callback(watching.clear)

        def wrap(kind: type) -> None:
            for owner in kind.__mro__:
                if owner in seen or not issubclass(owner, base):
                    continue
                seen.add(owner)
                for name in names:
                    if owner is base or name in vars(owner):
                        stack.enter_context(replaced(owner, name, wraps(getattr(owner, name), name)))

        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if watching:
                wrap(type(scaler))
            making(scaler, *args, **kwargs)

        init.__wrapped__ = making  # type: ignore[attr-defined]  # functions take attributes
        stack.enter_context(replaced(base, "__init__", init))
        for kind in (base, *_below(base)):
            wrap(kind)
        yield


def _below(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)
