"""Keeps what a run's functions reach, and puts it back; and spells out what cannot be put back.

A closure's list of losses, a count, a scheduler, an averaged copy of the weights: a step moves them, and a run that is
stepped again has to find them as they were. Iterators cannot be turned back; what draws the batches is not turned back.
"""

from __future__ import annotations

import array
import itertools
import operator
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, GeneratorType
from typing import Any, cast

import numpy as np
import torch

from ampdoctor.replay.reached.walk import (
    CACHED,
    CONTAINERS,
    PLAIN,
    RANDOM,
    Names,
    cell_contents,
    is_a,
    is_code,
    reached,
)

Restore = Callable[[], None]
Beyond = Mapping[Hashable, Hashable]
"""What tells each place that is not put back from itself after it has moved."""

LONGEST = 1_000_000
"""Items of a container that is kept; of a longer one only its length is known."""
_SAMPLE = 16
"""Elements by which a tensor that is not kept is known, beside the count of writes that torch keeps of it."""
_READ = 1 << 26
"""Bytes of an array that is not kept and is read whole, because numpy counts no writes; of a larger one a sample."""
_MISSING = object()


@dataclass(slots=True)
class Reached:
    """What a run's functions reach beside its parts.

    Attributes:
        roots: Where the walk begins, by a call, as a run may replace its functions' parts.
        stop: Ids of the run's parts, which are kept elsewhere.
        batches: What draws the batches: what it reaches is not turned back, because the batches drawn are not drawn
            again.
        room: Bytes of tensors and arrays that are kept at most.
        steps_own: Ids of what the steps move, though what draws the batches reaches it as well.
    """

    roots: Callable[[], Iterable[Any]]
    stop: Callable[[], Iterable[int]]
    batches: Any
    room: int
    steps_own: Callable[[], Iterable[int]] = tuple
    _drawing: frozenset[Hashable] | None = field(default=None)

    def kept(self, keep: Callable[[torch.Tensor], Restore]) -> Iterator[Restore]:
        """Keep all that can be put back; yields what puts it back.

        Args:
            keep: Keeps a tensor's values.
        """
        for place, put_back in self._places():
            if put_back:
                yield _quietly(keep(place) if is_a(place, torch.Tensor) else _restore_of(place))

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
            put_back = turns_back and _known(place) not in self._drawing and _can_be_kept(place)
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
        elif is_a(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in dict.items(value) if is_a(item, torch.Tensor))


def _known(place: Any) -> Hashable:
    """By what a place is known again: names of a namespace are found anew by each walk."""
    return (id(place.of), place.names) if is_a(place, Names) else id(place)


def _can_be_kept(place: Any) -> bool:
    if is_a(place, (CellType, Names, *RANDOM)):
        return True
    if is_a(place, torch.Tensor):
        plain = type(place) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        return plain and place.layout is torch.strided and not place.is_meta and not place.is_quantized
    if is_a(place, np.ndarray):
        return type(place) is np.ndarray and place.flags.writeable
    return is_a(place, CONTAINERS) and _length(place) <= LONGEST


def _length(container: Any) -> int:
    return int(_base(container).__len__(container))


def _base(container: Any) -> Any:
    """Returns the class whose methods are called: not a subclass's, which may do more."""
    return next(kind for kind in CONTAINERS if is_a(container, kind))


def _restore_of(place: Any) -> Restore:
    """Returns what puts back the place's present contents; what is the same by then is not touched."""
    if is_a(place, CellType):
        return partial(_bind, place, cell_contents(place))
    if is_a(place, Names):
        return partial(_bind_names, place, dict(place.table))
    if is_a(place, CONTAINERS):
        return partial(_refill, place, _base(place), _items(place))
    if is_a(place, np.ndarray):
        return partial(np.copyto, place, place.copy(), casting="no")
    if is_a(place, np.random.Generator):
        return partial(setattr, place.bit_generator, "state", place.bit_generator.state)
    if is_a(place, random.Random):
        return partial(random.Random.setstate, place, random.Random.getstate(place))
    return cast("Restore", partial(place.set_state, place.get_state()))  # torch's, or numpy's old one


def _quietly(restore: Restore) -> Restore:
    """What has changed its shape, or does not let itself be written to, stays as it is: a look after the step tells."""

    def quiet() -> None:
        with suppress(Exception):
            restore()

    return quiet


def _bind(cell: CellType, contents: tuple[Any, ...]) -> None:
    if not _same(cell_contents(cell), contents):
        if contents:
            cell.cell_contents = contents[0]
        else:
            del cell.cell_contents


def _bind_names(place: Names, bound: dict[str, Any]) -> None:
    now = place.table
    for name in place.names:
        if name in bound and now.get(name, _MISSING) is not bound[name]:
            _set(place.of, name, bound[name])
        elif name not in bound and name in now:
            _set(place.of, name, _MISSING)
    if is_a(place.of, type):
        held = [name for name, value in vars(place.of).items() if name[:2] != "__" and not is_code(value)]
        for name in set(held) - set(place.names):
            _set(place.of, name, _MISSING)


def _set(of: Any, name: str, value: Any) -> None:
    if is_a(of, dict):
        if value is _MISSING:
            del of[name]
        else:
            of[name] = value
        return
    kind = type if is_a(of, type) else object  # a frozen dataclass refuses its own
    if value is _MISSING:
        kind.__delattr__(of, name)
    else:
        kind.__setattr__(of, name, value)


def _items(place: Any) -> list[Any]:
    """Returns what a container holds: a mapping's keys and values, in turn."""
    base = _base(place)
    if issubclass(base, dict):
        return [part for item in dict.items(place) for part in item]
    return list(base.__iter__(place))


def _refill(place: Any, base: Any, items: list[Any]) -> None:
    if _same(_items(place), items):
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


def _told(place: Any) -> Hashable:
    """Returns what tells a place that is not put back from itself after it has moved."""
    if is_a(place, torch.Tensor):
        return place._version, tuple(place.shape), _sample(place)  # noqa: SLF001 - there is no public name for it
    if is_a(place, np.ndarray):
        return place.shape, _sum_of(place)
    if is_a(place, CellType):
        return _named(cell_contents(place))
    if is_a(place, Names):
        return _named(place.table.get(name, _MISSING) for name in place.names)
    if is_a(place, CONTAINERS):
        return _length(place) if _length(place) > LONGEST else _named(_items(place))
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
    if not _can_be_kept(tensor) or not tensor.numel():
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
