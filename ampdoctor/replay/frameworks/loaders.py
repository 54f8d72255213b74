"""Where the random generators of DataLoaders stand, and how epochs that were gone through move them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


@dataclass(slots=True, kw_only=True, eq=False)
class RandomPlace:
    """Where the generators stood at a run's start: each of its replays draws from there.

    Attributes:
        common: The state of torch's own generator.
        own: The loaders' generators, each with its state.
    """

    common: torch.Tensor
    own: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def of(cls, loaders: list[Any]) -> RandomPlace:
        """Take it down."""
        return cls(common=torch.get_rng_state(), own=[(one, one.get_state()) for one in generators_of(loaders)])

    def restore_own(self) -> None:
        """Let the loaders' generators stand there again."""
        for generator, state in self.own:
            generator.set_state(state)

    def open(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` makes from there; torch's own generator is then where it was before this call."""
        now = torch.get_rng_state()
        torch.set_rng_state(self.common)
        self.restore_own()
        try:
            return make()
        finally:
            torch.set_rng_state(now)


def generators_of(loaders: list[Any]) -> list[torch.Generator]:
    """Returns the loaders' own generators, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        for holder in (loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def pass_over(loader: Any, taken: int | None) -> None:
    """Let a loader's own generators move as an epoch moves them, without loading anything.

    Args:
        loader: The loader; its sampler knows the epoch.
        taken: Batches that the epoch asks for; None: until there are no more, which moves a sampler once again.
    """
    if not generators_of([loader]) or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return
    if isinstance(loader.generator, torch.Generator):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as an iterator's seed is drawn
    for _ in itertools.islice(loader.batch_sampler, None if loader.num_workers else taken):  # workers ask ahead
        pass


@contextmanager
def beginning_at(loaders: list[Any], skipped: int) -> Iterator[int]:
    """Iterators that are made inside begin so many batches later, and load none of those; yields how many are left."""
    only = loaders[0] if len(loaders) == 1 else None
    sampler = getattr(only, "batch_sampler", None)
    mapped = isinstance(only, DataLoader) and not isinstance(only.dataset, IterableDataset)
    if not skipped or sampler is None or not mapped:
        yield skipped
        return
    vars(only)["batch_sampler"] = _Later(sampler, skipped)  # an initialised loader refuses the assignment
    try:
        yield 0
    finally:
        vars(only)["batch_sampler"] = sampler


class _Later:
    """A batch sampler from a later batch on."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skipped, None)

    def __len__(self) -> int:
        return len(self._sampler)
