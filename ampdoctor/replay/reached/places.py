"""A place that a run's functions reach: its contents are kept, put back, and exchanged for others."""

from __future__ import annotations

import array
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType
from typing import Any, cast

import numpy as np
import torch

from ampdoctor.replay.reached.walk import (
    CONTAINERS,
    LISTED,
    RANDOM,
    Names,
    cell_contents,
    is_a,
    is_code,
)

Restore = Callable[[], None]

LONGEST = 1_000_000
"""Items of a container that is kept; of a longer one only its length is known."""
MISSING = object()
"""Stands for a name that is not bound."""


def can_be_kept(place: Any) -> bool:
    """Can its contents be put back?"""
    if is_a(place, (CellType, Names, *RANDOM)):
        return True
    if is_a(place, torch.Tensor):
        plain = type(place) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        return plain and place.layout is torch.strided and not place.is_meta and not place.is_quantized
    if is_a(place, np.ndarray):
        return type(place) is np.ndarray and place.flags.writeable
    return is_a(place, CONTAINERS) and length_of(place) <= LONGEST


def length_of(container: Any) -> int:
    """Returns how many items a container holds."""
    return int(_base(container).__len__(container))


def _base(container: Any) -> Any:
    """Returns the class whose methods are called: not a subclass's, which may do more."""
    return next(kind for kind in CONTAINERS if is_a(container, kind))


def restore_of(place: Any) -> Restore:
    """Returns what puts back the place's present contents; what is the same by then is not touched."""
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
    kind = type if is_a(of, type) else object  # a frozen dataclass refuses its own
    if value is MISSING:
        kind.__delattr__(of, name)
    else:
        kind.__setattr__(of, name, value)


def items_of(place: Any) -> list[Any]:
    """Returns what a container holds: a mapping's keys and values, in turn."""
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
    """Are these the very same objects, in this order?"""
    return len(here) == len(there) and all(map(operator.is_, here, there))


def exchange(place: Any, wanted: Callable[[type], bool], other: Callable[[Any], Any]) -> None:
    """Let a place hold other values.

    Args:
        place: A variable, names, a container; of others nothing is exchanged.
        wanted: Is a value of this type one to exchange? Most places hold none.
        other: Returns what is to be held instead of such a value; the value itself, if it is to stay.
    """
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
    """Returns the values that can be exchanged: a set's cannot, for their order is their own."""
    if is_a(place, dict):
        return dict.values(place)
    if is_a(place, (list, deque)):
        return cast("Iterable[Any]", _base(place).__iter__(place))
    if is_a(place, Names):
        return cast("Names", place).table.values()
    return cell_contents(place) if is_a(place, CellType) else ()
