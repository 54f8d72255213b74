"""Where no plan is exact: the plans of the nearest batches, and fewer ranks on which one is."""

from __future__ import annotations

from ampdoctor.batching.batch_plan import BatchPlan, exact_plans


def nearest_plans(global_batch: int, data_parallel: int, max_micro_batch: int) -> tuple[BatchPlan, ...]:
    """Returns the plans of the nearest multiples of `data_parallel` below and above, nearest first.

    Of plans that are as far off, the one below comes first, then the larger micro-batch. Every batch that the ranks can
    share evenly is a multiple of their number: no other plan is nearer.
    """
    below = global_batch // data_parallel * data_parallel
    reachable = [batch for batch in (below, below + data_parallel) if batch]
    plans = [plan for batch in reachable for plan in exact_plans(batch, data_parallel, max_micro_batch)]
    return tuple(
        sorted(plans, key=lambda plan: (abs(plan.global_batch - global_batch), plan.global_batch, -plan.micro_batch))
    )


def most_ranks_that_divide(global_batch: int, data_parallel: int) -> int:
    """Returns the most data parallel ranks, up to `data_parallel`, that share the batch evenly."""
    return next(ranks for ranks in range(min(data_parallel, global_batch), 0, -1) if global_batch % ranks == 0)
