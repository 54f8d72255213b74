"""The line of the user's that was recorded for what runs now, where a recorded step is run again without its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
