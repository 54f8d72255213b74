"""Who holds what at which value: changes that are taken back in any order leave what was there before the first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from contextlib import ExitStack


@dataclass(slots=True, eq=False)
class _Hold:
    """One change of one place.

    Attributes:
        before: What the place goes back to: the value of the hold beneath, or what was found.
        value: What this one wants.
        rank: It is in force over those of a lower rank, and over earlier ones of its own.
    """

    before: Any
    value: Any
    rank: int


_HOLDS = WeakIdKeyDictionary()
"""Object -> key -> its holds, the one in force last. They live as long as the object: a change whose handle was dropped
is there for good, and others may come and go above and beneath it."""


def holds(owner: object, key: Hashable) -> tuple[_Hold, ...]:
    """The holds of a place, the one in force last."""
    return tuple(_HOLDS.get(owner, {}).get(key, ()))


def original(owner: object, key: Hashable, now: Any) -> Any:
    """What a place goes back to when all holds are released; `now`, its present value, where it has none."""
    return next((hold.before for hold in holds(owner, key)), now)


def put(
    undo: ExitStack,
    owner: object,
    key: Hashable,
    value: Any,
    *,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    rank: int = 0,
) -> None:
    """Hold a place at a value until `undo` is closed.

    Args:
        undo: Takes what releases it.
        owner: The object that is changed; it is not kept alive.
        key: Which of its values.
        value: The value; neither it nor what is found may refer to the owner.
        read: Reads the place.
        write: Writes it.
        rank: See `_Hold`.
    """
    stack = _HOLDS.setdefault(owner, {}).setdefault(key, [])
    at = sum(hold.rank <= rank for hold in stack)
    above = stack[at] if at < len(stack) else None
    hold = _Hold(before=read() if above is None else above.before, value=value, rank=rank)
    if above is None:
        write(value)
    else:
        above.before = value
    stack.insert(at, hold)
    undo.callback(partial(_release, stack, hold, write))


def _release(stack: list[_Hold], hold: _Hold, write: Callable[[Any], None]) -> None:
    at = stack.index(hold)
    del stack[at]
    if at < len(stack):
        stack[at].before = hold.before
    else:
        write(hold.before)
