"""Keeps what a run's functions reach, and puts it back; and spells out what cannot be put back.

A closure's list of losses, a count, a scheduler, an averaged copy of the weights: a step moves them, and a run that is
stepped again has to find them as they were. Iterators cannot be turned back; what draws the batches is not turned back.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CellType, GeneratorType
from typing import Any, cast

import numpy as np
import torch

from ampdoctor.replay.reached.walk import CACHED, CONTAINERS, PLAIN, Names, cell_contents, reached

Restore = Callable[[], None]

LONGEST = 1_000_000
"""Items of a container that is kept; of a longer one only its length is known."""
LARGEST = 1 << 24
"""Bytes of an array that is kept."""
_SAMPLE = 4096
"""Elements by which a tensor or an array that is not kept is known."""
_MISSING = object()
_RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@dataclass(slots=True)
class Reached:
    """What a run's functions reach beside its parts.

    Attributes:
        roots: Where the walk begins, by a call, as a run may replace its functions' parts.
        stop: Ids of the run's parts, which are kept elsewhere.
        batches: What draws the batches: what it reaches is not turned back, because the batches drawn are not drawn
            again.
        room: Bytes of tensors that are kept at most.
    """

    roots: Callable[[], Iterable[Any]]
    stop: Callable[[], Iterable[int]]
    batches: Any
    room: int
    _drawing: frozenset[int] | None = field(default=None)

    def kept(self, keep: Callable[[torch.Tensor], Restore]) -> Iterator[Restore]:
        """Keep all that can be put back; yields what puts it back.

        Args:
            keep: Keeps a tensor's values.
        """
        room = self.room
        for place in self._places():
            if self._is_drawing(place) or not _can_be_kept(place):
                continue
            if isinstance(place, torch.Tensor):
                room -= place.nbytes
                if room >= 0:
                    yield keep(place)
            else:
                yield _restore_of(place)

    def beyond(self) -> tuple[str, ...]:
        """Returns a description of what is not put back; another one after a step only where the step has moved it."""
        found, room = [], self.room
        for place in self._places():
            if isinstance(place, torch.Tensor) and _can_be_kept(place):
                room -= place.nbytes
                if room >= 0 and not self._is_drawing(place):
                    continue
            elif _can_be_kept(place) and not self._is_drawing(place):
                continue
            found.append(_spelled(place))
        return tuple(found)

    def _places(self) -> Iterator[Any]:
        return reached(self.roots(), self.stop())

    def _is_drawing(self, place: Any) -> bool:
        if self._drawing is None:
            self._drawing = frozenset(_known(one) for one in reached([self.batches], self.stop()))
        return _known(place) in self._drawing


def _known(place: Any) -> int:
    """By what a place is known again: names of a namespace are found anew by each walk."""
    return id(place.of) if isinstance(place, Names) else id(place)


def _can_be_kept(place: Any) -> bool:
    if isinstance(place, (CellType, Names, *_RANDOM)):
        return True
    if isinstance(place, torch.Tensor):
        plain = type(place) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        return plain and place.layout is torch.strided and not place.is_meta and not place.is_quantized
    if isinstance(place, np.ndarray):
        return place.nbytes <= LARGEST and place.flags.writeable
    return type(place) in CONTAINERS and len(place) <= LONGEST


def _restore_of(place: Any) -> Restore:
    """Returns what puts back the place's present contents; what is the same by then is not touched."""
    if isinstance(place, CellType):
        return partial(_bind, place, cell_contents(place))
    if isinstance(place, Names):
        return partial(_bind_names, place, {name: place.table[name] for name in place.names if name in place.table})
    if isinstance(place, dict):
        return partial(_refill_dict, place, list(place.items()))
    if isinstance(place, (list, deque, set)):
        return partial(_refill, place, list(place))
    if isinstance(place, np.ndarray):
        return partial(np.copyto, place, place.copy(), casting="no")
    if isinstance(place, np.random.Generator):
        return partial(setattr, place.bit_generator, "state", place.bit_generator.state)
    if isinstance(place, random.Random):
        return partial(place.setstate, place.getstate())
    return cast("Restore", partial(place.set_state, place.get_state()))  # torch's, or numpy's old one


def _bind(cell: CellType, contents: tuple[Any, ...]) -> None:
    now = cell_contents(cell)
    if not _same(now, contents):
        if contents:
            cell.cell_contents = contents[0]
        else:
            del cell.cell_contents


def _bind_names(place: Names, bound: dict[str, Any]) -> None:
    for name, value in bound.items():
        if place.table.get(name, _MISSING) is value:
            continue
        if isinstance(place.of, type):
            setattr(place.of, name, value)
        else:
            place.of[name] = value


def _refill_dict(place: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = [part for item in place.items() for part in item]
    if not _same(now, [part for item in items for part in item]):
        place.clear()
        place.update(items)


def _refill(place: Any, items: list[Any]) -> None:
    if _same(place, items):
        return
    place.clear()
    if isinstance(place, set):
        place.update(items)
    else:
        place.extend(items)


def _same(here: Any, there: Any) -> bool:
    """Are these the very same objects, in this order?"""
    return len(here) == len(there) and all(map(operator.is_, here, there))


def _spelled(place: Any) -> str:
    """Returns what tells a place that is not put back from itself after it has moved."""
    return f"{type(place).__name__}: {_told(place)}"


def _told(place: Any) -> Any:
    if isinstance(place, (torch.Tensor, np.ndarray)):
        return _sample(place)
    if isinstance(place, CellType):
        return _named(cell_contents(place))
    if isinstance(place, Names):
        return _named(place.table.get(name) for name in place.names)
    if isinstance(place, CONTAINERS):
        items = place.values() if isinstance(place, dict) else place
        return len(place) if len(place) > LONGEST else _named(items)
    if isinstance(place, CACHED):
        return place.cache_info().currsize
    if isinstance(place, GeneratorType):
        return getattr(place.gi_frame, "f_lasti", None)
    if isinstance(place, itertools.count):
        return repr(place)
    return _state_of(place) if isinstance(place, _RANDOM) else _left(place)


def _left(iterator: Any) -> int:
    """How many values an iterator has left, where the interpreter knows."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return -1
    return operator.length_hint(iterator, -1)


def _state_of(generator: Any) -> int:
    if isinstance(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    if isinstance(generator, torch.Generator):
        return hash(generator.get_state().numpy().tobytes())
    return hash(repr(generator.get_state(legacy=False)))


def _named(values: Iterable[Any]) -> int:
    """By their values if they are plain, by identity otherwise."""
    return hash(tuple(value if isinstance(value, PLAIN) else id(value) for value in values))


def _sample(values: torch.Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """How often a tensor was written to in place, and some elements; of an array or a strange tensor one of both."""
    if isinstance(values, np.ndarray):
        return 0, hash(values.reshape(-1)[:: max(1, values.size // _SAMPLE)].tobytes())
    written = values._version  # noqa: SLF001 - there is no public name for it
    if not _can_be_kept(values):
        return written, 0
    flat = values.detach().reshape(-1)
    return written, hash(repr(flat[:: max(1, flat.numel() // _SAMPLE)].tolist()))
