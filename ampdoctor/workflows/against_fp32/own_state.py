"""What a run keeps where no snapshot reaches: containers of its modules, variables of its functions, generators.

A step that moves any of it is stepped once and no twin before it: a list that grows, a count, a generator of the user's
own would take the twin for a step. Only what lies near is looked at, by its size and its plain values.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from inspect import getattr_static, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LISTED = 64
"""Values of a container that are looked at; a longer one still shows its length."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
"""In a snapshot, as are a module's plain attributes; names with an underscore are torch's own."""


def own_state(session: Session) -> tuple[str, ...]:
    """Returns a description that is another one after a step only where the step has moved such state."""
    run = session.run
    found: list[str] = []
    for module in session.model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        found += _described({name: value for name, value in own.items() if not isinstance(value, _PLAIN)})
    for optimizer in session.optimizers.values():
        names = [n for n in vars(optimizer) if n not in _OF_EVERY_OPTIMIZER and not n.startswith("_")]
        found += _described({name: vars(optimizer)[name] for name in names})
    classes = dict.fromkeys(type(module) for module in session.model.modules())
    forwards = (getattr(cls, "forward", None) for cls in classes)  # a scripted class has none to look into
    for function in (run.loss, run.step, *filter(isfunction, forwards)):
        if not _is_installed(getattr(function, "__module__", None) or ""):  # whose caches and loggers are no state
            found += _described(dict(_variables(function)))
    return tuple(found)


def _variables(function: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """Yields what a function, or an object that is called, reads beside its arguments."""
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None:  # an object that is called
        owner, plain = function, vars(type(function)).get("__call__")
        code = getattr(plain, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(plain, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    known = getattr(plain, "__globals__", {})
    yield from ((name, known[name]) for name in getattr(code, "co_names", ()) if name in known)
    if owner is not None and not isinstance(owner, nn.Module):
        yield "self", owner


def _described(values: dict[str, Any], depth: int = 2) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, (*_PLAIN, itertools.count)):
            yield f"{name}={value!r}"
        elif isinstance(value, np.random.Generator):
            yield f"{name}={value.bit_generator.state!r}"
        elif isinstance(value, random.Random):
            yield f"{name}={hash(value.getstate())}"
        elif isinstance(value, torch.Generator):
            yield f"{name}={hash(bytes(value.get_state().tolist()))}"
        elif isinstance(value, _CONTAINERS):
            yield f"{name}: {len(value)}"
            if depth and len(value) <= _LISTED:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from _described(
                    {f"{name}.{_key(at, key)}": one for at, (key, one) in enumerate(items)}, depth - 1
                )
        elif depth and _is_the_users(value):
            yield from _described({f"{name}.{key}": one for key, one in vars(value).items()}, depth - 1)


def _key(at: int, key: Any) -> Any:
    """A key that can be spelled out: a tensor, or an object of the user's, is known by its place."""
    return key if isinstance(key, _PLAIN) else at


def _is_the_users(value: Any) -> bool:
    """An object with attributes that is no tensor, module, optimizer, scaler or class, and none of a library's."""
    if isinstance(value, type) or not type(value).__dictoffset__ or getattr_static(value, "state_dict", None):
        return False
    return not _is_installed(type(value).__module__)


def _is_installed(module: str) -> bool:
    """Does a module belong to Python or to an installed package, rather than to the code that is trained with?"""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return True
    places = Path(getattr(sys.modules.get(package), "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"}.isdisjoint(places)
