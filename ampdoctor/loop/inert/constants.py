"""The global values of a script that its classes speak of: what its command line has made of them, mostly."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ampdoctor.loop.inert.writing import NotInertError, Tree, written

_LONGEST = 10_000
"""Characters of a value: more is data."""


def constants_of(classes: Iterable[type]) -> dict[str, Tree]:
    """Returns the values of `__main__` that functions of its classes name, and those that these call; trees by name.

    Args:
        classes: Those of other modules have no part in it. What cannot be written is left out.
    """
    space = vars(sys.modules["__main__"])
    found: dict[str, Tree] = {}
    todo: list[CodeType] = [code for cls in classes if cls.__module__ == "__main__" for code in _codes_of(cls)]
    seen: set[int] = set()
    while todo:
        code = todo.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        todo += [one for one in code.co_consts if isinstance(one, CodeType)]
        for name in code.co_names:
            value = space.get(name)
            if isinstance(value, FunctionType):
                todo.append(value.__code__)
            elif isinstance(value, type):
                todo += _codes_of(value)
            elif name in space and name not in found:
                _note(found, name, value)
    return found


def _note(found: dict[str, Tree], name: str, value: Any) -> None:
    try:
        tree = written(value)
    except NotInertError:
        return
    if len(repr(tree)) <= _LONGEST:
        found[name] = tree


def _codes_of(cls: type) -> Iterator[CodeType]:
    for value in vars(cls).values():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(function, FunctionType):
            yield function.__code__
