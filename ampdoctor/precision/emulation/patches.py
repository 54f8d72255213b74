"""Attributes of modules and classes replaced for a while."""

from __future__ import annotations

from typing import Any, Final

_ABSENT: Final = object()


class Patches:
    """Replaced attributes; `undo()` brings each back, in reverse order."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; one that was inherited, not the owner's own, is inherited again afterwards."""
        self._done.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Bring everything back; a second call does nothing."""
        while self._done:
            owner, name, before = self._done.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
