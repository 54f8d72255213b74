"""What each framework does with the settings in force, left as they are, on another number of ranks.

Read in transformers 5.23 (`Trainer`), accelerate 1.15 (`data_loader.py`), lightning 2.6.6, deepspeed 0.19.8
(`runtime/config.py`, `_set_batch_related_parameters`), megatron-core 0.16.1 (`num_microbatches_calculator.py`) and
torchtitan 0.2.2 (`train.py`).
"""

from __future__ import annotations

from ampdoctor.batching.batch_plan import BatchPlan
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.evidence.report_plan import LeftAsItIs
from ampdoctor.evidence.targets import PLAN_FRAMEWORKS, PlanFramework

_UNCHECKED = {
    "transformers": "per_device_train_batch_size x gradient_accumulation_steps x ranks is never checked",
    "accelerate": "the batch of each data loader x gradient_accumulation_steps x ranks is never checked",
    "lightning": "the data loader's batch x accumulate_grad_batches x ranks is never checked",
    "torchrun": "a loop of one's own starts on any WORLD_SIZE",
}
_ALL_THREE = (
    "all three of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps are given, and an "
    "assertion holds their product to the ranks"
)


def left_as_it_is(plan: BatchPlan, data_parallel: int, said: BatchSettings) -> tuple[LeftAsItIs, ...]:
    """Returns what becomes of the batch if nobody edits the settings.

    Args:
        plan: The plan in force, whose batch is to be kept.
        data_parallel: Ranks of the new cluster that see other samples.
        said: The configuration that was read, as it stands: only its framework is spoken of. Where none was, each
            framework is, with its usual way of saying the batch.
    """
    of = PLAN_FRAMEWORKS if said.framework is None else (said.framework,)
    known = said if said.framework is not None else _usual(plan)
    return tuple(_Left(framework, plan, data_parallel, known).outcome() for framework in of)


def _usual(plan: BatchPlan) -> BatchSettings:
    return BatchSettings(global_batch=plan.global_batch, micro_batch=plan.micro_batch)


class _Left:
    """One framework's settings on other ranks. What they do not say is as in the plan in force.

    Args:
        framework: Whose.
        plan: The plan in force.
        ranks: The new ones.
        said: The settings.
    """

    def __init__(self, framework: PlanFramework, plan: BatchPlan, ranks: int, said: BatchSettings) -> None:
        self._framework = framework
        self._plan = plan
        self._ranks = ranks
        self._said = said
        self._micro = said.micro_batch or plan.micro_batch
        self._steps = said.accumulation or plan.accumulation

    def outcome(self) -> LeftAsItIs:
        """Returns what becomes of the batch."""
        said = self._said
        if self._framework == "deepspeed":
            return self._deepspeed()
        if self._framework in ("megatron", "torchtitan") and said.global_batch is not None:
            return self._derived_accumulation(said.global_batch)
        if self._framework in ("accelerate", "transformers") and said.fixed_total:
            return self._shared_batch()
        why = _UNCHECKED.get(self._framework, "without a global batch, it is what the ranks make of the micro-batch")
        return self._as_ranks_have_it(why)

    def _deepspeed(self) -> LeftAsItIs:
        said = self._said
        if said.global_batch is None:
            return self._as_ranks_have_it("train_batch_size is not given, and follows the ranks")
        if said.filled or (said.micro_batch is not None and said.accumulation is not None):
            if self._micro * self._steps * self._ranks != said.global_batch:
                return self._refused(_ALL_THREE)
            return self._trains(said.global_batch, _ALL_THREE)
        if said.micro_batch is not None:
            return self._derived_accumulation(said.global_batch)
        steps = said.accumulation or 1
        micro = said.global_batch // self._ranks // steps
        if not micro or micro * steps * self._ranks != said.global_batch:
            return self._refused("the micro-batch is derived by floor division, and an assertion refuses it")
        then = self._was(said.global_batch, steps)
        return self._trains(
            said.global_batch, f"the micro-batch is derived, {then}{micro}, whether it fits a device or not"
        )

    def _derived_accumulation(self, batch: int) -> LeftAsItIs:
        steps, left = divmod(batch, self._micro * self._ranks)
        if steps and not left:
            return self._trains(batch, f"the accumulation is derived, {self._was(batch, self._micro)}{steps}")
        if steps and self._said.rounds_down:
            return self._trains(
                steps * self._micro * self._ranks,
                "--decrease-batch-size-if-needed rounds it down, and says so once in rank 0's log",
            )
        return self._refused(f"an assertion refuses a batch that is no multiple of {self._micro} x {self._ranks} ranks")

    def _shared_batch(self) -> LeftAsItIs:
        """With `split_batches` the loader's batch is that of all ranks, who share it."""
        batch = self._said.global_batch
        total = self._micro * self._plan.data_parallel if batch is None else batch // self._steps
        if total % self._ranks:
            return self._refused(f"split_batches shares a batch of {total}, which has to be a multiple of the ranks")
        then = self._was(total, 1)
        return self._trains(
            total * self._steps,
            f"split_batches shares a batch of {total}: the micro-batch is derived, {then}{total // self._ranks}, "
            "whether it fits a device or not",
        )

    def _was(self, batch: int, other: int) -> str:
        """The size that is derived beside another, on the ranks in force; nothing where these could not share it."""
        size, left = divmod(batch, self._plan.data_parallel * other)
        return "" if left else f"{size} -> "

    def _as_ranks_have_it(self, why: str) -> LeftAsItIs:
        return self._trains(self._micro * self._steps * self._ranks, why)

    def _trains(self, batch: int, why: str) -> LeftAsItIs:
        kept = batch == self._plan.global_batch
        return LeftAsItIs(framework=self._framework, outcome="kept" if kept else "silent", global_batch=batch, said=why)

    def _refused(self, why: str) -> LeftAsItIs:
        return LeftAsItIs(framework=self._framework, outcome="refused", global_batch=None, said=why)
