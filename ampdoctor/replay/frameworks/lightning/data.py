"""What the optimizer steps of Lightning's Trainer take, in its order, from any of its steps on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.loaders import RandomPlace, beginning_at, pass_over


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
        if start and epoch:
            self._pass_over(loader, epoch)
        opened = False
        while not self._is_over(epoch, number):
            fetched = self._fetched(loader, epoch, skipped, anew=opened or bool(start and epoch))
            opened, empty = True, True
            for batches, closes in self._grouped(fetched, epoch, index):
                empty, first = False, number == begin
                if number >= begin:
                    yield Update(batches=batches, epoch=epoch, index=index, number=number, closes=closes, first=first)
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

        with beginning_at(loaders, skipped) as left:
            fetcher = make() if anew else self.random.open(make)
        for _ in range(left):
            next(fetcher, None)
        return fetcher

    def _pass_over(self, loader: Any, epochs: int) -> None:
        """Let the loaders' generators move as in the epochs before."""
        self.random.restore_own()
        for epoch in range(epochs):
            for one in loader.flattened:
                self.set_epoch(one, epoch)
                pass_over(one, None if math.isinf(self.length) else int(self.length))

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
