"""The plan that is in force, from as much of it as is said."""

from __future__ import annotations

from ampdoctor.batching.batch_plan import BatchPlan, exact_plans
from ampdoctor.batching.cluster import Cluster
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import UsageError

MAX_GLOBAL_BATCH = 1 << 24
"""Samples of a step: beyond it somebody has counted tokens."""
GIVEN = "micro-batch and accumulation as given"
DERIVED = "one of micro-batch and accumulation as given, and the other derived"
ASSUMED = "taken to be the largest micro-batch that fits and divides; --micro-batch says otherwise"


def in_force(said: BatchSettings, data_parallel: int | None, most: int | None) -> tuple[BatchPlan | None, str]:
    """Returns the plan before and where it is known from; None if nothing is said of a cluster before.

    Args:
        said: What is known of the batch.
        data_parallel: Ranks of the cluster before that see other samples.
        most: The largest micro-batch that fits a device there, if that is known.

    Raises:
        UsageError: What is said contradicts itself, or no plan on that cluster gives the batch.
    """
    _counted(said)
    if data_parallel is None:
        return None, ""
    micro, steps, batch = said.micro_batch, said.accumulation, said.global_batch
    if micro is not None and steps is not None:
        return _checked(BatchPlan(micro_batch=micro, accumulation=steps, data_parallel=data_parallel), batch), GIVEN
    if batch is None:
        raise UsageError(
            "the global batch is not known: --global-batch says it, or --micro-batch and --accumulation beside --gpus"
        )
    shared = f"{batch} samples over {data_parallel} data parallel ranks"
    if micro is not None:
        each, left = divmod(batch, data_parallel * micro)
        if left or not each:
            raise UsageError(f"{shared} are no whole number of micro-batches of {micro}: that is not what is in force")
        return BatchPlan(micro_batch=micro, accumulation=each, data_parallel=data_parallel), DERIVED
    if steps is not None:
        each, left = divmod(batch, data_parallel * steps)
        if left or not each:
            raise UsageError(f"{shared} are not cut into {steps} micro-batches evenly: that is not what is in force")
        return BatchPlan(micro_batch=each, accumulation=steps, data_parallel=data_parallel), DERIVED
    if batch % data_parallel:
        raise UsageError(
            f"{shared} are not even, which no job has in force: check --global-batch and --gpus, or leave --gpus "
            "out to plan for --to-gpus alone"
        )
    plans = exact_plans(batch, data_parallel, batch if most is None else most)
    if not plans:
        raise UsageError("not one sample fits a device of the job in force: check its memory, or say its --micro-batch")
    return plans[0], ASSUMED


def is_only_asked(said: BatchSettings, before: Cluster | None, after: Cluster) -> bool:
    """Whether nothing is in force: one cluster is named, nothing says how it cuts the batch, and it cannot evenly.

    Such a job there is not; somebody asks what this cluster can do.
    """
    cut = said.micro_batch is not None or said.accumulation is not None
    batch = said.global_batch
    return before == after and not cut and batch is not None and batch > 0 and batch % after.data_parallel > 0


def global_batch_of(said: BatchSettings, plan: BatchPlan | None) -> int:
    """Returns the batch that is to be kept.

    Raises:
        UsageError: Nobody has said it, or it counts tokens.
    """
    batch = said.global_batch if plan is None else plan.global_batch
    if batch is None:
        raise UsageError(
            "the global batch is not known: --global-batch says it, or --micro-batch and --accumulation beside --gpus"
        )
    return within_bounds(batch)


def within_bounds(batch: int) -> int:
    """Returns a global batch that can be one: of larger ones not even the divisors are asked.

    Raises:
        UsageError: It counts tokens.
    """
    if batch > MAX_GLOBAL_BATCH:
        raise UsageError(f"a global batch of {batch} is beyond {MAX_GLOBAL_BATCH}: it counts samples, not tokens")
    return batch


def _counted(said: BatchSettings) -> None:
    for name, value in (
        ("global batch", said.global_batch),
        ("micro-batch", said.micro_batch),
        ("accumulation", said.accumulation),
    ):
        if value is not None and value < 1:
            raise UsageError(f"the {name} starts at 1, not {value}")
    if said.global_batch is not None:
        within_bounds(said.global_batch)


def _checked(plan: BatchPlan, batch: int | None) -> BatchPlan:
    if batch is not None and plan.global_batch != batch:
        raise UsageError(
            f"{plan.micro_batch} x {plan.accumulation} x {plan.data_parallel} data parallel ranks = "
            f"{plan.global_batch}, and not the global batch of {batch}"
        )
    return plan
