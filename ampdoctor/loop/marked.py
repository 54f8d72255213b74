"""`ampdoctor.steps`: says in a script which of its loops is the training loop. No torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Told = Callable[[FrameType], None]
_listening: list[_Told] = []


def steps(iterable: Iterable[Any] | None = None) -> Iterable[Any]:
    """Mark the loop `for batch in ampdoctor.steps(loader):` as the one whose body is a training step.

    Where ampdoctor runs the script, that loop is the one that is replayed; in a training of your own this is nothing but
    the iterable.

    Args:
        iterable: What the loop runs over; None for a loop without an end, over 0, 1, 2 ...

    Returns:
        The iterable itself.
    """
    for told in _listening:
        told(sys._getframe(1))  # noqa: SLF001 the caller's line says which loop it is
    return itertools.count() if iterable is None else iterable


@contextmanager
def told_of_marks(tell: _Told) -> Iterator[None]:
    """Call `tell` with the frame of each mark that is come to inside."""
    _listening.append(tell)
    try:
        yield
    finally:
        _listening.remove(tell)
