"""What the optimizer steps of Lightning's Trainer take, in its order, from any of its steps on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampdoctor.errors import FactoryError


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step takes.

    Attributes:
        batches: The micro-batches.
        epoch: The epoch, from 0.
        index: Batches of the epoch that came before.
        number: Updates that came before, in all epochs.
        closes: It is the last of its epoch.
        first: It is the first of a replay.
    """

    batches: list[Any]
    epoch: int
    index: int
    number: int
    closes: bool
    first: bool


@dataclass(slots=True, kw_only=True, eq=False)
class RandomPlace:
    """Where the generators stood when the Trainer made the first epoch's iterator: each replay makes it from there.

    Attributes:
        common: The state of torch's own generator.
        own: The loaders' generators, each with its state.
    """

    common: torch.Tensor
    own: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def of(cls, loaders: list[Any]) -> RandomPlace:
        """Take it down."""
        return cls(common=torch.get_rng_state(), own=[(one, one.get_state()) for one in _generators(loaders)])

    def open(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` makes; torch's own generator then stands where it stood before this call."""
        now = torch.get_rng_state()
        torch.set_rng_state(self.common)
        for generator, state in self.own:
            generator.set_state(state)
        try:
            return make()
        finally:
            torch.set_rng_state(now)


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        for holder in (loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


@dataclass(slots=True, kw_only=True, eq=False)
class Position:
    """A Trainer at the start of its training.

    Attributes:
        fetcher: Makes what fetches an epoch's batches from the Trainer's combined loader.
        set_epoch: Tells a loader's sampler the epoch.
        random: Where the generators stood.
        length: Batches in an epoch; infinite where nobody knows.
        accumulate: Micro-batches of an update, by epoch.
        max_epochs: Epochs of the training; -1: no end.
        max_steps: Optimizer steps of the training; -1: no end.
        steps: Optimizer steps that an update counts as: several where each of several optimizers steps.
        epoch: The epoch in which the Trainer stands: not 0 where it has resumed a checkpoint itself.
        index: Batches of this epoch that it counts as seen.
        number: Updates that it counts.
    """

    fetcher: Callable[[Any], Any]
    set_epoch: Callable[[Any, int], None]
    random: RandomPlace
    length: float
    accumulate: Callable[[int], int]
    max_epochs: int
    max_steps: int
    steps: int = 1
    epoch: int = 0
    index: int = 0
    number: int = 0

    def updates(self, loader: Any, start: int = 0) -> Iterator[Update]:
        """Yields the updates.

        Args:
            loader: The Trainer's combined loader.
            start: Optimizer steps that a checkpoint holds; 0: those that the Trainer itself has resumed.

        Raises:
            FactoryError: The training ends before the first of them.
        """
        epoch, index, number, skipped = self.epoch, self.index, self.number, 0
        begin = start // self.steps if start else number
        if start and math.isinf(self.length):
            epoch = index = number = 0  # nobody knows where an epoch ends: all are drawn
        elif start:
            number = begin
            epoch, index = self._place(number)
            skipped = index
        if self._is_over(epoch, number):
            limit = f"max_epochs={self.max_epochs}" if self.max_steps < 0 else f"max_steps={self.max_steps}"
            raise FactoryError(
                f"the checkpoint stands at step {number * self.steps}, where Trainer({limit}) ends: "
                f"raise the limit to replay what comes next"
            )
        for gone in range(epoch if start else 0):  # the generators move as in the epochs before
            self._pass_over(loader, gone)
        opened = False
        while not self._is_over(epoch, number):
            fetched = self._fetched(loader, epoch, skipped, anew=opened or bool(start and epoch))
            opened, empty = True, True
            for batches, closes in self._grouped(fetched, epoch, index):
                empty, first = False, number == begin
                if number >= begin:
                    yield Update(
                        batches=batches, epoch=epoch, index=index, number=number, closes=closes, first=first
                    )
                index += len(batches)
                number += 1
                if 0 <= self.max_steps <= number * self.steps:
                    return
            if empty:
                return
            epoch, index, skipped = epoch + 1, 0, 0

    def _is_over(self, epoch: int, number: int) -> bool:
        return 0 <= self.max_epochs <= epoch or 0 <= self.max_steps <= number * self.steps

    def _place(self, number: int) -> tuple[int, int]:
        """Returns the epoch and the batch in it with which an update begins."""
        for epoch in itertools.count():
            per_epoch = math.ceil(self.length / self.accumulate(epoch))
            if number < per_epoch:
                return epoch, number * self.accumulate(epoch)
            number -= per_epoch
        raise AssertionError("an endless count has ended")

    def _fetched(self, loader: Any, epoch: int, skipped: int, *, anew: bool) -> Any:
        """Returns what fetches an epoch's batches, those that are skipped already behind it."""
        loaders = loader.flattened
        for one in loaders:
            self.set_epoch(one, epoch)

        def make() -> Any:
            return iter(self.fetcher(loader))

        with _beginning_at(loaders, skipped) as left:
            fetcher = make() if anew else self.random.open(make)
        for _ in range(left):
            next(fetcher, None)
        return fetcher

    def _pass_over(self, loader: Any, epoch: int) -> None:
        """Let the loaders' own generators move as an epoch moves them, without loading anything."""
        for one in loader.flattened:
            if not _generators([one]) or not isinstance(one, DataLoader) or one.batch_sampler is None:
                continue
            if epoch == 0:
                for generator, state in self.random.own:
                    generator.set_state(state)
            self.set_epoch(one, epoch)
            if isinstance(one.generator, torch.Generator):
                torch.empty((), dtype=torch.int64).random_(generator=one.generator)  # as an iterator's seed is drawn
            # workers ask for a batch ahead, and so draw what a sampler draws behind its last
            taken = None if one.num_workers or math.isinf(self.length) else int(self.length)
            for _ in itertools.islice(one.batch_sampler, taken):
                pass

    def _grouped(self, fetcher: Any, epoch: int, index: int) -> Iterator[tuple[list[Any], bool]]:
        """Yields the micro-batches of each update, and whether the epoch ends with it."""
        group: list[Any] = []
        for batch, _, _ in iter(partial(next, fetcher, None), None):  # a `for` over it would begin anew
            group.append(batch)
            index += 1
            closes = fetcher.done or index == self.length
            if closes or index % self.accumulate(epoch) == 0:
                yield group, closes
                group = []
            if closes:
                return


@contextmanager
def _beginning_at(loaders: list[Any], skipped: int) -> Iterator[int]:
    """Iterators that are made inside begin so many batches later, and load none of those; yields how many are left."""
    only = loaders[0] if len(loaders) == 1 else None
    sampler = getattr(only, "batch_sampler", None)
    if not skipped or sampler is None or not isinstance(only, DataLoader) or isinstance(only.dataset, IterableDataset):
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
