"""Saves and restores the Python state that a run's steps can change, and describes state that cannot be restored.

Examples are a closure's list of losses, a counter, a scheduler, an averaged copy of the weights. Iterators of a step
are recorded, so that their items come again. The iterator of the batches is not turned back.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import weakref
import zlib
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampdoctor.hooks.nested import bytes_of, copy_batch
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.precision.dtype_overrides import as_written, without_overrides
from ampdoctor.replay.reachable_state import (
    CACHED,
    CONTAINERS,
    LONGEST,
    MISSING,
    PLAIN,
    RANDOM,
    Names,
    Restore,
    can_be_kept,
    cell_contents,
    exchange,
    is_a,
    items_of,
    length_of,
    reached,
    restore_of,
)

# -- iterators that a step draws from itself --
#
# `data = next(self.dl)`: a generator cannot be turned back. So its items are stored, from the first position that a
# snapshot holds, and returned again after a restore, with the random numbers that drawing them consumed.

ROOM = 256 * 2**20
"""Bytes of items that are stored per iterator; beyond that the oldest items are dropped and cannot come again."""


@dataclass(frozen=True, slots=True)
class DrawHooks:
    """Functions of a replay for drawn items."""

    random_state: Callable[[Any], Any]  # returns the generators' state; may share parts of its argument, the last one
    hands_out: Callable[[Any], Any]  # returns what the step gets for an item of data


@dataclass(frozen=True, slots=True)
class _Draw:
    item: Any  # at the end: the generator's return value
    ended: bool
    is_data: bool  # the item is a copy, and the step gets copies of it
    random: Any  # the random state afterwards
    own: Sequence[Restore]  # restore the random generators that the iterator reaches


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Place:
    """A position between two items: the next item, once drawn, and the next position.

    Links lead forward only, so that positions before a snapshot's first one are freed.
    """

    draw: _Draw | None = None
    behind: _Place | None = None


class ReplayableIterator:
    """Replaces an iterator of the user's, also in `isinstance`, and can return to an earlier position."""

    __slots__ = ("__weakref__", "_drawing", "_held", "_own", "_place", "_random", "_size", "source")

    def __init__(self, source: Iterator[Any], drawing: DrawHooks) -> None:
        self.source = source
        self._drawing = drawing
        self._place = _Place()
        self._own = [place for place, _ in reached([source]) if is_a(place, RANDOM)]
        self._random: Any = None
        self._held = deque[tuple[weakref.ref[_Place], int]]()
        self._size = 0

    def restore(self) -> Restore:
        """Returns a function that goes back to the present position."""
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
        size = bytes_of(kept) if is_data else 0
        self._held.append((weakref.ref(self._place), size))
        self._size += size
        while self._held and ((first := self._held[0][0]()) is None or self._size > ROOM):
            if first is not None:
                first.draw = None
            self._size -= self._held.popleft()[1]
        return item, draw


class _Sized(ReplayableIterator):
    """Replaces an iterator that has a length, like a DataLoader's."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class Tapes:
    """The recorded iterators, each replaced by one `ReplayableIterator`."""

    def __init__(self, drawing: DrawHooks) -> None:
        self._drawing = drawing
        self._known = weakref.WeakValueDictionary[
            int, ReplayableIterator
        ]()  # each holds its source, so its id stays unique

    def taped(self, iterator: Any) -> Any:
        """Returns the replacement of an iterator."""
        known = self._known.get(id(iterator))
        if known is None:
            known = (_Sized if hasattr(type(iterator), "__len__") else ReplayableIterator)(iterator, self._drawing)
            self._known[id(iterator)] = known
        return known


def can_be_taped(kind: type) -> bool:
    """Is the type a pure iterator? A file, a cursor or an environment is more."""
    of_python = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return of_python or issubclass(kind, _BaseDataLoaderIter)


def _copied(item: Any) -> Any:
    with unseen():
        return copy_batch(item)


def _is_data(item: Any) -> bool:
    """Is it only data? A loader, an optimizer or a parameter cannot be replaced by a copy."""
    if is_a(item, torch.Tensor):
        return not is_a(item, torch.nn.Parameter) and item.grad_fn is None
    if is_a(item, (dict, UserDict)):
        return all(map(_is_data, item.values()))
    if is_a(item, (list, tuple, set, frozenset, deque)):
        return all(map(_is_data, item))
    if dataclasses.is_dataclass(item):
        return all(_is_data(getattr(item, one.name, None)) for one in dataclasses.fields(item))
    return is_a(item, (*PLAIN, np.ndarray, np.generic))


Beyond = Mapping[Hashable, Hashable]
"""For each place that is not restored a description, which differs after the place has changed."""

_SAMPLE = 16  # elements that describe a tensor that is not restored, beside torch's version counter
_READ = 1 << 26
"""Bytes up to which an array that is not restored is read whole, as numpy counts no writes; above, a sample."""


@dataclass(slots=True)
class Reached:
    """The Python state that a run's functions reach outside the run's parts."""

    roots: Callable[[], Iterable[Any]]  # start of the walk; a call, as a run may replace its functions
    stop: Callable[[], Iterable[int]]  # ids of the run's parts, which are saved elsewhere
    batches: Any  # source of the batches: its state is not restored, because drawn batches are not drawn again
    room: int  # bytes of tensors and arrays that are saved at most
    drawing: DrawHooks
    steps_own: Callable[[], Iterable[int]] = tuple  # ids that the steps change and `batches` reaches too
    _tapes: Tapes = field(init=False)
    _drawing: frozenset[Hashable] | None = field(default=None)

    def __post_init__(self) -> None:
        self._tapes = Tapes(self.drawing)

    def kept(self, keep: Callable[[torch.Tensor], Restore]) -> Iterator[Restore]:
        """Save all that can be restored (tensors by `keep`) and record iterators; yields functions that restore."""
        for place, put_back in self._places():
            if is_a(place, ReplayableIterator):
                yield place.restore()
            elif put_back:
                exchange(place, can_be_taped, self._taped)
                yield _quietly(keep(place) if is_a(place, torch.Tensor) else restore_of(place))

    def _taped(self, iterator: Any) -> Any:
        """Iterators of the batches are not replaced: their positions are on the batches' tape."""
        return iterator if self._drawing and id(iterator) in self._drawing else self._tapes.taped(iterator)

    def untape(self) -> None:
        """Put the original iterators back everywhere."""
        for place, put_back in self._places():
            if put_back:
                exchange(place, lambda kind: issubclass(kind, ReplayableIterator), operator.attrgetter("source"))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for tensors that are restored, with the names of the run's code if they are known."""
        names: dict[int, str] = {}
        for place, put_back in self._places():
            for name, tensor in _named_tensors(place):
                names.setdefault(id(tensor), name)
            if put_back and is_a(place, torch.Tensor):
                yield names.get(id(place), "a tensor"), place

    def beyond(self) -> Beyond:
        """Describes state that is not restored, and the shapes of tensors and arrays that are."""
        found: dict[Hashable, Hashable] = {}
        for place, put_back in self._places():
            if is_a(place, ReplayableIterator):
                continue
            if not put_back:
                found[_known(place)] = _told(place)
            elif is_a(place, (torch.Tensor, np.ndarray)):
                found[_known(place)] = tuple(place.shape)
        return found

    def _places(self) -> Iterator[tuple[Any, bool]]:
        if self._drawing is None:
            stop = (*self.stop(), *self.steps_own())
            self._drawing = frozenset(_known(place) for place, _ in reached([self.batches], stop))
        room = self.room
        for place, turns_back in reached(self.roots(), self.stop()):
            put_back = turns_back and _known(place) not in self._drawing and can_be_kept(place)
            if put_back and is_a(place, (torch.Tensor, np.ndarray)):
                room -= place.nbytes
                put_back = room >= 0
            yield place, put_back


def has_moved(before: Beyond, after: Beyond) -> bool:
    """Has a step changed state that is not restored? Places in only one description were made or dropped."""
    return any(after.get(place, told) != told for place, told in before.items())


def _named_tensors(place: Any) -> Iterator[tuple[str, torch.Tensor]]:
    table = place.table if is_a(place, Names) else dict(place) if is_a(place, dict) else {}
    for key, value in table.items():
        if is_a(value, torch.Tensor):
            yield str(key), value
        elif is_a(value, torch.nn.Module):
            yield from ((f"{key}.{name}", tensor) for name, tensor in value.named_parameters())
            yield from ((f"{key}.{name}", tensor) for name, tensor in value.named_buffers())
        elif is_a(value, (list, tuple)) and len(value) <= LONGEST:
            yield from ((f"{key}[{at}]", item) for at, item in enumerate(value) if is_a(item, torch.Tensor))
        elif is_a(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in dict.items(value) if is_a(item, torch.Tensor))


def _known(place: Any) -> Hashable:
    """Returns a key for a place; `Names` are made anew by each walk."""
    return (id(place.of), place.names) if is_a(place, Names) else id(place)


def _quietly(restore: Restore) -> Restore:
    """Ignores errors: a place with another shape, or read-only, stays as it is; a check after the step finds that."""

    def quiet() -> None:
        with suppress(Exception):
            restore()

    return quiet


def _told(place: Any) -> Hashable:
    """Describes a place that is not restored; the description differs after the place has changed."""
    if is_a(place, torch.Tensor):
        return place._version, tuple(place.shape), _sample(place)  # noqa: SLF001 - there is no public name for it
    if is_a(place, np.ndarray):
        return place.shape, _sum_of(place)
    if is_a(place, CellType):
        return _named(cell_contents(place))
    if is_a(place, Names):
        return _named(place.table.get(name, MISSING) for name in place.names)
    if is_a(place, CONTAINERS):
        return length_of(place) if length_of(place) > LONGEST else _named(items_of(place))
    if type(place) in CACHED:
        return place.cache_info().currsize  # type: ignore[no-any-return]
    if is_a(place, GeneratorType):
        return getattr(place.gi_frame, "f_lasti", None)
    if is_a(place, itertools.count):
        return repr(place)
    if is_a(place, RANDOM):
        return _state_of(place)
    return operator.length_hint(place, -1) if type(place).__module__ in ("builtins", "itertools") else -1


def _state_of(generator: Any) -> int:
    if is_a(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    if is_a(generator, random.Random):
        return hash(random.Random.getstate(generator))
    if is_a(generator, torch.Generator):
        return hash(generator.get_state().numpy().tobytes())
    return hash(repr(generator.get_state(legacy=False)))


def _named(values: Iterable[Any]) -> int:
    return hash(tuple(value if type(value) in PLAIN else id(value) for value in values))


def _sample(tensor: torch.Tensor) -> Hashable:
    """Returns some elements as text: torch does not count a write through `.data`."""
    if not can_be_kept(tensor) or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[(0,) * tensor.dim()].reshape(1)
    return repr(flat[:: max(1, flat.numel() // _SAMPLE)].tolist())


def _sum_of(values: np.ndarray[Any, Any]) -> int:
    plain = np.asarray(values)
    if plain.dtype.hasobject:
        return 0
    if plain.nbytes > _READ:
        plain = plain.reshape(-1)[:: max(1, plain.nbytes // _READ)]
    return zlib.crc32(np.ascontiguousarray(plain).view(np.uint8).data if plain.size else b"")
