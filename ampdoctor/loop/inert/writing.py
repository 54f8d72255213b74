"""Values as trees of JSON: plain values, containers, torch's own names, and objects as what they hold.

A list stands for itself; everything else that JSON lacks is an object with a `kind`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ampdoctor.loop.inert.functions import name_of

Tree = Any
"""What `json.dumps(allow_nan=False)` takes."""
Special = Callable[[Any], Tree | None]
"""Writes values of a kind of the caller's; None for others."""

_DEEPEST = 60
_MOST = 200_000
"""Values in one: more is a data set, or the whole program."""
_PLAIN = (torch.dtype, torch.memory_format, torch.layout)
_PLAIN_DICTS = (dict, OrderedDict, types.MappingProxyType)


class NotInertError(Exception):
    """A value cannot be written; `str(error)` names it as the end of a sentence."""


def written(value: Any, special: Special = lambda _value: None) -> Tree:
    """Returns a value as a tree.

    Args:
        value: What is to be written; it is copied at once, and not held.
        special: As in `Special`; asked first.

    Raises:
        NotInertError: Part of it has no inert form: an open file, a function of the user's, a tensor that `special`
            does not take; or it is nested too deeply, or leads back to itself.
    """
    return _Writer(special).tree(value, 0)


def class_name(cls: type) -> str:
    """Returns `module:qualname`."""
    return f"{cls.__module__}:{cls.__qualname__}"


class _Writer:
    def __init__(self, special: Special) -> None:
        self._special = special
        self._left = _MOST

    def tree(self, value: Any, depth: int) -> Tree:
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise NotInertError("something that is too large, or leads back to itself")
        if value is None or value is True or value is False or type(value) in (str, int):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"kind": "float", "value": repr(value)}
        found = self._special(value)
        if found is not None:
            return found
        found = _atom(value)
        return found if found is not None else self._container(value, depth + 1)

    def _container(self, value: Any, depth: int) -> Tree:
        cls = type(value)
        if cls is list:
            return self._many(value, depth)
        if cls is tuple:
            return {"kind": "tuple", "items": self._many(value, depth)}
        if cls in (set, frozenset, deque):
            return {"kind": cls.__name__, "items": self._many(value, depth)}
        if cls in _PLAIN_DICTS:
            return {"kind": "dict", "items": self._pairs(value, depth)}
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            fields = dict(zip(cls._fields, value, strict=True))
            return {"kind": "named tuple", "class": class_name(cls), "fields": self._fields(fields, depth)}
        if hasattr(cls, "model_type") and callable(getattr(value, "to_dict", None)):  # a configuration of transformers'
            return {"kind": "config", "class": class_name(cls), "fields": self.tree(value.to_dict(), depth)}
        if isinstance(value, dict | UserDict):
            return {"kind": "mapping", "class": class_name(cls), "items": self._pairs(value, depth)}
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            return {"kind": "partial", "parts": self._many(parts, depth)}
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Tree:
        cls = type(value)
        if isinstance(value, nn.Module | torch.Tensor | types.FunctionType | types.MethodType | types.ModuleType):
            raise NotInertError(_said(value))
        if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            held: Mapping[str, Any] = vars(value) if hasattr(value, "__dict__") else _slots(value)
        elif _is_plain(cls) and hasattr(value, "__dict__"):
            held = vars(value)
        else:
            raise NotInertError(_said(value))
        return {"kind": "object", "class": class_name(cls), "fields": self._fields(held, depth)}

    def _many(self, values: Any, depth: int) -> list[Tree]:
        return [self.tree(one, depth) for one in values]

    def _pairs(self, value: Mapping[Any, Any], depth: int) -> list[Tree]:
        return [[self.tree(key, depth), self.tree(one, depth)] for key, one in value.items()]

    def _fields(self, value: Mapping[str, Any], depth: int) -> dict[str, Tree]:
        return {str(name): self.tree(one, depth) for name, one in value.items()}


def _atom(value: Any) -> Tree | None:
    """A value without parts; None for any other."""
    for kinds, write in _ATOMS:
        if isinstance(value, kinds):
            return write(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        plain = value.item()
        return plain if isinstance(plain, bool | int | str) else _atom(plain)
    if callable(value) and (name := name_of(value)) is not None:
        return {"kind": "function", "name": name}
    return None


def _bounds(value: Any) -> Tree | None:
    parts = [value.start, value.stop, value.step]
    plain = all(part is None or type(part) is int for part in parts)
    return {"kind": type(value).__name__, "parts": parts} if plain else None


def _enum(value: enum.Enum) -> Tree:
    plain = value.value if isinstance(value.value, str | int) else None
    return {"kind": "enum", "class": class_name(type(value)), "name": value.name, "value": plain}


def _float(value: float) -> Tree:
    plain = float(value)
    return plain if math.isfinite(plain) else {"kind": "float", "value": repr(plain)}


_ATOMS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Tree | None]], ...] = (
    (type(Ellipsis), lambda _value: {"kind": "ellipsis"}),
    (enum.Enum, _enum),
    (bool, bool),
    (int, int),
    (float, _float),
    (str, str),
    (complex, lambda value: {"kind": "complex", "value": repr(complex(value))}),
    (bytes, lambda value: {"kind": "bytes", "value": value.hex()}),
    ((slice, range), _bounds),
    (torch.Size, lambda value: {"kind": "size", "items": list(map(int, value))}),
    (torch.device, lambda value: {"kind": "device", "value": str(value)}),
    (_PLAIN, lambda value: {"kind": "torch", "value": str(value)}),
    (type, lambda value: {"kind": "class", "class": class_name(value)}),
    (PurePath, str),
)
"""What is written as one; of two kinds that a value may have, the first counts."""


def _is_plain(cls: type) -> bool:
    """Does a class of the user's, or of `argparse`, only keep attributes: no C type, no state that is not in them?"""
    own = [base for base in cls.__mro__ if base is not object]
    return all(base.__flags__ & (1 << 9) for base in own) and not any("__reduce__" in vars(base) for base in own)


def _slots(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _said(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    kind = type(value).__qualname__
    return f"the {kind} {name}" if isinstance(name, str) else f"a {kind}"
