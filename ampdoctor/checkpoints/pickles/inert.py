"""What stands in a saved object for everything that is no plain value: records of what was asked for, never built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

_MAX_INT_KEY = 2**60
"""Larger ints as dict keys are kept apart: `hash` takes them modulo 2^61 - 1, so that a file could make all collide."""
_FEW = 64
"""Keys of a dict that may collide as they like."""
_MAX_PROBES = 300_000_000
"""Steps that all dicts of a pickle may take to find the slots of their keys; about two seconds."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names; it is not imported.

    Attributes:
        name: "module.qualified_name".
    """

    name: str


@dataclass(slots=True, eq=False)
class Inert:
    """An object that a pickle asks for and that is never built.

    Attributes:
        name: "module.qualified_name" of what would be called.
        args: Its arguments.
        state: What its `__setstate__` or `__dict__` would be given; None where there is nothing.
        items: What would be appended to it.
        pairs: What would be set in it, as (key, value).
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name[:80]}>"  # never of what it holds: a shared value at every level would be written 2^n times


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueKey:
    """A dict key that is no plain value: hashed by identity, because a nest of tuples takes 2^n steps to hash."""

    value: Any

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


@dataclass(frozen=True, slots=True)
class Entries:
    """What a call for a dict is given: the machine makes the dict, which is where keys are watched.

    Attributes:
        pairs: (key, value).
        count: How many, as far as is known.
    """

    pairs: Iterable[tuple[Any, Any]]
    count: int


class Builder(Protocol):
    """What is made of the calls that are understood; the seam keeps the machine free of torch."""

    def known(self, name: str) -> bool:
        """Whether a class or function of this name is what torch itself loads without running foreign code."""

    def build(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of a call, or `NotImplemented` where it is not understood; it never imports or calls `name`."""

    def persistent(self, pid: Any) -> Any:
        """The value behind a persistent id."""


@dataclass(slots=True)
class _Numbers:
    """The numeric keys of one dict.

    Attributes:
        low: The least of them.
        high: The greatest.
        scattered: Whether they are too far apart for each to have a slot of its own.
        calm_since: Size of the dict since which they are not.
    """

    low: float
    high: float
    scattered: bool = False
    calm_since: int = 0


class KeyWatch:
    """Sets keys so that a file cannot choose them to collide: numbers hash to themselves, and slots follow from that.

    Numbers from a range that is no longer than the dict's table never meet, whatever their order; that is what
    optimizers number their parameters with. For any others a dict of n entries is taken to need n steps for each, and
    when the sum passes what a checkpoint needs they are kept apart as `OpaqueKey`. Strings and bytes are safe: their
    hashes are salted for each process.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[dict[Any, Any], _Numbers]] = {}  # the dict itself is kept, so that ids stay true
        self._probes = 0

    def put(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """`target[key] = value`, under a key that a dict may hash."""
        if isinstance(key, str | bytes | bool | Inert | Global | OpaqueKey) or key is None:
            target[key] = value
        elif isinstance(key, int | float) and (len(target) < _FEW or self._may_hash(target, key)):
            target[key if isinstance(key, float) or -_MAX_INT_KEY < key < _MAX_INT_KEY else OpaqueKey(key)] = value
        else:
            target[OpaqueKey(key)] = value

    def _may_hash(self, target: dict[Any, Any], key: float) -> bool:
        kept = self._numbers.get(id(target))
        if kept is None:
            numbers = [k for k in target if isinstance(k, int | float)]
            kept = target, _Numbers(min(numbers, default=key), max(numbers, default=key))
            self._numbers[id(target)] = kept
        span = kept[1]
        span.low, span.high = min(span.low, key), max(span.high, key)
        # the table has at least 3/2 as many slots as the dict has entries
        spread = not (isinstance(key, int) and span.low >= 0 and span.high - span.low < 1.5 * len(target))
        if spread:
            span.scattered, span.calm_since = True, 0
        elif span.scattered:
            span.calm_since = span.calm_since or len(target)
            # a table grows to at most six times its entries, and is then laid out anew: by now it has been
            span.scattered = len(target) <= 6 * span.calm_since
        if span.scattered:
            self._probes += len(target)
        return self._probes <= _MAX_PROBES or not span.scattered


def run_together(numbers: Iterable[int]) -> bool:
    """Whether plain ints may be keys of a dict: few, or a dense range; see `KeyWatch`."""
    known = list(numbers)
    return len(known) <= 16_384 or (min(known) >= 0 and max(known) - min(known) < 1.5 * len(known))
