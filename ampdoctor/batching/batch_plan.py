"""How one optimizer step's batch is cut into what a device sees at once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`data_parallel` ranks, each of which runs `accumulation` micro-batches of `micro_batch` samples before a step."""

    micro_batch: int
    accumulation: int
    data_parallel: int

    @property
    def global_batch(self) -> int:
        """The samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.data_parallel


def exact_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """All plans whose product is `global_batch` exactly, the largest micro-batch first.

    There is none if `data_parallel` does not divide `global_batch`.
    """
    each, left = divmod(global_batch, data_parallel)
    if left:
        return ()
    small = [size for size in range(1, math.isqrt(each) + 1) if each % size == 0]
    sizes = sorted({*small, *(each // size for size in small)}, reverse=True)
    return tuple(
        BatchPlan(micro_batch=micro, accumulation=each // micro, data_parallel=data_parallel)
        for micro in sizes
        if micro <= max_micro_batch
    )
