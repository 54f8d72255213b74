"""What is called from inside somebody's loop, and raises nothing into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class MayFail(Protocol):
    """Something that watches.

    Attributes:
        broken: Whether it has failed, and watches no more.
    """

    broken: bool

    def failed(self, error: Exception) -> None:
        """It has failed: `broken` is true from now on."""


P = ParamSpec("P")
W = TypeVar("W", bound=MayFail)


def harmless(method: Callable[Concatenate[W, P], Any]) -> Callable[Concatenate[W, P], Any]:
    """What fails inside is ours: it is told once, and the loop goes on unwatched. A broken one does nothing."""

    @functools.wraps(method)
    def guarded(self: W, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.failed(error)
            return None

    return guarded  # type: ignore[return-value]  # a method stays one
