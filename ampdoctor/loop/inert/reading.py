"""Trees of JSON as values again. A class is one that the caller finds by its name, and no method of it is called.

No constructor, no `__new__`, no property's setter, no `__hash__`: attributes are put where Python keeps them. What the
caller does not find becomes a bag of the same attributes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampdoctor.loop.inert.functions import function_named

FindClass = Callable[[str, str], Any]
"""Returns the class that a module and a qualified name mean; None for one that is not to be used."""
Special = Callable[[str, Mapping[str, Any]], Any]
"""Returns the value of a kind of the caller's; `NOTHING` for another kind."""

NOTHING: Any = object()
"""What `Special` says of a kind that it does not know."""
_DEEPEST = 80
_NATIVE = (types.BuiltinFunctionType, types.BuiltinMethodType)
"""What `__new__` of a class that is written in C is."""


class UnreadableTreeError(ValueError):
    """A tree is malformed, or names what is not there; `str(error)` is the end of a sentence."""


def read(tree: Any, find: FindClass, special: Special = lambda _kind, _tree: NOTHING) -> Any:
    """Returns the value of a tree.

    Args:
        tree: As parsed from JSON; nothing in it is trusted.
        find: As in `FindClass`.
        special: As in `Special`; asked first.

    Raises:
        UnreadableTreeError: It is malformed, nested too deeply, or names a function or a class that is not there.
    """
    try:
        return _Reader(find, special).value(tree, 0)
    except UnreadableTreeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise UnreadableTreeError(f"a malformed value ({type(error).__name__})") from None


class _Reader:
    def __init__(self, find: FindClass, special: Special) -> None:
        self._find = find
        self._special = special

    def value(self, tree: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise UnreadableTreeError("values that are nested too deeply")
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if isinstance(tree, list):
            return [self.value(one, depth + 1) for one in tree]
        kind = tree["kind"]
        found = self._special(kind, tree)
        if found is not NOTHING:
            return found
        reader = _ATOMS.get(kind)
        if reader is not None:
            return reader(tree)
        return self._composed(kind, tree, depth + 1)

    def _composed(self, kind: str, tree: Mapping[str, Any], depth: int) -> Any:
        if kind in _MANY:
            return _MANY[kind](_hashed(kind, self._many(tree["items"], depth)))
        if kind == "dict":
            return dict(self._pairs(tree["items"], depth))
        if kind == "partial":
            function, arguments, keywords = self._many(tree["parts"], depth)
            if not callable(function):
                raise UnreadableTreeError("a partial of what is no function")
            return functools.partial(function, *arguments, **keywords)
        if kind == "class":
            return self._class(tree, wanted=True)
        if kind == "enum":
            cls = self._class(tree)
            named = isinstance(cls, type) and issubclass(cls, enum.Enum) and tree["name"] in cls.__members__
            return cls[tree["name"]] if named else tree["value"]
        cls = self._class(tree)
        if kind == "mapping":
            return _mapping(cls, self._pairs(tree["items"], depth))
        fields = {_field(name): self.value(one, depth) for name, one in self._table(tree["fields"]).items()}
        if kind == "named tuple":
            known = isinstance(cls, type) and issubclass(cls, tuple) and getattr(cls, "_fields", None) == (*fields,)
            return tuple.__new__(cls, fields.values()) if known else tuple(fields.values())
        if kind == "object":
            return _object(cls, fields)
        raise UnreadableTreeError(f"a value of the unknown kind {str(kind)[:40]!r}")

    def _class(self, tree: Mapping[str, Any], *, wanted: bool = False) -> Any:
        module, _, qualname = tree["class"].partition(":")
        found = self._find(module, qualname)
        if found is None and wanted:
            raise UnreadableTreeError(f"the class {qualname[:80]} of {module[:80]}, which is not there")
        return found

    def _many(self, items: Any, depth: int) -> list[Any]:
        if not isinstance(items, list):
            raise UnreadableTreeError("a malformed value")
        return [self.value(one, depth) for one in items]

    def _pairs(self, items: Any, depth: int) -> list[tuple[Any, Any]]:
        pairs = []
        for key, one in items:
            pairs.append((self.value(key, depth), self.value(one, depth)))
        _hashed("dict", [key for key, _ in pairs])
        return pairs

    @staticmethod
    def _table(fields: Any) -> Mapping[str, Any]:
        if not isinstance(fields, dict):
            raise UnreadableTreeError("a malformed value")
        return fields


def _hashed(kind: str, keys: list[Any]) -> list[Any]:
    """The keys, of which none has a hash of the user's own making.

    Raises:
        UnreadableTreeError: One has, or has none.
    """
    if kind in ("dict", "set", "frozenset"):
        for key in keys:
            own: Any = type(key).__hash__
            code = getattr(own, "__code__", None)  # none where C computes it; that of a data class has no file
            if own is None or not (code is None or own is enum.Enum.__hash__ or code.co_filename == "<string>"):
                raise UnreadableTreeError(f"a key of the class {type(key).__qualname__[:80]}, which hashes itself")
            if isinstance(key, tuple | frozenset):
                _hashed("set", list(key))
            elif code is not None and dataclasses.is_dataclass(key):
                _hashed("set", [getattr(key, field.name) for field in dataclasses.fields(key)])
            hash(key)
    return keys


def _mapping(cls: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if isinstance(cls, type) and issubclass(cls, UserDict):
        around = object.__new__(cls)
        _put(around, "data", dict(pairs))
        return around
    if not (isinstance(cls, type) and issubclass(cls, dict)):
        return dict(pairs)
    own = next(vars(base)["__new__"] for base in cls.__mro__ if isinstance(vars(base).get("__new__"), _NATIVE))
    made: Any = own(cls)
    put: Any = OrderedDict.__setitem__ if issubclass(cls, OrderedDict) else dict.__setitem__
    names: set[str] = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in names:  # an output of transformers' has its items as attributes as well
        _put(made, name, None)
    for key, one in pairs:
        put(made, key, one)
        if key in names:
            _put(made, key, one)
    return made


def _object(cls: Any, fields: Mapping[str, Any]) -> Any:
    whole = isinstance(cls, type) and not issubclass(cls, torch.nn.Module | torch.Tensor)
    if not whole or hasattr(cls, "model_type"):  # a configuration of transformers' has a kind of its own
        return types.SimpleNamespace(**fields)
    try:
        made = object.__new__(cls)
    except TypeError:  # a C type
        return types.SimpleNamespace(**fields)
    for name, one in fields.items():
        _put(made, name, one)
    return made


def _put(made: Any, name: str, value: Any) -> None:
    """Puts an attribute where Python keeps it: in the object's slot of this name, or in its dictionary."""
    for base in type(made).__mro__:
        slot = vars(base).get(name)
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(made, value)
            return
    for base in type(made).__mro__:
        held = vars(base).get("__dict__")
        if isinstance(held, types.GetSetDescriptorType):
            held.__get__(made)[name] = value
            return
    raise AttributeError(name)


def _field(name: str) -> str:
    if not name or (name.startswith("__") and name.endswith("__")):
        raise UnreadableTreeError(f"an attribute of the name {name[:40]!r}")
    return name


def _whole(items: Any) -> list[int]:
    if not isinstance(items, list) or not all(type(one) is int for one in items):
        raise UnreadableTreeError("a malformed value")
    return items


def _torch(tree: Mapping[str, Any]) -> Any:
    found = getattr(torch, str(tree["value"]).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype | torch.memory_format | torch.layout):
        raise UnreadableTreeError(f"{str(tree['value'])[:40]!r}, which this torch does not have")
    return found


def _function(tree: Mapping[str, Any]) -> Any:
    found = function_named(tree["name"])
    if found is None:
        raise UnreadableTreeError(f"{str(tree['name'])[:80]!r}, which is no function in torch's table")
    return found


def _bounds(tree: Mapping[str, Any]) -> list[Any]:
    parts = tree["parts"]
    if len(parts) != 3 or not all(part is None or type(part) is int for part in parts):
        raise UnreadableTreeError("a malformed slice")
    return list(parts)


_ATOMS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda tree: float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[tree["value"]]),
    "complex": lambda tree: complex(tree["value"]),
    "ellipsis": lambda _tree: Ellipsis,
    "bytes": lambda tree: bytes.fromhex(tree["value"]),
    "slice": lambda tree: slice(*_bounds(tree)),
    "range": lambda tree: range(*_bounds(tree)),
    "size": lambda tree: torch.Size(_whole(tree["items"])),
    "device": lambda tree: torch.device(tree["value"]),
    "torch": _torch,
    "function": _function,
}
_MANY: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
