"""What another plan of the same global batch changes, and what it does not, each with its figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampdoctor.batching.plans import BatchPlan, BatchSettings, GradientShift, Reduction, gradient_shift
from ampdoctor.evidence.report_plan import LeftAsItIs, PlanChange
from ampdoctor.evidence.targets import PLAN_FRAMEWORKS, PlanFramework
from ampdoctor.scaling.trace import GradReduceScaling, divisors, reduction_shift

# -- who divides the gradients by the number of ranks, when, and what that costs in an fp16 reduce --


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceStack:
    """Frameworks that divide at the same time; `names` also has the dtype in which they reduce."""

    names: str
    division: GradReduceScaling


STACKS: tuple[ReduceStack, ...] = (
    ReduceStack(
        names="DDP with fp16 parameters or fp16_compress_hook, DeepSpeed ZeRO-1 to 3, Megatron-LM in fp16",
        division="before",
    ),
    ReduceStack(names="DeepSpeed ZeRO-0, and ZeRO-1 or 2 with reduce_scatter false", division="after"),
    ReduceStack(names="FSDP1 with a half reduce_dtype, FSDP2 with reduce_dtype=fp16", division="split"),
)
"""torch 2.13 (`reducer.cpp`, `default_hooks.py`, `_fsdp_collectives.py`), deepspeed 0.19.8 (`average_tensor`,
`allreduce_bucket`), Megatron-LM's `param_and_grad_buffer.py`. A reduce in fp32 loses nothing; DDP's and Megatron-LM's
are in the parameters' dtype, fp32 under autocast. FSDP2 reduces bf16 and fp32 by NCCL's AVG."""


# -- the last window of an epoch, which has fewer micro-batches than a step --


_RIGHT: tuple[PlanFramework, ...] = ("transformers",)
_TOO_SMALL: tuple[PlanFramework, ...] = ("accelerate", "lightning", "torchrun")
_CARRIED: tuple[PlanFramework, ...] = ("deepspeed",)
_NONE: tuple[PlanFramework, ...] = ("megatron", "torchtitan")
"""transformers 5.23 (`current_gradient_accumulation_steps`), accelerate 1.15 (`sync_with_dataloader`), lightning 2.6.6
(`ClosureResult.from_training_step_output`), deepspeed 0.19.8 (`micro_steps` is never reset), torchtitan 0.2.2
(`DataloaderExhaustedError`)."""
_ENDLESS = "Samples are counted over epochs; where torchtitan's data do end, it drops the window."


def left_over(plan: BatchPlan, samples: int) -> int:
    """Returns how many micro-batches each rank has for the last window of an epoch; 0 if it is whole.

    Ranks that run short repeat samples (DistributedSampler, Accelerate's `even_batches`), so that all have as many.
    """
    return -(-samples // (plan.micro_batch * plan.data_parallel)) % plan.accumulation


def last_window(
    before: BatchPlan | None, after: BatchPlan, samples: int | None, framework: PlanFramework | None
) -> Iterator[PlanChange]:
    """Yields what happens to the last window; `samples` are of an epoch, `framework` is None for all."""
    if framework in _NONE:
        yield PlanChange(what="last partial window", figure="none", said=_ENDLESS)
        return
    was = "" if before is None else f"{_window(before, samples)} -> "
    yield PlanChange(
        what="last partial window",
        figure=f"{was}{_window(after, samples)} micro-batches",
        said="What the end of an epoch leaves of an optimizer step.",
    )
    if after.accumulation == 1 or (samples is not None and not left_over(after, samples)):
        return
    left = 1 if samples is None else left_over(after, samples)
    share = f"{'down to ' if samples is None else ''}x {left / after.accumulation:.3g}"
    for names, figure, said in (
        (_RIGHT, "x 1", "Divided by the micro-batches, or the tokens, that are there: right."),
        (
            _TOO_SMALL,
            share,
            "Each loss is divided by the whole accumulation, and the step is taken: too small a gradient.",
        ),
        (_CARRIED, "x 1, later", "Carried over: the step ends with the next epoch's first micro-batches."),
        (_NONE, "none", _ENDLESS),
    ):
        of = [name for name in names if framework in (None, name)]
        if of:
            yield PlanChange(what=f"its gradient in {', '.join(map(_named, of))}", figure=figure, said=said)


def _named(framework: PlanFramework) -> str:
    return "a loop of one's own" if framework == "torchrun" else framework


def _window(plan: BatchPlan, samples: int | None) -> str:
    if plan.accumulation == 1:
        return "0 of 1"
    if samples is None:
        return f"up to {plan.accumulation - 1} of {plan.accumulation}"
    left = left_over(plan, samples)
    return f"{left} of {plan.accumulation}"


_SAME = "the same for every plan of a batch on a cluster."
_ACTIVATIONS: Mapping[Reduction, str] = {
    "mean": f"log2(m'A'/(mA)) for a mean over the micro-batch, divided by the accumulation: {_SAME}",
    "tokens": f"log2(m'A'/(mA)) for a mean over the step's tokens, times the ranks that are averaged: {_SAME}",
    "step": "They follow the global batch, for a mean over the step's tokens whose ranks are added up.",
    "sum": "Nothing, for a sum that nothing divides.",
}  # how far activation gradients shift, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step from one plan to another."""

    before: BatchPlan
    after: BatchPlan
    devices: tuple[int, int]  # all devices before and after
    samples: int | None  # of an epoch, if given
    said: BatchSettings  # what is known of the job

    @property
    def same_batch(self) -> bool:
        """Whether the global batch stays."""
        return self.before.global_batch == self.after.global_batch


def has_scale(said: BatchSettings) -> bool:
    """Returns whether the job may have a loss scale: it is in fp16, or its precision is unknown."""
    return said.precision in (None, "fp16")


def changes(step: Step) -> tuple[PlanChange, ...]:
    """Returns what changes, in the order in which a user should read it."""
    return (
        *_learning_rate(step),
        *_half_gradients(step),
        *_reduces(step),
        *last_window(step.before, step.after, step.samples, step.said.framework),
        *_token_averages(step),
        *_per_micro_batch(step),
        *_unchanged(step),
    )


def _learning_rate(step: Step) -> Iterator[PlanChange]:
    ratio = step.devices[1] / step.devices[0]
    if step.same_batch:
        yield PlanChange(
            what="learning rate",
            figure="x 1",
            said="It follows the global batch, which stays."
            + ("" if ratio == 1 else f" Scaling it with the devices, here by {ratio:.3g}, is the known mistake."),
        )
        return
    batch = step.after.global_batch / step.before.global_batch
    yield PlanChange(
        what="learning rate",
        figure=f"x {batch:.4g} or x {math.sqrt(batch):.4g}",
        said="The global batch moves: SGD's learning rate goes with it, Adam's with its square root (Malladi et al. "
        "2022). It never goes with the devices.",
    )


def _half_gradients(step: Step) -> Iterator[PlanChange]:
    precision = step.said.precision
    if not has_scale(step.said):
        yield PlanChange(
            what="gradients' range",
            figure="no loss scale",
            said=f"{precision} without one: what fp16 would flush is none of its concern.",
        )
        return
    reduction: Reduction = step.said.reduction or "mean"
    shift = gradient_shift(step.before, step.after, reduction)
    yield PlanChange(
        what="fp16 activation gradients",
        figure=smaller(shift.activation),
        said=_ACTIVATIONS[reduction] + _mixed(shift),
    )
    ends = sorted({shift.weight, shift.weight_noise})
    yield PlanChange(
        what="fp16 local weight gradients",
        figure=" to ".join(smaller(end) for end in ends),
        said="Of what one backward delivers: the first where the samples' gradients are "
        f"{'independent' if ends[0] != shift.weight else 'alike'}, the other where they are "
        f"{'alike' if ends[0] != shift.weight else 'independent'}."
        if len(ends) > 1
        else "Of what one backward delivers, under the same micro-batch: as an activation's.",
    )
    yield PlanChange(
        what="loss scale",
        figure=f"x 2^{math.ceil(shift.activation)}",
        said=_loss_scale(shift.activation) + _larger_weights(shift),
    )


def _mixed(shift: GradientShift) -> str:
    if shift.activation_mixed == shift.activation:
        return ""
    return f" What BatchNorm mixes of other samples into them: {smaller(shift.activation_mixed)}."


def _loss_scale(shift: float) -> str:
    if shift == 0:
        return "The one in force serves activation gradients as before."
    if shift > 0:
        return (
            "Keeps fp16's activation gradients where they are. A dynamic scaler grows there by itself, "
            f"{_counted(math.ceil(shift), 'growth interval')} later; until then that much more is flushed. A saved "
            "profile (--profile) says how much, layer by layer."
        )
    return (
        "Keeps fp16's activation gradients where they are. At the old scale they are larger: a dynamic scaler skips "
        f"about {_counted(math.ceil(-shift), 'step')} on its way down."
    )


def _larger_weights(shift: GradientShift) -> str:
    """Formats the effect of that scale on weight gradients, of which a larger micro-batch sums more samples."""
    if shift.weight_least >= shift.activation:
        return ""
    larger = smaller(shift.weight_least - math.ceil(shift.activation))
    return (
        f" At x 2^{math.ceil(shift.activation)} local weight gradients are up to {larger}, and may overflow: "
        f"x 2^{math.floor(shift.weight_least)} keeps those."
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _reduces(step: Step) -> Iterator[PlanChange]:
    if not has_scale(step.said):
        return
    before, after = step.before.data_parallel, step.after.data_parallel
    if before == after:
        return
    if step.said.division == "none":
        yield PlanChange(
            what="reduce",
            figure=f"{before} -> {after} ranks",
            said="Not in fp16: whoever divides by the ranks, and when, no gradient flushes or overflows there.",
        )
        return
    for stack in STACKS:
        if step.said.division in (None, stack.division):
            yield PlanChange(
                what="reduce in fp16",
                figure=_figure(before, after, stack.division),
                said=f"{stack.names}: {_said(before, after, stack.division)}",
            )


def _figure(before: int, after: int, division: GradReduceScaling) -> str:
    return f"{_order(before, division)} -> {_order(after, division)}"


def _order(ranks: int, division: GradReduceScaling) -> str:
    first, then = divisors(ranks, division)
    return f"/{first} sum /{then:g}" if division == "split" else f"/{first} sum" if then == 1 else f"sum /{then:g}"


def _said(before: int, after: int, division: GradReduceScaling) -> str:
    then, now = reduction_shift(before, division), reduction_shift(after, division)
    flush = f"what is divided first flushes 2^{then.lowest:.3g} -> 2^{now.lowest:.3g} times earlier"
    over = f"the sum overflows 2^{-then.highest:.3g} -> 2^{-now.highest:.3g} times earlier at worst"
    parts = [flush] if division == "before" else [over] if division == "after" else [flush, over]
    return ", ".join(parts) + "."


def _token_averages(step: Step) -> Iterator[PlanChange]:
    means = [plan.accumulation * plan.data_parallel for plan in (step.before, step.after)]
    if step.said.reduction in ("tokens", "step"):
        figure = "whole step"
        said = (
            "Divided by the tokens of the whole step (transformers since 4.46, torchtitan since 0.2.2): each token "
            "weighs the same under every plan."
        )
    elif step.said.reduction == "sum":
        figure = "whole step"
        said = (
            "A sum weighs each token alike under every plan, and Megatron-LM's per-token loss divides it by the step's "
            "tokens at the end. A reduce that takes the mean over ranks divides it by these, "
            f"{step.before.data_parallel} -> {step.after.data_parallel}: so it does in DDP."
        )
    elif means[0] == means[1] and step.same_batch:
        figure = f"{means[0]} means, as before"
        said = "Over micro-batches of the same size: a token weighs what it did."
    else:
        figure = f"{means[0]} -> {means[1]} means"
        said = (
            "A loss that is a mean over the tokens of a micro-batch weighs a token by 1 / its micro-batch's tokens: "
            "where lengths differ, another number of means is another objective. Divide by the step's tokens instead."
        )
    yield PlanChange(what="token-weighted averages", figure=figure, said=said)


def _per_micro_batch(step: Step) -> Iterator[PlanChange]:
    old, new = step.before, step.after
    yield PlanChange(
        what="BatchNorm statistics",
        figure=f"{old.micro_batch} -> {new.micro_batch} samples",
        said=f"Over a micro-batch; synchronised over the ranks {old.micro_batch * old.data_parallel} -> "
        f"{new.micro_batch * new.data_parallel}. Accumulation never enlarges them. Losses with negatives or balance "
        "terms from the micro-batch (contrastive, experts) change likewise.",
    )


def _unchanged(step: Step) -> Iterator[PlanChange]:
    if not step.same_batch:
        return
    per_epoch = "" if step.samples is None else f" ({-(-step.samples // step.after.global_batch)} of them)"
    yield PlanChange(
        what="gradient noise", figure="x 1", said="It goes with the global batch, whatever that is cut into."
    )
    yield PlanChange(
        what="optimizer steps per epoch",
        figure="x 1",
        said=f"Schedules and warm-up that count steps stay{per_epoch}; those that count micro-batches move by "
        f"{step.after.accumulation / step.before.accumulation:.3g}.",
    )
    yield PlanChange(
        what="data order",
        figure="same samples a step",
        said="Where ranks take every n-th sample (DistributedSampler) or micro-batch (Accelerate's shards) of one "
        "order; which rank, and so its dropout masks and the order of summation, is another.",
    )


def smaller(binades: float) -> str:
    """Formats a shift."""
    if binades == 0:
        return "as before"
    return f"{2.0 ** abs(binades):.3g} times {'smaller' if binades > 0 else 'larger'}"


# -- unchanged settings on another number of ranks, for each framework --
#
# Sources: transformers 5.23 (`Trainer`), accelerate 1.15 (`data_loader.py`), lightning 2.6.6, deepspeed 0.19.8
# (`runtime/config.py`, `_set_batch_related_parameters`), megatron-core 0.16.1 (`num_microbatches_calculator.py`) and
# torchtitan 0.2.2 (`train.py`).


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
    """Returns what happens to the batch if nobody edits the settings.

    `plan` is in force, and its batch is to be kept. `data_parallel` are the new cluster's ranks with different samples.
    `said` is the configuration as read: only its framework is reported; without one, each is, with its usual way to set
    the batch.
    """
    of = PLAN_FRAMEWORKS if said.framework is None else (said.framework,)
    known = said if said.framework is not None else _usual(plan)
    return tuple(_Left(framework, plan, data_parallel, known).outcome() for framework in of)


def _usual(plan: BatchPlan) -> BatchSettings:
    return BatchSettings(global_batch=plan.global_batch, micro_batch=plan.micro_batch)


class _Left:
    """One framework's settings on other ranks; missing settings are as in the plan in force."""

    def __init__(self, framework: PlanFramework, plan: BatchPlan, ranks: int, said: BatchSettings) -> None:
        self._framework = framework
        self._plan = plan
        self._ranks = ranks
        self._said = said
        self._micro = said.micro_batch or plan.micro_batch
        self._steps = said.accumulation or plan.accumulation

    def outcome(self) -> LeftAsItIs:
        """Returns what happens to the batch."""
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
        """Judges `split_batches`: the loader's batch is that of all ranks, which share it."""
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
        """Formats the derived size on the ranks in force; "" where they could not share the batch."""
        size, left = divmod(batch, self._plan.data_parallel * other)
        return "" if left else f"{size} -> "

    def _as_ranks_have_it(self, why: str) -> LeftAsItIs:
        return self._trains(self._micro * self._steps * self._ranks, why)

    def _trains(self, batch: int, why: str) -> LeftAsItIs:
        kept = batch == self._plan.global_batch
        return LeftAsItIs(framework=self._framework, outcome="kept" if kept else "silent", global_batch=batch, said=why)

    def _refused(self, why: str) -> LeftAsItIs:
        return LeftAsItIs(framework=self._framework, outcome="refused", global_batch=None, said=why)
