"""Several changes may hold one value: taken back in any order, they leave what was there before the first."""

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
    """One change of one value, for example of a parameter's dtype.

    Attributes:
        before: What the change covers: the value of the hold beneath it, or the original value.
        value: The value that it sets.
        rank: It is in force over holds of a lower rank, and over earlier ones of the same rank.
    """

    before: Any
    value: Any
    rank: int


_HOLDS = WeakIdKeyDictionary()
"""Object -> key -> its holds, the one in force last. They live as long as the object: a change without a handle stays
for good, and others may come and go above and beneath it."""


def holds(owner: object, key: Hashable) -> tuple[_Hold, ...]:
    """Returns the holds on one value of `owner`, the one in force last."""
    return tuple(_HOLDS.get(owner, {}).get(key, ()))


def original(owner: object, key: Hashable, now: Any) -> Any:
    """Returns the value before the first hold; `now`, the present value, if nothing holds it."""
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
    """Hold one value of `owner` at `value` until `undo` is closed.

    Args:
        undo: The stack that releases the hold when it is closed.
        owner: The object that is changed; it is not kept alive.
        key: Names the value within the owner.
        value: The new value; neither it nor the original one may refer to the owner.
        read: Reads the present value.
        write: Writes a value.
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
