"""Values as JSON, which names code but contains none, and back: containers, torch's functions, modules, constants."""

# ruff: noqa: SLF001 - a module's own tables have no public name

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import sys
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions, resolve_name

from ampdoctor.hooks.process_state import unwarned

# -- torch's functions, by name --

_ALSO = ("unflatten", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
"""Methods of tensors that make tensors and reach `__torch_function__`, but are in no table of torch's."""
_NAMELESS: dict[Callable[..., Any], str] = {torch.autograd.grad: "torch.autograd.grad"}
"""Functions that reach `__torch_function__`, but have no name in torch: gradient penalties use them."""

_TWO = (
    *("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv"),
    "xor",
)
_OPERATORS = frozenset(
    f"__{operator}__"
    for operator in (
        *(f"{side}{name}" for name in _TWO for side in ("", "r", "i")),
        *("eq", "ne", "lt", "le", "gt", "ge", "invert", "reversed", "getitem", "setitem", "get"),
    )
)
"""Dunder methods that may be named; `__get__` reads an attribute. A tensor's others convert, copy or pickle it."""
_NO_ARITHMETIC = frozenset(
    {"apply_", "map_", "module_load", "numpy", "register_hook", "register_post_accumulate_grad_hook", "share_memory_"}
    | {"storage", "storage_type", "untyped_storage"}
)
"""Methods that call their argument, or expose a tensor's memory."""


@cache
def _table() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            name = resolve_name(function)
            if name is not None and _computes(name):
                found.setdefault(name, function)
    for name in _ALSO:
        found[f"torch.Tensor.{name}"] = getattr(torch.Tensor, name)
    found |= {name: function for function, name in _NAMELESS.items()}
    return found


def _computes(name: str) -> bool:
    parts = name.split(".")
    return not any((part.startswith("_") and part not in _OPERATORS) or part in _NO_ARITHMETIC for part in parts)


def name_of(function: Callable[..., Any]) -> str | None:
    """Returns the name by which `function_named` finds a function of torch's; None for any other function."""
    with unwarned():  # torch changes Python's warning filters when it looks a name up
        try:
            name = _NAMELESS.get(function) or resolve_name(function)
        except (AttributeError, TypeError):
            return None
        return name if name is not None and _table().get(name) == function else None


def function_named(name: str) -> Callable[..., Any] | None:
    """Returns torch's public function of this name ("torch.nn.functional.gelu"), or None; nothing is imported."""
    return _table().get(name)


# -- writing: a list is a JSON list; every other type that JSON lacks is an object with a `kind` --

Tree = Any
"""A value that `json.dumps(allow_nan=False)` accepts."""
WriteSpecial = Callable[[Any], Tree | None]
"""Writes values of a kind that the caller defines; None for others."""

_DEEPEST_WRITTEN = 60
_MOST = 200_000
"""Values in one tree: more is a data set, or the whole program."""
_PLAIN = (torch.dtype, torch.memory_format, torch.layout)
_PLAIN_DICTS = (dict, OrderedDict, types.MappingProxyType)


class NotSerializableError(Exception):
    """A value cannot be written; `str(error)` names it in the form of a sentence's end."""


def written(value: Any, special: WriteSpecial = lambda _value: None) -> Tree:
    """Returns a value as a tree, copied at once; `special` is asked first. Raises NotSerializableError."""
    return _Writer(special).tree(value, 0)


def class_name(cls: type) -> str:
    """Returns `module:qualname`."""
    return f"{cls.__module__}:{cls.__qualname__}"


class _Writer:
    def __init__(self, special: WriteSpecial) -> None:
        self._special = special
        self._left = _MOST

    def tree(self, value: Any, depth: int) -> Tree:
        self._left -= 1
        if depth > _DEEPEST_WRITTEN or self._left < 0:
            raise NotSerializableError("something that is too large, or leads back to itself")
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
        if hasattr(cls, "model_type") and callable(getattr(value, "to_dict", None)):  # a transformers configuration
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
            raise NotSerializableError(_said(value))
        if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            held: Mapping[str, Any] = vars(value) if hasattr(value, "__dict__") else _slots(value)
        elif _is_plain(cls) and hasattr(value, "__dict__"):
            held = vars(value)
        else:
            raise NotSerializableError(_said(value))
        return {"kind": "object", "class": class_name(cls), "fields": self._fields(held, depth)}

    def _many(self, values: Any, depth: int) -> list[Tree]:
        return [self.tree(one, depth) for one in values]

    def _pairs(self, value: Mapping[Any, Any], depth: int) -> list[Tree]:
        return [[self.tree(key, depth), self.tree(one, depth)] for key, one in value.items()]

    def _fields(self, value: Mapping[str, Any], depth: int) -> dict[str, Tree]:
        return {str(name): self.tree(one, depth) for name, one in value.items()}


def _atom(value: Any) -> Tree | None:
    """Returns the tree of a value without parts; None for any other."""
    for kinds, write in _WRITERS:
        if isinstance(value, kinds):
            return write(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        plain = value.item()
        return plain if isinstance(plain, bool | int | str) else _atom(plain)
    if callable(value) and (name := name_of(value)) is not None:
        return {"kind": "function", "name": name}
    return None


def _slice_or_range(value: Any) -> Tree | None:
    parts = [value.start, value.stop, value.step]
    plain = all(part is None or type(part) is int for part in parts)
    return {"kind": type(value).__name__, "parts": parts} if plain else None


def _enum(value: enum.Enum) -> Tree:
    plain = value.value if isinstance(value.value, str | int) else None
    return {"kind": "enum", "class": class_name(type(value)), "name": value.name, "value": plain}


def _float(value: float) -> Tree:
    plain = float(value)
    return plain if math.isfinite(plain) else {"kind": "float", "value": repr(plain)}


_WRITERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Tree | None]], ...] = (
    (type(Ellipsis), lambda _value: {"kind": "ellipsis"}),
    (enum.Enum, _enum),
    (bool, bool),
    (int, int),
    (float, _float),
    (str, str),
    (complex, lambda value: {"kind": "complex", "value": repr(complex(value))}),
    (bytes, lambda value: {"kind": "bytes", "value": value.hex()}),
    ((slice, range), _slice_or_range),
    (torch.Size, lambda value: {"kind": "size", "items": list(map(int, value))}),
    (torch.device, lambda value: {"kind": "device", "value": str(value)}),
    (_PLAIN, lambda value: {"kind": "torch", "value": str(value)}),
    (type, lambda value: {"kind": "class", "class": class_name(value)}),
    (PurePath, str),
)
"""Writers of values without parts; the first type that fits counts."""


def _is_plain(cls: type) -> bool:
    """Whether a class, of the user's or of `argparse`, keeps all its state in attributes, and is no C type."""
    own = [base for base in cls.__mro__ if base is not object]
    return all(base.__flags__ & (1 << 9) for base in own) and not any("__reduce__" in vars(base) for base in own)


def _slots(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _said(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    kind = type(value).__qualname__
    return f"the {kind} {name}" if isinstance(name, str) else f"a {kind}"


# -- reading --
#
# The caller finds classes by name, and no method of them is called: no constructor, `__new__`, property setter or
# `__hash__`. Attributes are stored where Python stores them. An object of an unknown class becomes a SimpleNamespace.

FindClass = Callable[[str, str], Any]
"""Returns the class of a module and a qualified name; None for a class that must not be used."""
ReadSpecial = Callable[[str, Mapping[str, Any]], Any]
"""Returns the value of a kind that the caller defines; `NOTHING` for another kind."""

NOTHING: Any = object()
"""Returned by `ReadSpecial` for an unknown kind."""
_DEEPEST_READ = 80
_NATIVE = (types.BuiltinFunctionType, types.BuiltinMethodType)
"""Types of `__new__` in a class written in C."""


class UnreadableTreeError(ValueError):
    """A tree is malformed, or has an unknown name; `str(error)` is the end of a sentence."""


def read(tree: Any, find: FindClass, special: ReadSpecial = lambda _kind, _tree: NOTHING) -> Any:
    """Returns the value of an untrusted tree of parsed JSON; `special` is asked first. Raises UnreadableTreeError."""
    try:
        return _Reader(find, special).value(tree, 0)
    except UnreadableTreeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise UnreadableTreeError(f"a malformed value ({type(error).__name__})") from None


class _Reader:
    def __init__(self, find: FindClass, special: ReadSpecial) -> None:
        self._find = find
        self._special = special

    def value(self, tree: Any, depth: int) -> Any:
        if depth > _DEEPEST_READ:
            raise UnreadableTreeError("values that are nested too deeply")
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if isinstance(tree, list):
            return [self.value(one, depth + 1) for one in tree]
        kind = tree["kind"]
        found = self._special(kind, tree)
        if found is not NOTHING:
            return found
        reader = _READERS.get(kind)
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
    """Returns the keys; raises UnreadableTreeError where one has no hash, or a hash that the user has written."""
    if kind in ("dict", "set", "frozenset"):
        for key in keys:
            own: Any = type(key).__hash__
            code = getattr(own, "__code__", None)  # None for a hash in C; a data class's hash has no file
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
    for name in names:  # a transformers output has its items as attributes, too
        _put(made, name, None)
    for key, one in pairs:
        put(made, key, one)
        if key in names:
            _put(made, key, one)
    return made


def _object(cls: Any, fields: Mapping[str, Any]) -> Any:
    whole = isinstance(cls, type) and not issubclass(cls, torch.nn.Module | torch.Tensor)
    if not whole or hasattr(cls, "model_type"):  # a transformers configuration has its own kind
        return types.SimpleNamespace(**fields)
    try:
        made = object.__new__(cls)
    except TypeError:  # a C type
        return types.SimpleNamespace(**fields)
    for name, one in fields.items():
        _put(made, name, one)
    return made


def _put(made: Any, name: str, value: Any) -> None:
    """Stores an attribute where Python does: in the object's slot of this name, or in its `__dict__`."""
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


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
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
_MANY: Mapping[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


# -- modules: rebuilt from their parts, without constructors --

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_written(module: nn.Module, child: Callable[[nn.Module], Tree]) -> dict[str, Tree]:
    """Returns a module's class, attributes, names and submodules, without values. Raises NotSerializableError."""
    cls = type(module)
    there: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        there = getattr(there, name, None)
    if there is not cls:
        raise NotSerializableError(f"a {cls.__qualname__}, which is nowhere by that name")
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    if not all(str(getattr(hook, "__module__", "")).startswith("ampdoctor.") for hook in hooks):
        raise NotSerializableError(f"hooks on a {cls.__qualname__}")
    if any(p is not None and type(p) is not nn.Parameter for p in module._parameters.values()):
        raise NotSerializableError(f"parameters of a kind of their own in a {cls.__qualname__}")
    return {
        "class": class_name(cls),
        "fields": {name: written(value) for name, value in vars(module).items() if name not in _OWN},
        "parameters": {name: None if p is None else list(p.shape) for name, p in module._parameters.items()},
        "buffers": list(module._buffers),
        "modules": {name: None if part is None else child(part) for name, part in module._modules.items()},
    }


def module_read(
    tree: Mapping[str, Any], cls: type[nn.Module], find: FindClass, child: Callable[[Any], nn.Module]
) -> nn.Module:
    """Returns a module without values from an untrusted tree of `module_written`. Raises UnreadableTreeError."""
    module: nn.Module = object.__new__(cls)
    nn.Module.__init__(module)
    try:
        for name, value in tree["fields"].items():
            if name in _OWN or hasattr(nn.Module, name):
                raise UnreadableTreeError(f"an attribute {name[:40]!r}, which is every module's own")
            vars(module)[name] = read(value, find)
        for name, shape in tree["parameters"].items():
            module._parameters[_part(name)] = None if shape is None else nn.Parameter(torch.empty(shape))
        for name in tree["buffers"]:
            module._buffers[_part(name)] = None
        for name, part in tree["modules"].items():
            module._modules[_part(name)] = None if part is None else child(part)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise UnreadableTreeError(f"parts that do not fit ({type(error).__name__})") from None
    return module


def _part(name: Any) -> str:
    """Checks the name of a part, which is stored without `register_parameter`: a user's class may override that."""
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.Module, name):
        raise UnreadableTreeError(f"a part of the name {str(name)[:40]!r}")
    return name


# -- global values that a script's classes use, mostly set from its command line --

_LONGEST = 10_000
"""Most characters of a value: more is data."""


def constants_of(classes: Iterable[type]) -> dict[str, Tree]:
    """Returns trees, by name, of the `__main__` values that methods of its classes, or functions they call, name."""
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
    except NotSerializableError:
        return
    if len(repr(tree)) <= _LONGEST:
        found[name] = tree


def _codes_of(cls: type) -> Iterator[CodeType]:
    for value in vars(cls).values():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(function, FunctionType):
            yield function.__code__
