"""Records that stand for everything in a saved object but plain values: what was asked for, never built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

_MAX_INT_KEY = 2**60
"""Larger ints as dict keys are kept apart: `hash` takes them modulo 2^61 - 1, so a file could make all collide."""
_FEW = 64
"""A dict with fewer keys may have any collisions."""
_MAX_PROBES = 300_000_000
"""Steps that all dicts of a pickle together may take to find the slots of their keys; about two seconds."""


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
        name: "module.qualified_name" of the callable.
        args: Its arguments.
        state: The argument of its `__setstate__` or `__dict__`; None if there is none.
        items: The values to append to it.
        pairs: The entries to set in it, as (key, value).
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name[:80]}>"  # without its contents: a value shared at every level would be written 2^n times


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueKey:
    """A dict key other than a plain value: hashed by identity, because a nest of tuples takes 2^n steps to hash."""

    value: Any

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


@dataclass(frozen=True, slots=True)
class Entries:
    """The arguments of a call that makes a dict. The machine makes the dict itself, because it watches the keys.

    Attributes:
        pairs: (key, value).
        count: Their number, as far as it is known.
    """

    pairs: Iterable[tuple[Any, Any]]
    count: int


class Builder(Protocol):
    """Makes values of the calls that it understands; the protocol keeps the machine free of torch."""

    def known(self, name: str) -> bool:
        """Is this a class or function that torch itself loads without running foreign code?"""

    def build(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns a call's value, or `NotImplemented` if it is not understood; it never imports or calls `name`."""

    def persistent(self, pid: Any) -> Any:
        """Returns the value behind a persistent id."""


@dataclass(slots=True)
class _Numbers:
    """The numeric keys of one dict.

    Attributes:
        low: The smallest of them.
        high: The largest.
        scattered: True if they are too far apart for each to have its own slot.
        calm_since: Size of the dict from which on they are not.
    """

    low: float
    high: float
    scattered: bool = False
    calm_since: int = 0


class KeyWatch:
    """Sets keys so that a file cannot make them collide: numbers hash to themselves, which determines their slots.

    Numbers from a range no longer than the dict's table never collide, whatever their order; optimizers number their
    parameters like that. For other numbers, a dict of n entries is assumed to need n steps for each. When the sum
    exceeds what a checkpoint needs, they are kept apart as `OpaqueKey`. Strings and bytes are safe: their hashes are
    salted per process.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[dict[Any, Any], _Numbers]] = {}  # holds the dicts, so that their ids stay valid
        self._probes = 0

    def put(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """Set `target[key] = value`, under a key that a dict may hash."""
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
            # a table grows to at most six times its entries before it is laid out anew, which has happened by now
            span.scattered = len(target) <= 6 * span.calm_since
        if span.scattered:
            self._probes += len(target)
        return self._probes <= _MAX_PROBES or not span.scattered


def run_together(numbers: Iterable[int]) -> bool:
    """May plain ints be keys of a dict: are they few, or a dense range? See `KeyWatch`."""
    known = list(numbers)
    return len(known) <= 16_384 or (min(known) >= 0 and max(known) - min(known) < 1.5 * len(known))
