"""Passes over a DataLoader's batches by their sampler: their indices are drawn, and nothing is loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler


def samples_indices(made: Any) -> bool:
    """Is it a DataLoader whose batches are chosen by a sampler's indices?"""
    return isinstance(made, DataLoader) and not isinstance(made.dataset, IterableDataset)


def length_of(made: Any) -> int | None:
    """Returns the number of batches of an epoch; None where only drawing them tells, or nothing can be passed over."""
    return len(made) if samples_indices(made) or isinstance(made, Sequence) else None


def epochs_known_by(made: Any, *, data: bool = False) -> list[Any]:
    """Returns what is told the number of an epoch: the loader itself, its samplers and, if asked for, its dataset."""
    batches = getattr(made, "batch_sampler", None)
    holders = [made, batches, getattr(made, "sampler", None), getattr(batches, "sampler", None)]
    holders += [getattr(made, "dataset", None)] if data else []
    once = {id(holder): holder for holder in holders if callable(getattr(holder, "set_epoch", None))}
    return list(once.values())


def shuffles_by_the_process(made: Any) -> bool:
    """Does a DataLoader shuffle by torch's global generator?"""
    if not isinstance(made, DataLoader):
        return False
    samplers = (made.sampler, getattr(made.batch_sampler, "sampler", None))
    return any(isinstance(sampler, RandomSampler) and sampler.generator is None for sampler in samplers)


def play(loader: DataLoader[Any]) -> None:
    """Let a whole epoch's indices be drawn, in this process and for nothing: a generator moves on as in training."""
    skipping = Skipping(loader, len(loader))
    vars(skipping.loader).update(num_workers=0, timeout=0)
    for _ in skipping.loader:
        raise AssertionError("nothing is left of an epoch that was passed over")


class Skipping:
    """A DataLoader without its first batches.

    Args:
        loader: A DataLoader with a sampler; it stays as it is.
        count: How many batches to leave out.

    Attributes:
        loader: A shallow copy that leaves them out.
    """

    def __init__(self, loader: DataLoader[Any], count: int) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = _Behind(getattr(loader, name), count)
        self.loader = copy.copy(loader)
        vars(self.loader)[name] = self._indices  # as an attribute it refuses to be set

    def begin(self) -> None:
        """Draw the indices that are left out now, where the loader has begun to iterate: a seed is drawn with them."""
        self._indices.begin()


class _Behind:
    """A sampler's indices behind the first ones, in each iteration."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._last: _Left | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_sampler"], name)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._count, 0)

    def __iter__(self) -> Iterator[Any]:
        self._last = _Left(self._sampler, self._count)
        return self._last

    def begin(self) -> None:
        if self._last is not None:
            self._last.begin()


class _Left:
    """An iterator whose first items are drawn and dropped before its first one is asked for, or at `begin`."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._indices: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        if self._indices is None:
            self._indices = iter(self._sampler)
            for _ in range(self._count):
                next(self._indices, None)
        return self._indices

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.begin())
