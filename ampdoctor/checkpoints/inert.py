"""What stands in a saved object for everything that is no plain value: records of what was asked for, never built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MAX_INT_KEY = 2**60
"""Larger ints as dict keys are kept apart: `hash` takes them modulo 2^61 - 1, so that a file could make all collide."""


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


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueKey:
    """A dict key that is no plain value: hashed by identity, because a nest of tuples takes 2^n steps to hash."""

    value: Any


def dict_key(key: Any) -> Any:
    """A key that a dict may hash: plain values as they are, anything else by identity."""
    if isinstance(key, str | bytes | bool | float) or key is None:
        return key
    if isinstance(key, int) and -_MAX_INT_KEY < key < _MAX_INT_KEY:
        return key
    if isinstance(key, Inert | Global | OpaqueKey):
        return key
    return OpaqueKey(key)
