"""The line of the user's that was recorded for what runs now, where a recorded step is run again without its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_LINE: ContextVar[tuple[str, int] | None] = ContextVar("_LINE", default=None)


@contextmanager
def recorded_at(line: tuple[str, int] | None) -> Iterator[None]:
    """What runs inside and has no user's frame of its own was at this line (file, number) when it was recorded."""
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)


def recorded_line() -> tuple[str, int] | None:
    """The line; None where nothing recorded runs."""
    return _LINE.get()


def called_as_recorded(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function in the place of the line: what looks for the user's frame takes this one for it."""
    return function(*args, **kwargs)
