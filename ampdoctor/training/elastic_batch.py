"""The same global batch on whatever number of ranks a job wakes up with."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from types import UnionType
from typing import Any

import torch
import torch.distributed as dist

from ampdoctor.batching.batch_plan import BatchPlan, exact_plans
from ampdoctor.batching.in_force import within_bounds
from ampdoctor.errors import UsageError
from ampdoctor.hooks.nested import iter_tensors, map_kind
from ampdoctor.training.cutting import Part, parts_of
from ampdoctor.training.elastic_sampler import ElasticSampler
from ampdoctor.training.windows import Count, Weighing, Window

_NUMBER = re.compile("[0-9]{1,9}")
"""Of a process, as torchrun writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBatch:
    """A global batch, cut for the ranks that are there; made by `elastic_batch`.

    Attributes:
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: The most samples of one forward and backward.
        accumulation: The most micro-batches of one step on one rank.
        data_parallel: Ranks.
        rank: This one.
        group: Their process group; None for the default one.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def plan(self) -> BatchPlan | None:
        """The plan in terms of `ampdoctor plan`; None if ranks do not divide the batch, and so differ by a sample."""
        if self.global_batch % self.data_parallel:
            return None
        return BatchPlan(micro_batch=self.micro_batch, accumulation=self.accumulation, data_parallel=self.data_parallel)

    def sampler(self, data: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> ElasticSampler:
        """Returns a `batch_sampler` for a DataLoader over `data`, which loads what this rank needs and nothing else.

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
        return ElasticSampler(
            length,
            global_batch=self.global_batch,
            accumulation=self.accumulation,
            rank=self.rank,
            weighing=self._weighing,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def steps(self, batches: Iterable[Any], *, count: Count | None = None, start: int = 0) -> Iterator[Window]:
        """Cut batches that hold a whole optimizer step, the same ones on every rank, as a stream or a list gives them.

        Every rank loads every batch; `sampler` does not, where the data can be indexed.

        Args:
            batches: Nested tensors of any shape whose first dimension is the samples: `global_batch` of them, or fewer
                in the last one. Lists of as many items, none of which holds a tensor, are cut as well, and so are
                tuples of as many strings: the texts of a batch, as a collate leaves them. A tensor without dimensions,
                and whatever else is no tensor, goes to every micro-batch.
            count: As for `ElasticSampler.steps`.
            start: Number of the first step.

        Raises:
            UsageError: A batch is larger, or smaller and not the last, or its tensors differ in their first dimension.
        """
        weighing = self._weighing.counting(count)
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
            cut = parts_of(samples, rank=self.rank, ranks=self.data_parallel, accumulation=self.accumulation)
            parts = list(cut)
            yield weighing.window(step, samples, parts, [_part_of(batch, part, samples) for part in parts])

    @property
    def _weighing(self) -> Weighing:
        return Weighing(ranks=self.data_parallel, group=self.group)


def elastic_batch(global_batch: int, max_micro_batch: int, *, group: dist.ProcessGroup | None = None) -> ElasticBatch:
    """Cut a global batch for the ranks that are there: call it where the job starts, and again after each restart.

    The number of ranks is that of `group`, else of the default process group, else what torchrun has set (RANK and
    WORLD_SIZE), else 1. Where they divide the global batch, micro-batch and accumulation are the exact plan with the
    largest micro-batch; where they do not, ranks differ by one sample, and the weights of the losses make up for it. No
    sample is repeated, left out or rounded away.

    A loop takes `for step in sampler.steps(loader)` (or `steps` of this object), and for each of its micro-batches the
    backward of `loss * micro.weight`. With DDP or FSDP, which take the mean over ranks, the gradient is then that of
    the mean loss over the step's samples, at any world size and in a last step that is smaller.

    Args:
        global_batch: Samples of one optimizer step over all ranks.
        max_micro_batch: The most samples that a device holds at once.
        group: The data parallel group, where ranks share a model (tensor, pipeline or context parallel).

    Raises:
        UsageError: No whole number, one below 1 or of tokens, more ranks than samples, or RANK and WORLD_SIZE that name
            no process.
    """
    global_batch, max_micro_batch = _samples("global_batch", global_batch), _samples("max_micro_batch", max_micro_batch)
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


def _samples(name: str, value: Any) -> int:
    """Returns a number of samples, which numpy and torch may have made."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name} is a whole number of samples, not {value!r}")


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns the number of ranks and this one."""
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


def _part_of(batch: Any, part: Part, samples: int) -> Any:
    kinds: type | UnionType = torch.Tensor | list | tuple

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[part.begin : part.end] if value.dim() else value
        if _of_samples(value, samples):
            return value[part.begin : part.end]
        make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields apart
        return make([map_kind(kinds, cut, item) for item in value])

    return map_kind(kinds, cut, batch)


def _of_samples(value: Any, samples: int) -> bool:
    """Whether a list or tuple has an item a sample: torch's collate makes them of texts, and others of what they like.

    A tuple of other things (a height and a width) is one value, and a list with tensors in it is a batch's own shape.
    """
    if len(value) != samples or next(iter_tensors(value), None) is not None:
        return False
    return isinstance(value, list) or all(isinstance(item, str | bytes) for item in value)
