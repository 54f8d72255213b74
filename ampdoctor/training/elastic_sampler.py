"""The order of a data set's samples, cut into the micro-batches of one rank, for a DataLoader's `batch_sampler`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import index
from typing import Any

import torch
from torch.utils.data import Sampler

from ampdoctor.errors import UsageError
from ampdoctor.training.cutting import Part, parts_of
from ampdoctor.training.windows import Count, Weighing, Window


class ElasticSampler(Sampler[list[int]]):
    """Yields the sample numbers of this rank's micro-batches, step after step; made by `ElasticBatch.sampler`.

    The order depends on `seed` and the epoch alone, and step k of an epoch has the samples k G to (k + 1) G of it (G is
    the global batch), however many ranks there are. It is that of `DistributedSampler` with the same seed, whose steps
    have the same samples, but nothing is repeated at the end of an epoch to make it even.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        accumulation: int,
        rank: int,
        weighing: Weighing,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self._length = length // global_batch * global_batch if drop_last else length
        self._samples = length
        self._global_batch = global_batch
        self._accumulation = accumulation
        self._rank = rank
        self._weighing = weighing
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._start = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, at any world size."""
        return -(-self._length // self._global_batch)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch to be iterated next.

        Args:
            epoch: Its number; each has an order of its own.
            start: The optimizer steps of it that are done already, as a checkpoint says.

        Raises:
            UsageError: The epoch has fewer steps, or one of them is no whole number.
        """
        try:
            epoch, start = index(epoch), index(start)
        except TypeError:
            raise UsageError(f"an epoch and its steps are whole numbers, not {epoch} and {start}") from None
        if not 0 <= start <= self.steps_per_epoch:
            raise UsageError(f"an epoch has {self.steps_per_epoch} steps: it cannot start at step {start}")
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        steps = self.steps_per_epoch - self._start
        if not steps:
            return 0
        return (steps - 1) * len(self._parts(self._global_batch)) + len(self._parts(self._samples_in(-1)))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step, _, parts in self._windows():
            first = step * self._global_batch
            for part in parts:
                yield order[first + part.begin : first + part.end]

    def steps(self, loader: Iterable[Any], *, count: Count | None = None) -> Iterator[Window]:
        """Yields the epoch's optimizer steps, each with its micro-batches as the loader gives them.

        Args:
            loader: The DataLoader that has this sampler as its `batch_sampler`.
            count: If given, a micro-batch's loss is a sum over what this function counts in its data, and not a mean
                over its samples; all ranks iterate together then.

        Raises:
            UsageError: The loader has another sampler, or more or fewer batches than this one.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise UsageError(
                "the loader has another batch_sampler: make it with DataLoader(..., batch_sampler=sampler)"
            )
        weighing = self._weighing.counting(count)
        batches = iter(loader)
        for step, samples, parts in self._windows():
            data = list(islice(batches, len(parts)))
            if len(data) < len(parts):
                raise UsageError(f"the loader ended in step {step}: its batches are not those of this sampler")
            yield weighing.window(step, samples, parts, data)
        if next(batches, self) is not self:
            raise UsageError("the loader has more batches than its sampler: they are not those of this sampler")

    def _windows(self) -> Iterator[tuple[int, int, list[Part]]]:
        """Yields the number, the samples and this rank's parts of each step that is left of the epoch."""
        for step in range(self._start, self.steps_per_epoch):
            samples = self._samples_in(step)
            yield step, samples, self._parts(samples)

    def _samples_in(self, step: int) -> int:
        """Returns the samples of a step; all but an epoch's last have the global batch."""
        return min(self._global_batch, self._length - step % self.steps_per_epoch * self._global_batch)

    def _parts(self, samples: int) -> list[Part]:
        cut = parts_of(samples, rank=self._rank, ranks=self._weighing.ranks, accumulation=self._accumulation)
        return list(cut)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order
