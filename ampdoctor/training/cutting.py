"""Which samples of an optimizer step belong to which rank, and to which of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The samples of one micro-batch, `begin` to `end`, counted from the step's first.

    Attributes:
        counts: False for a rank that a small last window leaves without a sample: its part repeats the first one, so
            that it takes part in the reduce, with weight 0.
    """

    begin: int
    end: int
    counts: bool = True


def parts_of(samples: int, *, rank: int, ranks: int, accumulation: int) -> Iterator[Part]:
    """Yields a rank's micro-batches of a step that has this many samples.

    The step is cut into ranks x accumulation slots that differ by one sample at most, and ranks take them in order: a
    cluster on which that product is the same cuts the same micro-batches, in a last step that is smaller as well. A
    slot without a sample is no micro-batch.

    Args:
        samples: Of the whole step, at least 1: the global batch, or less at the end of the data.
        rank: From 0.
        ranks: The number of data parallel ranks.
        accumulation: The most micro-batches of a rank.
    """
    slots, empty = ranks * accumulation, True
    for slot in range(rank * accumulation, (rank + 1) * accumulation):
        begin, end = samples * slot // slots, samples * (slot + 1) // slots
        if begin < end:
            empty = False
            yield Part(begin=begin, end=end)
    if empty:
        yield Part(begin=0, end=1, counts=False)
