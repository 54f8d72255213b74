"""Which variables the parts of a loop name: what its header reads, by which it is known what drawing may move."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ampdoctor.replay.reached.walk import cell_contents, is_a
from ampdoctor.replay.scripts.seam import Body, Items

_NAMES = {"LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


def read_by(items: Items | None) -> tuple[Any, ...]:
    """Returns the objects that a header names: of `range(self.epochs)` the number alone, and not the whole of `self`.

    Args:
        items: The header, as a function that evaluates it; None for a `while`.
    """
    if items is None:
        return ()
    code: CodeType = items.__code__
    by_itself = any(is_a(one, CodeType) for one in code.co_consts)
    if by_itself or any(one.opname.startswith(("STORE", "DELETE")) for one in dis.get_instructions(code)):
        return (items,)
    return tuple(_read(code, _variables(items)))


def _read(code: CodeType, variables: dict[str, Any]) -> Iterator[Any]:
    known: list[Any] = []  # what was loaded last, as long as attributes of its own are asked for
    for one in dis.get_instructions(code):
        if one.opname in _ATTRIBUTES and known and one.argval in _own(known[0]):
            known = [_own(known[0])[one.argval]]
            continue
        yield from known
        known = [variables[one.argval]] if one.opname in _NAMES and one.argval in variables else []
    yield from known


def bound_by(body: Body) -> list[Any]:
    """Returns what the variables hold that the body of a loop binds, in the order in which they are bound."""
    instructions = dis.get_instructions(body.__code__)
    names = dict.fromkeys(one.argval for one in instructions if one.opname in ("STORE_DEREF", "STORE_GLOBAL"))
    variables = _variables(body)
    return [variables[name] for name in names if name in variables]


def _variables(part: Items | Body) -> dict[str, Any]:
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    closure = {name: value for name, cell in cells for value in cell_contents(cell)}
    return {**part.__globals__, **closure}


def _own(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object holds itself."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if is_a(own, dict) else {}
