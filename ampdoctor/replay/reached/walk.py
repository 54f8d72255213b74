"""Walks what functions reach: closures, defaults, globals and helpers they read, objects and classes of the user's own.

What belongs to Python or to an installed package is not entered, but for objects that a package's class made and the
user's code holds: a scheduler, an averaged model, an environment.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
CACHED = (type(functools.lru_cache(int)),)
_METHODS = (FunctionType, staticmethod, classmethod)
OBJECTS = 20_000
"""How many objects are looked at: what lies near comes first, and a data set is not walked to its end."""
LISTED = 4096
"""Items of a container that are entered; of a longer one only these."""
_ENTERED = {"SimpleNamespace", "Namespace", "UserDict", "UserList", "partial"}
"""Classes of the standard library that hold what somebody puts there."""
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a namespace (a module's or a class's) that the user's code may bind anew.

    Attributes:
        of: The class, or the dict of a module's globals.
        names: The names.
    """

    of: type | dict[str, Any]
    names: tuple[str, ...]

    @property
    def table(self) -> Mapping[str, Any]:
        """The namespace as it is."""
        return vars(self.of) if isinstance(self.of, type) else self.of


def reached(roots: Iterable[Any], stop: Iterable[int] = ()) -> Iterator[Any]:
    """Yields what can change of all that these values reach, nearest first, each once.

    Args:
        roots: Functions, or any values.
        stop: Ids of what is not entered and not yielded.

    Yields:
        Cells, `Names`, containers, dicts of attributes, tensors, arrays, generators, iterators.
    """
    seen, ahead = set(stop), deque(roots)
    for _ in range(OBJECTS):
        if not ahead:
            return
        value = ahead.popleft()
        if isinstance(value, (*PLAIN, np.generic)) or id(value) in seen:
            continue
        seen.add(id(value))
        if _can_change(value):
            yield value
        ahead.extend(_entered(value))


def _can_change(value: Any) -> bool:
    if isinstance(value, (CellType, Names, torch.Tensor, torch.Generator, *CONTAINERS)):
        return True
    if isinstance(value, (type, ModuleType, tuple, frozenset, FunctionType, MethodType, CodeType, BuiltinFunctionType)):
        return False
    return type(value).__module__.partition(".")[0] in ("numpy", "random") or _moves_on(value)


def _moves_on(value: Any) -> bool:
    """An iterator, or a function with a cache, whose place only the interpreter knows."""
    return hasattr(type(value), "__next__") or isinstance(value, CACHED)


def _entered(value: Any) -> Iterator[Any]:
    """Yields what a value leads to."""
    if isinstance(value, (torch.Tensor, torch.amp.GradScaler, ModuleType)):
        return  # scalers are kept as such; of a module counts what a function reads
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from _first(value)
    elif isinstance(value, dict):
        yield from _first(value.values())
    elif isinstance(value, CellType):
        yield from cell_contents(value)
    elif isinstance(value, Names):
        yield from (value.table[name] for name in value.names if name in value.table)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif callable(value):
        yield from _of_callable(value)
    elif _moves_on(value) and not hasattr(value, "__dict__"):
        yield from (part for part in gc.get_referents(value) if not isinstance(part, (type, CodeType)))
    else:
        yield from _of_object(value)


def _of_callable(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, (BuiltinFunctionType, MethodWrapperType)):
        yield value.__self__  # of a bound `append` or `__next__`; else a module
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (*CACHED, staticmethod, classmethod)):
        yield value.__wrapped__
    else:
        yield from _of_object(value)


def _first(items: Iterable[Any]) -> Iterator[Any]:
    return (item for _, item in zip(range(LISTED), items, strict=False))


def _of_function(function: FunctionType) -> Iterator[Any]:
    if is_installed(function.__module__ or ""):
        return
    yield from function.__closure__ or ()
    yield from (function.__defaults__ or (), function.__kwdefaults__ or (), function.__dict__)
    names = tuple(dict.fromkeys(_names(function.__code__)))
    known = function.__globals__
    yield Names(known, tuple(name for name in names if name in known))
    for name in names:
        if isinstance(module := known.get(name), ModuleType) and not is_installed(module.__name__):
            yield Names(vars(module), tuple(one for one in names if one in vars(module)))


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function, and the functions in it, read beside their own variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_class(cls: type) -> Iterator[Any]:
    """A class of the user's own: its methods, and what it holds for all its objects."""
    for one in cls.__mro__:
        if is_installed(one.__module__):
            continue
        held = {name: value for name, value in vars(one).items() if not name.startswith("__")}
        methods = [
            value for value in vars(one).values() if isinstance(value, (FunctionType, staticmethod, classmethod))
        ]
        yield from methods
        yield from (getter for value in held.values() if isinstance(value, property) and (getter := value.fget))
        yield Names(one, tuple(name for name, value in held.items() if not _is_code(value)))


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _of_object(value: Any) -> Iterator[Any]:
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == _OURS or (package in sys.stdlib_module_names and kind.__name__ not in _ENTERED):
        return  # loggers, locks, paths
    yield kind
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield attributes
    else:
        names = (name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ()))
        yield from (getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name))


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Returns what a variable of a closure holds; () before it is bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    """Does a module belong to Python, to an installed package or to us, rather than to the code that is trained with?

    Args:
        module: Its name, with dots.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package == _OURS:
        return True
    places = Path(getattr(sys.modules.get(package), "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"}.isdisjoint(places)


def roots_of(
    functions: Iterable[Callable[..., Any] | None],
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[Any]:
    """Yields where a walk begins: a run's functions, the code of its model, and what its parts hold unregistered.

    Args:
        functions: The run's own; None is left out.
        modules: Those of its model.
        optimizers: Its optimizers.
    """
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


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
"""Kept by a snapshot itself, as are a module's plain attributes and tensors."""
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
"""Kept by a snapshot itself; other tables with an underscore are torch's own: hooks."""
