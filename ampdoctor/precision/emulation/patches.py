"""Attributes of modules and classes replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


class Patches:
    """Replaced attributes; `undo()` brings each back, in reverse order."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; one that was inherited, not the owner's own, is inherited again afterwards."""
        before = vars(owner).get(name, _ABSENT)
        self.after(*((delattr, owner, name) if before is _ABSENT else (setattr, owner, name, before)))
        setattr(owner, name, value)

    def after(self, undo: Callable[..., None], *arguments: Any) -> None:
        """Have something else undone too."""
        self._done.append((undo, arguments))

    def undo(self) -> None:
        """Bring everything back; a second call does nothing."""
        while self._done:
            undo, arguments = self._done.pop()
            undo(*arguments)
