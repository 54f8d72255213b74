"""Keeps what a run's functions reach, and puts it back; and spells out what cannot be put back.

A closure's list of losses, a count, a scheduler, an averaged copy of the weights: a step moves them, and a run that is
stepped again has to find them as they were. An iterator that a step draws from is taped. What draws the batches is not
turned back.
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
from ampdoctor.precision import as_written, without_overrides
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

# Iterators that a step draws from itself, and whose items come again after a restore.
#
# `data = next(self.dl)`: nothing turns a generator back. So what it gives is kept, from the first place on that a
# snapshot leads to, and handed out again: the item, and the random numbers that drawing it took.


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


Beyond = Mapping[Hashable, Hashable]
"""What tells each place that is not put back from itself after it has moved."""

_SAMPLE = 16
"""Elements by which a tensor that is not kept is known, beside the count of writes that torch keeps of it."""
_READ = 1 << 26
"""Bytes of an array that is not kept and is read whole, because numpy counts no writes; of a larger one a sample."""


@dataclass(slots=True)
class Reached:
    """What a run's functions reach beside its parts.

    Attributes:
        roots: Where the walk begins, by a call, as a run may replace its functions' parts.
        stop: Ids of the run's parts, which are kept elsewhere.
        batches: What draws the batches: what it reaches is not turned back, because the batches drawn are not drawn
            again.
        room: Bytes of tensors and arrays that are kept at most.
        drawing: What is made of drawing from an iterator that is taped.
        steps_own: Ids of what the steps move, though what draws the batches reaches it as well.
    """

    roots: Callable[[], Iterable[Any]]
    stop: Callable[[], Iterable[int]]
    batches: Any
    room: int
    drawing: Drawing
    steps_own: Callable[[], Iterable[int]] = tuple
    _tapes: Tapes = field(init=False)
    _drawing: frozenset[Hashable] | None = field(default=None)

    def __post_init__(self) -> None:
        self._tapes = Tapes(self.drawing)

    def kept(self, keep: Callable[[torch.Tensor], Restore]) -> Iterator[Restore]:
        """Keep all that can be put back; yields what puts it back. Iterators that it holds are taped from here on.

        Args:
            keep: Keeps a tensor's values.
        """
        for place, put_back in self._places():
            if is_a(place, Taped):
                yield place.restore()
            elif put_back:
                exchange(place, can_be_taped, self._taped)
                yield _quietly(keep(place) if is_a(place, torch.Tensor) else restore_of(place))

    def _taped(self, iterator: Any) -> Any:
        """What the batches are drawn from has its place on their tape."""
        return iterator if self._drawing and id(iterator) in self._drawing else self._tapes.taped(iterator)

    def untape(self) -> None:
        """Let everything hold its own iterators again."""
        for place, put_back in self._places():
            if put_back:
                exchange(place, is_taped, operator.attrgetter("source"))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for the tensors that are put back, named as the run's code names them as far as known.

        "EMA.module.out.weight" of a module in a global, "shadow.out.weight" of a dict in an attribute.
        """
        names: dict[int, str] = {}
        for place, put_back in self._places():
            for name, tensor in _named_tensors(place):
                names.setdefault(id(tensor), name)
            if put_back and is_a(place, torch.Tensor):
                yield names.get(id(place), "a tensor"), place

    def beyond(self) -> Beyond:
        """Returns a description of what is not put back, and of the shapes of what is."""
        found: dict[Hashable, Hashable] = {}
        for place, put_back in self._places():
            if is_a(place, Taped):
                continue
            if not put_back:
                found[_known(place)] = _told(place)
            elif is_a(place, (torch.Tensor, np.ndarray)):
                found[_known(place)] = tuple(place.shape)
        return found

    def _places(self) -> Iterator[tuple[Any, bool]]:
        """Yields what can change, and whether it is put back."""
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
    """Has a step moved what is not put back? What only one of the two looks saw was made or dropped by the step.

    Args:
        before: As it was before the step.
        after: As it is now.
    """
    return any(after.get(place, told) != told for place, told in before.items())


def _named_tensors(place: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that names lead to: by themselves, in a module, in a dict."""
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
    """By what a place is known again: names of a namespace are found anew by each walk."""
    return (id(place.of), place.names) if is_a(place, Names) else id(place)


def _quietly(restore: Restore) -> Restore:
    """What has changed its shape, or does not let itself be written to, stays as it is: a look after the step tells."""

    def quiet() -> None:
        with suppress(Exception):
            restore()

    return quiet


def _told(place: Any) -> Hashable:
    """Returns what tells a place that is not put back from itself after it has moved."""
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
    return _state_of(place) if is_a(place, RANDOM) else _left(place)


def _left(iterator: Any) -> int:
    """How many values an iterator has left, where the interpreter knows."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return -1
    return operator.length_hint(iterator, -1)


def _state_of(generator: Any) -> int:
    if is_a(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    if is_a(generator, random.Random):
        return hash(random.Random.getstate(generator))
    if is_a(generator, torch.Generator):
        return hash(generator.get_state().numpy().tobytes())
    return hash(repr(generator.get_state(legacy=False)))


def _named(values: Iterable[Any]) -> int:
    """By their values if they are plain, by identity otherwise."""
    return hash(tuple(value if type(value) in PLAIN else id(value) for value in values))


def _sample(tensor: torch.Tensor) -> Hashable:
    """Returns some elements, spelled out: a write through `.data` is not counted as one."""
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
