"""The micro-batches of one optimizer step, each with the weight of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ampdoctor.errors import UsageError
from ampdoctor.training.cutting import Part

Count = Callable[[Any], Any]
"""How many things a micro-batch's loss is summed over: the tokens whose label is not ignored, say. A whole number, or a
tensor of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward takes.

    Attributes:
        data: The samples.
        weight: The factor of its loss.
        last: True for the rank's last one in this step: the only one whose backward needs to reduce.
    """

    data: Any
    weight: float
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One optimizer step of this rank; iterates over its micro-batches.

    Attributes:
        step: Its number in the epoch, the same on every rank and at every world size.
        samples: How many samples all ranks together see: the global batch, or what is left of the epoch.
        micro_batches: This rank's.
    """

    step: int
    samples: int
    micro_batches: tuple[MicroBatch, ...]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How losses are weighted so that the mean over ranks of the summed gradients is that of the whole step.

    Attributes:
        ranks: D, over which DDP and FSDP take the mean.
        group: Their process group; None for the default one.
        count: None: a loss is a mean over samples, and its weight D n / k for n of the step's k samples. Otherwise a
            loss is a sum over what `count` counts, and its weight D / N for the N of all micro-batches of all ranks.
    """

    ranks: int
    group: dist.ProcessGroup | None
    count: Count | None = None

    def counting(self, count: Count | None) -> Weighing:
        """Returns the same with another count.

        Raises:
            UsageError: Several ranks are to be counted together, and they have not joined a process group.
        """
        if count is not None and self.ranks > 1 and not (dist.is_available() and dist.is_initialized()):
            raise UsageError("counting over several ranks needs torch.distributed.init_process_group() before it")
        return replace(self, count=count)

    def window(self, step: int, samples: int, parts: Sequence[Part], data: Sequence[Any]) -> Window:
        """Returns the step; where things are counted, all ranks have to come here together.

        Args:
            step: Its number.
            samples: k.
            parts: This rank's parts.
            data: What is in them.
        """
        weights = self._by_samples(samples, parts) if self.count is None else self._by_count(self.count, parts, data)
        last = len(parts) - 1
        made = zip(data, weights, strict=True)
        return Window(
            step=step,
            samples=samples,
            micro_batches=tuple(
                MicroBatch(data=value, weight=weight, last=index == last) for index, (value, weight) in enumerate(made)
            ),
        )

    def _by_samples(self, samples: int, parts: Sequence[Part]) -> list[float]:
        return [self.ranks * (part.end - part.begin) * part.counts / samples for part in parts]

    def _by_count(self, count: Count, parts: Sequence[Part], data: Sequence[Any]) -> list[float]:
        own = sum(_whole(count(value)) for value, part in zip(data, parts, strict=True) if part.counts)
        total = self._of_all_ranks(own)
        # a step in which nothing counts is the mean of nothing, and moves nothing
        return [self.ranks / total if part.counts and total else 0.0 for part in parts]

    def _of_all_ranks(self, own: int) -> int:
        if self.ranks == 1:
            return own
        found: list[int] = [0] * self.ranks
        dist.all_gather_object(found, own, group=self.group)  # objects, because only the backend knows its device
        return sum(found)


def _whole(counted: Any) -> int:
    """Returns what `count` has counted; a fraction is refused, because the weight 1 / N of a rounded N is wrong."""
    try:
        number = counted.item() if hasattr(counted, "item") else counted
    except (RuntimeError, ValueError):  # a tensor or an array of several numbers
        number = None
    is_whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
    if not is_whole or isinstance(number, bool) or number < 0:
        said = f"a {type(counted).__name__} of several" if hasattr(counted, "item") and number is None else repr(number)
        raise UsageError(f"count gives a whole number of at least 0 for each micro-batch, not {said}")
    return int(number)
