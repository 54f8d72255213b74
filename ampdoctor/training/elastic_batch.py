"""The same global batch on any number of ranks: sampler, micro-batches, weights of losses."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from types import UnionType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ampdoctor.batching.plans import exact_plans, within_bounds
from ampdoctor.errors import UsageError
from ampdoctor.hooks.nested import iter_tensors, map_kind

# -- the samples of each rank's micro-batches --


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRange:
    """The samples of one micro-batch, `begin` to `end`, counted from the step's first.

    `counts` is False where a small last step leaves a rank without a sample: its part repeats the first sample with
    weight 0, so that the rank takes part in the reduce.
    """

    begin: int
    end: int
    counts: bool = True


def parts_of(samples: int, *, rank: int, ranks: int, accumulation: int) -> Iterator[SampleRange]:
    """Yields a rank's micro-batches of a step with this many samples (at least 1).

    The step is cut into ranks x accumulation slots that differ by at most one sample, and ranks take them in order: all
    clusters with the same product cut the same micro-batches, also in a smaller last step. A slot without a sample is
    no micro-batch. `accumulation` is the most micro-batches of a rank.
    """
    slots, empty = ranks * accumulation, True
    for slot in range(rank * accumulation, (rank + 1) * accumulation):
        begin, end = samples * slot // slots, samples * (slot + 1) // slots
        if begin < end:
            empty = False
            yield SampleRange(begin=begin, end=end)
    if empty:
        yield SampleRange(begin=0, end=1, counts=False)


# -- micro-batches with the weights of their losses --

Count = Callable[[Any], Any]
"""Returns how many items a micro-batch's loss is summed over, for example tokens whose label is not ignored: a whole
number, or a tensor of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward and backward.

    Attributes:
        data: The samples.
        weight: The factor of its loss.
        last: True for the rank's last one in this step: only its backward needs to reduce.
    """

    data: Any
    weight: float
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """One optimizer step of this rank; iterates over its micro-batches.

    Attributes:
        step: Its number in the epoch, the same on every rank and at every world size.
        samples: The samples of all ranks together: the global batch, or the rest of the epoch.
        micro_batches: This rank's.
    """

    step: int
    samples: int
    micro_batches: tuple[MicroBatch, ...]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def _whole(counted: Any) -> int:
    """Returns the result of `count` as an integer; raises for a fraction, because the weight is exactly 1 / N."""
    try:
        number = math.nan if isinstance(counted, bool | str) else float(counted)
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array of several numbers
        number = math.nan
    if not number.is_integer() or number < 0:
        raise UsageError(f"count gives a whole number of at least 0 for each micro-batch, not {counted!r}")
    return int(number)


# -- sampler --


class ElasticSampler(Sampler[list[int]]):
    """Yields the sample numbers of this rank's micro-batches, step after step; made by `ElasticBatch.sampler`.

    The order depends only on `seed` and the epoch, and step k of an epoch has its samples k G to (k + 1) G (G is the
    global batch), with any number of ranks. It is the order of `DistributedSampler` with the same seed, whose steps
    have the same samples; but no sample is repeated to make the end of an epoch even.
    """

    def __init__(self, batch: ElasticBatch, length: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self._batch = batch
        self._length = length // batch.global_batch * batch.global_batch if drop_last else length
        self._samples = length
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._start = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, at any world size."""
        return -(-self._length // self._batch.global_batch)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the next epoch.

        Args:
            epoch: Its number; each has an order of its own.
            start: The optimizer steps of it that are already done, from the checkpoint.

        Raises:
            UsageError: The epoch has fewer steps, or one of the numbers is not whole.
        """
        epoch, start = _number("an epoch", epoch), _number("start", start)
        if not 0 <= start <= self.steps_per_epoch:
            raise UsageError(f"an epoch has {self.steps_per_epoch} steps: it cannot start at step {start}")
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        return sum(len(parts) for _, _, parts in self._windows())

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step, _, parts in self._windows():
            first = step * self._batch.global_batch
            for part in parts:
                yield order[first + part.begin : first + part.end]

    def steps(self, loader: Iterable[Any], *, count: Count | None = None) -> Iterator[StepBatches]:
        """Yields the epoch's optimizer steps, each with its micro-batches as the loader returns them.

        Args:
            loader: The DataLoader that has this sampler as its `batch_sampler`.
            count: If given, a micro-batch's loss is a sum over the items that this function counts in its data, not a
                mean over its samples; then all ranks must iterate together.

        Raises:
            UsageError: The loader has another sampler, or more or fewer batches than this one.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise UsageError(
                "the loader has another batch_sampler: make it with DataLoader(..., batch_sampler=sampler)"
            )
        self._batch.refuse_count(count)
        batches = iter(loader)
        for step, samples, parts in self._windows():
            data = list(islice(batches, len(parts)))
            if len(data) < len(parts):
                raise UsageError(f"the loader ended in step {step}: its batches are not those of this sampler")
            yield self._batch.window(step, samples, parts, data, count)
        if next(batches, self) is not self:
            raise UsageError("the loader has more batches than its sampler: they are not those of this sampler")

    def _windows(self) -> Iterator[tuple[int, int, list[SampleRange]]]:
        """Yields the number, the samples and this rank's parts of each step that is left in the epoch."""
        most = self._batch.global_batch
        for step in range(self._start, self.steps_per_epoch):
            samples = min(most, self._length - step * most)
            yield step, samples, self._batch.parts(samples)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order


_NUMBER = re.compile("[0-9]{1,9}")
"""A rank or world size, as torchrun writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBatch:
    """A global batch, cut for the present ranks; made by `elastic_batch`.

    Attributes:
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: The most samples of one forward and backward.
        accumulation: The most micro-batches of one step on one rank.
        data_parallel: The number of ranks.
        rank: This one.
        group: Their process group; None for the default one.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int
    rank: int
    group: dist.ProcessGroup | None = None

    def sampler(self, data: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> ElasticSampler:
        """Returns a `batch_sampler` for a DataLoader over `data`, which loads only what this rank needs.

        Args:
            data: The data set; only its length matters.
            shuffle: Every epoch has an order of its own, that of `DistributedSampler` with this seed.
            seed: The same on every rank and after every restart.
            drop_last: Leave out the samples that do not fill a step; otherwise the last step of an epoch is smaller.

        Raises:
            UsageError: There is no sample, or with `drop_last` no whole step.
        """
        length = len(data)
        if length < (self.global_batch if drop_last else 1):
            raise UsageError(f"{length} samples fill no step of {self.global_batch}")
        return ElasticSampler(self, length, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def steps(self, batches: Iterable[Any], *, count: Count | None = None, start: int = 0) -> Iterator[StepBatches]:
        """Cuts batches of a whole optimizer step, from a stream or a list that is the same on every rank.

        Every rank loads every batch. Where the data can be indexed, `sampler` avoids that.

        Args:
            batches: Nested tensors of any shape whose first dimension is the samples: `global_batch` of them, or fewer
                in the last one. Lists of the same length without tensors are cut too, and so are tuples of as many
                strings (the texts of a batch after a collate). A tensor without dimensions, and any other object, goes
                to every micro-batch.
            count: As for `ElasticSampler.steps`.
            start: Number of the first step.

        Raises:
            UsageError: A batch is larger, or smaller and not the last, or its tensors differ in their first dimension.
        """
        self.refuse_count(count)
        short: int | None = None
        for step, batch in enumerate(batches, start):
            if short is not None:
                raise UsageError(
                    f"the batch of step {step - 1} has {short} samples of {self.global_batch} and is not the last"
                )
            samples = _samples_in(batch)
            if samples > self.global_batch:
                raise UsageError(f"the batch of step {step} has {samples} samples, more than {self.global_batch}")
            short = samples if samples < self.global_batch else None
            parts = self.parts(samples)
            yield self.window(step, samples, parts, [_part_of(batch, part, samples) for part in parts], count)

    def parts(self, samples: int) -> list[SampleRange]:
        """Returns this rank's micro-batches of a step."""
        cut = parts_of(samples, rank=self.rank, ranks=self.data_parallel, accumulation=self.accumulation)
        return list(cut)

    def refuse_count(self, count: Count | None) -> None:
        """Raises UsageError for a count over several ranks without a process group."""
        if count is not None and self.data_parallel > 1 and not (dist.is_available() and dist.is_initialized()):
            raise UsageError("counting over several ranks needs torch.distributed.init_process_group() before it")

    def window(
        self, step: int, samples: int, parts: Sequence[SampleRange], data: Sequence[Any], count: Count | None
    ) -> StepBatches:
        """Returns the step from this rank's parts and their data; with a count, all ranks must call it together.

        DDP and FSDP take the mean over the D ranks. Without a count, a loss is a mean over samples, and its weight
        D n / k for n of the step's k samples. With it, a loss is a sum over the items that `count` counts, and its
        weight D / N for the N items of all micro-batches of all ranks.
        """
        ranks = self.data_parallel
        if count is None:
            weights = [ranks * (part.end - part.begin) * part.counts / samples for part in parts]
        else:
            own = sum(_whole(count(value)) for value, part in zip(data, parts, strict=True) if part.counts)
            total = self._of_all_ranks(own)
            # a step in which nothing counts changes nothing
            weights = [ranks / total if part.counts and total else 0.0 for part in parts]
        last = len(parts) - 1
        made = enumerate(zip(data, weights, strict=True))
        micro_batches = tuple(MicroBatch(data=one, weight=weight, last=at == last) for at, (one, weight) in made)
        return StepBatches(step=step, samples=samples, micro_batches=micro_batches)

    def _of_all_ranks(self, own: int) -> int:
        if self.data_parallel == 1:
            return own
        found: list[int] = [0] * self.data_parallel
        dist.all_gather_object(found, own, group=self.group)  # objects, because only the backend knows its device
        return sum(found)


def elastic_batch(global_batch: int, max_micro_batch: int, *, group: dist.ProcessGroup | None = None) -> ElasticBatch:
    """Cut a global batch for the present ranks: call it where the job starts, and again after each restart.

    The number of ranks is that of `group`, else of the default process group, else of torchrun's variables (RANK and
    WORLD_SIZE), else 1. Where it divides the global batch, micro-batch and accumulation are the exact plan with the
    largest micro-batch. Where it does not, ranks differ by one sample, and the weights of the losses correct for that.
    No sample is repeated, left out or rounded away.

    A loop iterates over `sampler.steps(loader)` (or `steps` of this object), and for each micro-batch runs the backward
    of `loss * micro.weight`. With DDP or FSDP, which take the mean over ranks, the gradient is then that of the mean
    loss over the step's samples, at any world size and also in a smaller last step.

    Args:
        global_batch: Samples of one optimizer step over all ranks.
        max_micro_batch: The most samples that a device holds at once.
        group: The data parallel group, where ranks share a model (tensor, pipeline or context parallel).

    Raises:
        UsageError: A number is not whole, is below 1, or so large that it must be in tokens; there are more ranks than
            samples; or RANK and WORLD_SIZE are not those of a process.
    """
    global_batch, max_micro_batch = _number("global_batch", global_batch), _number("max_micro_batch", max_micro_batch)
    if global_batch < 1 or max_micro_batch < 1:
        raise UsageError(f"batches start at 1 sample, not {min(global_batch, max_micro_batch)}")
    within_bounds(global_batch)
    ranks, rank = _ranks(group)
    if ranks > global_batch:
        raise UsageError(f"a global batch of {global_batch} leaves some of {ranks} ranks without a sample")
    exact = exact_plans(global_batch, ranks, max_micro_batch)
    accumulation = exact[0].accumulation if exact else -(-global_batch // (ranks * max_micro_batch))
    return ElasticBatch(
        global_batch=global_batch,
        micro_batch=-(-global_batch // (ranks * accumulation)),
        accumulation=accumulation,
        data_parallel=ranks,
        rank=rank,
        group=group,
    )


def _number(name: str, value: Any) -> int:
    """Checks a whole number, which may come from numpy or torch."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name} is a whole number, not {value!r}")


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        if rank < 0:
            raise UsageError("this process is not in the group: each takes the group that it belongs to")
        return dist.get_world_size(group), rank
    known, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not known and not size:
        return 1, 0
    known, size = known or "", size or ""
    if not (_NUMBER.fullmatch(known) and _NUMBER.fullmatch(size) and int(known) < int(size)):
        raise UsageError(f"RANK={known} and WORLD_SIZE={size} name no process of a group: unset them, or run torchrun")
    return int(size), int(known)


def _samples_in(batch: Any) -> int:
    found = {path: tensor.shape[0] for path, tensor in iter_tensors(batch) if tensor.dim()}
    if not found:
        raise UsageError(f"a batch holds tensors whose first dimension is the samples; {type(batch).__name__} has none")
    if len(set(found.values())) > 1:
        named = ", ".join(f"{path or 'the batch'}: {samples}" for path, samples in found.items())
        raise UsageError(f"the tensors of a batch differ in their number of samples ({named})")
    samples = next(iter(found.values()))
    if not samples:
        raise UsageError("a batch has no sample")
    return samples


def _part_of(batch: Any, part: SampleRange, samples: int) -> Any:
    kinds: type | UnionType = torch.Tensor | list | tuple

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[part.begin : part.end] if value.dim() else value
        if _of_samples(value, samples):
            return value[part.begin : part.end]
        make = getattr(type(value), "_make", type(value))  # a named tuple's constructor takes single fields
        return make([map_kind(kinds, cut, item) for item in value])

    return map_kind(kinds, cut, batch)


def _of_samples(value: Any, samples: int) -> bool:
    """Whether a list or tuple has one item for each sample: torch's collate makes tuples of texts, others make lists.

    A tuple of other values (a height and a width) is one value, and a list with tensors is part of the batch's
    structure.
    """
    if len(value) != samples or next(iter_tensors(value), None) is not None:
        return False
    return isinstance(value, list) or all(isinstance(item, str | bytes) for item in value)
