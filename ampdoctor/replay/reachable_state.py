"""Walks the Python state that functions reach, and saves, restores and exchanges the contents of each place in it.

The walk enters closures, defaults, globals, helpers, and the user's own objects and classes. It enters no code of
Python or of installed packages, except objects of a package's class that the user's code holds: a scheduler, an
averaged model, an environment. It calls no method of an object, because a user's class may do anything in its
`__len__`.
"""

from __future__ import annotations

import array
import dis
import functools
import gc
import itertools
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, cast

import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (OrderedDict, dict, list, deque, set, bytearray, array.array)
"""Containers whose items can be restored, with their subclasses (`defaultdict`, `Counter`)."""
RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
CACHED = (type(functools.lru_cache(int)),)
OBJECTS = 8000  # the walk's limit: near objects come first, and it does not walk a whole data set
LISTED = 4096  # items of a container that are entered
_METHODS = (FunctionType, staticmethod, classmethod)
_ENTERED = {"SimpleNamespace", "Namespace", "UserDict", "UserList", "Queue", "LifoQueue", "PriorityQueue"}
"""Classes of the standard library that hold user objects."""
_OURS = __name__.partition(".")[0]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Names:
    """Names that the user's code may rebind in a module, a class, or an object with slots."""

    of: Any  # the class, the object, or the dict of a module's globals
    names: tuple[str, ...]  # also those that are not bound yet

    @property
    def table(self) -> Mapping[str, Any]:
        """The bound names with their values."""
        if is_a(self.of, dict):
            known: Mapping[str, Any] = self.of
        elif is_a(self.of, type):
            known = vars(self.of)
        else:
            return dict(_slots(self.of))
        return {name: known[name] for name in self.names if name in known}


_CHANGEABLE = (CellType, Names, torch.Tensor, np.ndarray, *CONTAINERS, *RANDOM)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like `isinstance`, but does not read the object's `__class__`."""
    return issubclass(type(value), kinds)


def reached(roots: Iterable[Any], stop: Iterable[int] = ()) -> Iterator[tuple[Any, bool]]:
    """Yields each changeable place that the roots reach, nearest first, once, and whether it can be restored.

    Objects with ids in `stop` are left out; what only an iterator leads to cannot be restored.
    """
    seen, ahead, within = set(stop), deque(roots), deque[Any]()
    met = []  # keeps objects alive whose ids could be reused otherwise
    for _ in range(OBJECTS):
        if not ahead and not within:
            return
        alone = not ahead
        value = within.popleft() if alone else ahead.popleft()
        if type(value) in PLAIN or is_a(value, np.generic) or id(value) in seen:
            continue
        seen.add(id(value))
        met.append(value)
        if is_a(value, _CHANGEABLE) or _moves_on(value):
            yield value, not alone
        with suppress(Exception):  # an object that cannot be inspected is left alone
            entered = list(_entered(value))
            (within if alone or _moves_on(value) else ahead).extend(entered)


def _moves_on(value: Any) -> bool:
    """Is it an iterator of Python or of a library, or a function with a cache? Its position cannot be restored."""
    kind = type(value)
    return kind in CACHED or (hasattr(kind, "__next__") and is_installed(kind.__module__))


def _entered(value: Any) -> Iterator[Any]:
    if is_a(value, (torch.amp.GradScaler, ModuleType, np.ndarray, bytearray, array.array)):
        return  # scalers are saved elsewhere; of a module only the names that a function reads count
    if is_a(value, torch.Tensor):
        yield vars(value)
    elif is_a(value, (dict, MappingProxyType, list, tuple, set, frozenset, deque)):
        yield from _items(value)
        yield from _attributes(value)
    elif is_a(value, CellType):
        yield from cell_contents(value)
    elif is_a(value, Names):
        yield from value.table.values()
    elif is_a(value, type):
        yield from _of_class(value)
    elif callable(value):
        yield from _of_callable(value)
    else:
        yield from _of_object(value)


def _items(value: Any) -> Iterator[Any]:
    for kind in (dict, list, tuple, set, frozenset, deque):
        if is_a(value, kind):
            items = dict.values(value) if kind is dict else kind.__iter__(value)
            return itertools.islice(items, LISTED)
    return itertools.islice(dict(value).values(), LISTED)  # a mapping proxy


def _of_callable(value: Any) -> Iterator[Any]:
    if is_a(value, FunctionType):
        yield from _of_function(value)
    elif is_a(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif is_a(value, (BuiltinFunctionType, MethodWrapperType)):
        yield value.__self__  # of a bound `append` or `__next__`; else a module
    elif is_a(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif is_a(value, (*CACHED, staticmethod, classmethod)):
        yield value.__wrapped__
    else:
        yield from _of_object(value)


def _of_function(function: FunctionType) -> Iterator[Any]:
    if is_installed(function.__module__ or ""):
        return
    yield from function.__closure__ or ()
    yield from (function.__defaults__ or (), function.__kwdefaults__ or (), function.__dict__)
    read, bound = _names(function.__code__)
    known = function.__globals__
    yield Names(known, tuple(name for name in read if name in known or name in bound))
    for name in read:
        module = known.get(name)
        if isinstance(module, ModuleType) and not is_installed(module.__name__):
            yield Names(vars(module), tuple(one for one in read if one in vars(module)))


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the non-local names that a function and its inner functions use, and the globals that they bind."""
    read = dict.fromkeys(code.co_names)
    bound = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if is_a(constant, CodeType):
            inner, further = _names(constant)
            read |= dict.fromkeys(inner)
            bound |= further
    return tuple(read), frozenset(bound)


def _of_class(cls: type) -> Iterator[Any]:
    for one in cls.__mro__:
        if is_installed(one.__module__):
            continue
        held = {name: value for name, value in vars(one).items() if not name.startswith("__")}
        yield from (value for value in vars(one).values() if is_a(value, _METHODS))
        yield from (getter for value in held.values() if is_a(value, property) and (getter := value.fget))
        yield Names(one, tuple(name for name, value in held.items() if not is_code(value)))


def is_code(value: Any) -> bool:
    """Is it a method, a property or the like, instead of state of a class?"""
    return callable(value) or hasattr(type(value), "__get__")


def _of_object(value: Any) -> Iterator[Any]:
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == _OURS or (package in sys.stdlib_module_names and kind.__name__ not in _ENTERED):
        if package != _OURS and _moves_on(value):
            yield from (part for part in gc.get_referents(value) if not is_a(part, (type, CodeType)))
        return  # loggers, locks, paths
    yield kind
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    if is_a(own, dict):
        yield own
    if any(True for _ in _members(type(value))):
        yield Names(value, tuple(name for name, _ in _members(type(value))))


def _members(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    """Yields the slots of classes that are not of Python or an installed package."""
    for cls in kind.__mro__:
        if "__slots__" in vars(cls) and not is_installed(cls.__module__):
            yield from ((name, member) for name, member in vars(cls).items() if type(member) is MemberDescriptorType)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for name, member in _members(type(value)):
        try:
            yield name, member.__get__(value)
        except AttributeError:  # not bound
            continue


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Returns the value of a closure's variable in a tuple; () before it is bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    """Does a module (by its dotted name) belong to Python, to an installed package or to us, not to the user's code?"""
    package = module.partition(".")[0]
    if package == "__main__":  # the user's script, even where the process started with another one
        return False
    if package in sys.stdlib_module_names or package == _OURS:
        return True
    places = Path(getattr(sys.modules.get(package), "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"}.isdisjoint(places)


def roots_of(
    functions: Iterable[Callable[..., Any] | None],
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[Any]:
    """Yields the roots of a walk: a run's functions, its model's code, and unregistered state of its parts."""
    yield from (function for function in functions if function is not None)
    for optimizer in optimizers:
        held = {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY_OPTIMIZER}
        names = (n for n, v in held.items() if isinstance(v, PLAIN) or (n[0] != "_" and not callable(v)))
        yield Names(vars(optimizer), tuple(names))
    modules = list(modules)
    yield from dict.fromkeys(type(module) for module in modules)
    for module in modules:
        own = (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
        yield from (value for value in own if not isinstance(value, (*PLAIN, torch.Tensor)))
        yield from (hook for name in _HOOKS for hook in (vars(module).get(name) or {}).values())


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
"""A snapshot saves these itself, with a module's plain attributes and tensors."""
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
"""A snapshot saves these itself; other underscored tables are torch's hooks."""


# -- the contents of a place --

Restore = Callable[[], None]

LONGEST = 1_000_000  # items of a container that can be saved; of a longer one only the length is known
MISSING = object()  # stands for a name that is not bound


def can_be_kept(place: Any) -> bool:
    """Can its contents be saved and restored?"""
    if is_a(place, (CellType, Names, *RANDOM)):
        return True
    if is_a(place, torch.Tensor):
        plain = type(place) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        return plain and place.layout is torch.strided and not place.is_meta and not place.is_quantized
    if is_a(place, np.ndarray):
        return type(place) is np.ndarray and place.flags.writeable
    return is_a(place, CONTAINERS) and length_of(place) <= LONGEST


def length_of(container: Any) -> int:
    """Returns the number of items, without a subclass's `__len__`."""
    return int(_base(container).__len__(container))


def _base(container: Any) -> Any:
    """Returns the builtin class whose methods are called instead of those of a subclass."""
    return next(kind for kind in CONTAINERS if is_a(container, kind))


def restore_of(place: Any) -> Restore:
    """Returns a function that restores the place's present contents; unchanged contents are not written."""
    if is_a(place, CellType):
        return partial(_bind, place, cell_contents(place))
    if is_a(place, Names):
        return partial(_bind_names, place, dict(place.table))
    if is_a(place, CONTAINERS):
        return partial(_refill, place, _base(place), items_of(place))
    if is_a(place, np.ndarray):
        return partial(np.copyto, place, place.copy(), casting="no")
    if is_a(place, np.random.Generator):
        return partial(setattr, place.bit_generator, "state", place.bit_generator.state)
    if is_a(place, random.Random):
        return partial(random.Random.setstate, place, random.Random.getstate(place))
    return cast("Restore", partial(place.set_state, place.get_state()))  # torch's, or numpy's old one


def _bind(cell: CellType, contents: tuple[Any, ...]) -> None:
    if not _same(cell_contents(cell), contents):
        if contents:
            cell.cell_contents = contents[0]
        else:
            del cell.cell_contents


def _bind_names(place: Names, bound: dict[str, Any]) -> None:
    now = place.table
    for name in place.names:
        if name in bound and now.get(name, MISSING) is not bound[name]:
            _set(place.of, name, bound[name])
        elif name not in bound and name in now:
            _set(place.of, name, MISSING)
    if is_a(place.of, type):
        held = [name for name, value in vars(place.of).items() if name[:2] != "__" and not is_code(value)]
        for name in set(held) - set(place.names):
            _set(place.of, name, MISSING)


def _set(of: Any, name: str, value: Any) -> None:
    if is_a(of, dict):
        if value is MISSING:
            del of[name]
        else:
            of[name] = value
        return
    kind = type if is_a(of, type) else object  # a frozen dataclass's own methods refuse
    if value is MISSING:
        kind.__delattr__(of, name)
    else:
        kind.__setattr__(of, name, value)


def items_of(place: Any) -> list[Any]:
    """Returns a container's items; for a mapping keys and values in turn."""
    base = _base(place)
    if issubclass(base, dict):
        return [part for item in dict.items(place) for part in item]
    return list(base.__iter__(place))


def _refill(place: Any, base: Any, items: list[Any]) -> None:
    if _same(items_of(place), items):
        return
    if base in (bytearray, array.array):
        base.__setitem__(place, slice(None), base(items) if base is bytearray else base(place.typecode, items))
        return
    base.clear(place)
    if issubclass(base, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            base.__setitem__(place, key, value)
    elif base is set:
        base.update(place, items)
    else:
        base.extend(place, items)


def _same(here: Any, there: Any) -> bool:
    return len(here) == len(there) and all(map(operator.is_, here, there))


def exchange(place: Any, wanted: Callable[[type], bool], other: Callable[[Any], Any]) -> None:
    """Replace values in a variable, in names or in a container; other places are left alone."""
    if not any(map(wanted, map(type, itertools.islice(_values(place), LISTED)))):
        return
    table = place.table if is_a(place, Names) else place
    keys = dict.keys(table) if is_a(table, dict) else itertools.count()
    for key, value in list(zip(keys, itertools.islice(_values(place), LISTED), strict=False)):
        new = other(value) if wanted(type(value)) else value
        if new is value:
            continue
        if is_a(place, CellType):
            place.cell_contents = new
        elif is_a(place, Names):
            _set(place.of, key, new)
        else:
            _base(place).__setitem__(place, key, new)


def _values(place: Any) -> Iterable[Any]:
    """Returns the values that can be exchanged; a set has none, because it has no positions."""
    if is_a(place, dict):
        return dict.values(place)
    if is_a(place, (list, deque)):
        return cast("Iterable[Any]", _base(place).__iter__(place))
    if is_a(place, Names):
        return cast("Names", place).table.values()
    return cell_contents(place) if is_a(place, CellType) else ()
