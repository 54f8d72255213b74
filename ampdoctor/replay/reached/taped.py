"""Iterators that a step draws from itself, and whose items come again after a restore.

`data = next(self.dl)`: nothing turns a generator back. So what it gives is kept, from the first place on that a
snapshot leads to, and handed out again: the item, and the random numbers that drawing it took.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampdoctor.hooks.nested import bytes_of, copy_batch
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.precision import as_written, without_overrides
from ampdoctor.replay.reached.places import Restore, restore_of
from ampdoctor.replay.reached.walk import PLAIN, RANDOM, is_a, reached

ROOM = 256 * 2**20
"""Bytes of items that are kept of an iterator; beyond, what was drawn first is let go of, and does not come again."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a replay makes of drawing an item.

    Attributes:
        random_state: Returns the present state of the random generators; given the last one, of which it may use parts.
        hands_out: Returns what the step gets for an item of data.
    """

    random_state: Callable[[Any], Any]
    hands_out: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Draw:
    """What an iterator gave.

    Attributes:
        item: The item; what a generator returned at its end.
        ended: It was at its end.
        is_data: The item is a copy, and is handed out as copies.
        random: The random state afterwards.
        own: Put back the random generators that the iterator leads to.
    """

    item: Any
    ended: bool
    is_data: bool
    random: Any
    own: Sequence[Restore]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Place:
    """A place between two items: what came next, once it was drawn, and the place behind it.

    Places lead onward alone, so that what lies before the first one that a snapshot holds is gone.
    """

    draw: _Draw | None = None
    behind: _Place | None = None


class Taped:
    """Stands in for an iterator, and passes for it.

    Args:
        source: The iterator.
        drawing: What is made of drawing from it.
    """

    __slots__ = ("__weakref__", "_drawing", "_held", "_own", "_place", "_random", "_size", "source")

    def __init__(self, source: Iterator[Any], drawing: Drawing) -> None:
        self.source = source
        self._drawing = drawing
        self._place = _Place()
        self._own = [place for place, _ in reached([source]) if is_a(place, RANDOM)]
        self._random: Any = None
        self._held = deque[tuple[weakref.ref[_Place], int]]()
        self._size = 0

    def restore(self) -> Restore:
        """Returns what leads back to the present place."""
        return partial(setattr, self, "_place", self._place)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        draw = self._place.draw
        if draw is None:
            item, draw = self._drawn()
        else:
            draw.random.restore()
            for restore in draw.own:
                restore()
            item = _copied(draw.item) if draw.is_data else draw.item
        self._place = self._place.behind or _Place()
        if draw.ended:
            raise StopIteration(item)
        return self._drawing.hands_out(item) if draw.is_data else item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.__reduce_ex__(protocol)

    @property  # type: ignore[misc]  # asked by `isinstance` in the user's code
    def __class__(self) -> Any:
        return type(self.source)

    def _drawn(self) -> tuple[Any, _Draw]:
        """Draw what comes next; returns it, and what is kept of it."""
        ended = False
        with as_written(), without_overrides():
            try:
                item = next(self.source)
            except StopIteration as end:
                item, ended = end.value, True
        self._random = self._drawing.random_state(self._random)
        is_data = not ended and _is_data(item)
        kept = _copied(item) if is_data else item
        draw = _Draw(kept, ended, is_data, self._random, [restore_of(one) for one in self._own])
        self._place.draw, self._place.behind = draw, _Place()
        self._hold(self._place, bytes_of(kept) if is_data else 0)
        return item, draw

    def _hold(self, place: _Place, size: int) -> None:
        """Count what is held, and let go of the first that was drawn if it is too much."""
        self._held.append((weakref.ref(place), size))
        self._size += size
        while self._held and ((first := self._held[0][0]()) is None or self._size > ROOM):
            if first is not None:
                first.draw = None
            self._size -= self._held.popleft()[1]


class _Sized(Taped):
    """Stands in for an iterator that says how long it is: a DataLoader's."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class Tapes:
    """The iterators that are taped, each once.

    Args:
        drawing: What is made of drawing from them.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._known = weakref.WeakValueDictionary[int, Taped]()  # each holds its source, whose id is its own so long

    def taped(self, iterator: Any) -> Any:
        """Returns what stands in for an iterator that can be taped."""
        known = self._known.get(id(iterator))
        if known is None:
            known = (_Sized if hasattr(type(iterator), "__len__") else Taped)(iterator, self._drawing)
            self._known[id(iterator)] = known
        return known


def can_be_taped(kind: type) -> bool:
    """Is it an iterator that is good for nothing else? A file, a cursor or an environment is more.

    Args:
        kind: The type.
    """
    of_python = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return of_python or issubclass(kind, _BaseDataLoaderIter)


def is_taped(kind: type) -> bool:
    """Is it what stands in for an iterator?

    Args:
        kind: The type.
    """
    return issubclass(kind, Taped)


def _copied(item: Any) -> Any:
    with unseen():
        return copy_batch(item)


def _is_data(item: Any) -> bool:
    """Is it nothing but data? A loader, an optimizer or a parameter is what it is, and no copy will do."""
    if is_a(item, torch.Tensor):
        return not is_a(item, torch.nn.Parameter) and item.grad_fn is None
    if is_a(item, (dict, UserDict)):
        return all(map(_is_data, item.values()))
    if is_a(item, (list, tuple, set, frozenset, deque)):
        return all(map(_is_data, item))
    if dataclasses.is_dataclass(item):
        return all(_is_data(getattr(item, one.name, None)) for one in dataclasses.fields(item))
    return is_a(item, (*PLAIN, np.ndarray, np.generic))
