"""What each framework does with the settings in force, left as they are, on another number of ranks.

Read in transformers 5.23 (`Trainer`), accelerate 1.15 (`data_loader.py`), lightning 2.6.6, deepspeed 0.19.8
(`runtime/config.py`, `_set_batch_related_parameters`), megatron-core 0.16.1 (`num_microbatches_calculator.py`) and
torchtitan 0.2.2 (`train.py`).
"""

from __future__ import annotations

from ampdoctor.batching.batch_plan import BatchPlan
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.evidence.frameworks import PLAN_FRAMEWORKS, PlanFramework
from ampdoctor.evidence.report.plan import LeftAsItIs

_UNCHECKED = {
    "transformers": "per_device_train_batch_size x gradient_accumulation_steps x ranks is never checked",
    "accelerate": "the batch of each data loader x gradient_accumulation_steps x ranks is never checked",
    "lightning": "the data loader's batch x accumulate_grad_batches x ranks is never checked",
    "torchrun": "a loop of one's own starts on any WORLD_SIZE",
}


def left_as_it_is(plan: BatchPlan, data_parallel: int, said: BatchSettings) -> tuple[LeftAsItIs, ...]:
    """Returns what becomes of the batch if nobody edits the settings.

    Args:
        plan: The plan in force.
        data_parallel: Ranks of the new cluster that see other samples.
        said: The configuration that was read: only its framework is spoken of. Where none was, each framework is, with
            its usual way of saying the batch.
    """
    of = PLAN_FRAMEWORKS if said.framework is None else (said.framework,)
    return tuple(_left(framework, plan, data_parallel, said) for framework in of)


def _left(framework: PlanFramework, plan: BatchPlan, ranks: int, said: BatchSettings) -> LeftAsItIs:
    known = said if said.framework is not None else _usual(framework, plan)
    if framework == "deepspeed":
        return _deepspeed(plan, ranks, known)
    if framework in ("megatron", "torchtitan") and known.global_batch is not None:
        return _accumulation_derived(framework, plan, ranks, known)
    if framework == "accelerate" and known.fixed_total:
        return _fixed_total(plan, ranks)
    why = _UNCHECKED.get(framework, "without a global batch, it is what the ranks make of the micro-batch")
    return _silent(framework, plan, ranks, why)


def _usual(framework: PlanFramework, plan: BatchPlan) -> BatchSettings:
    return BatchSettings(framework=framework, global_batch=plan.global_batch, micro_batch=plan.micro_batch)


def _deepspeed(plan: BatchPlan, ranks: int, said: BatchSettings) -> LeftAsItIs:
    if said.global_batch is None:
        return _silent("deepspeed", plan, ranks, "train_batch_size is not given, and follows the ranks")
    if said.micro_batch is not None and said.accumulation is not None:
        same = ranks == plan.data_parallel
        return LeftAsItIs(
            framework="deepspeed",
            outcome="kept" if same else "refused",
            global_batch=plan.global_batch if same else None,
            said="all three of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps are "
            "given, and an assertion holds their product to the ranks",
        )
    if said.micro_batch is not None:
        return _accumulation_derived("deepspeed", plan, ranks, said)
    steps = plan.accumulation if said.accumulation is not None else 1
    micro = plan.global_batch // ranks // steps
    if micro and micro * steps * ranks == plan.global_batch:
        return LeftAsItIs(
            framework="deepspeed",
            outcome="kept",
            global_batch=plan.global_batch,
            said=f"the micro-batch is derived, {plan.micro_batch} -> {micro}, whether it fits a device or not",
        )
    return _refused("deepspeed", "the micro-batch is derived by floor division, and an assertion refuses it")


def _accumulation_derived(framework: PlanFramework, plan: BatchPlan, ranks: int, said: BatchSettings) -> LeftAsItIs:
    steps, left = divmod(plan.global_batch, plan.micro_batch * ranks)
    if steps and not left:
        return LeftAsItIs(
            framework=framework,
            outcome="kept",
            global_batch=plan.global_batch,
            said=f"the accumulation is derived, {plan.accumulation} -> {steps}",
        )
    if steps and said.rounds_down:
        return LeftAsItIs(
            framework=framework,
            outcome="silent",
            global_batch=steps * plan.micro_batch * ranks,
            said="--decrease-batch-size-if-needed rounds it down, and says so once in rank 0's log",
        )
    return _refused(
        framework, f"an assertion refuses a batch that is no multiple of {plan.micro_batch} x {ranks} ranks"
    )


def _fixed_total(plan: BatchPlan, ranks: int) -> LeftAsItIs:
    """With `split_batches` the loader's batch is that of all ranks, who share it."""
    total = plan.micro_batch * plan.data_parallel
    if total % ranks:
        return _refused(
            "accelerate", f"split_batches shares a batch of {total}, which has to be a multiple of the ranks"
        )
    return LeftAsItIs(
        framework="accelerate",
        outcome="kept",
        global_batch=plan.global_batch,
        said=f"split_batches shares a batch of {total}: the micro-batch is derived, {plan.micro_batch} -> "
        f"{total // ranks}, whether it fits a device or not",
    )


def _silent(framework: PlanFramework, plan: BatchPlan, ranks: int, why: str) -> LeftAsItIs:
    batch = plan.micro_batch * plan.accumulation * ranks
    return LeftAsItIs(
        framework=framework,
        outcome="kept" if batch == plan.global_batch else "silent",
        global_batch=batch,
        said=why,
    )


def _refused(framework: PlanFramework, why: str) -> LeftAsItIs:
    return LeftAsItIs(framework=framework, outcome="refused", global_batch=None, said=why)
