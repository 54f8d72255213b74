"""What another plan of the same global batch changes, and what it does not, each with its figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampdoctor.batching.batch_plan import BatchPlan
from ampdoctor.batching.gradient_shift import GradientShift, Reduction, gradient_shift
from ampdoctor.batching.last_window import last_window
from ampdoctor.batching.reductions import STACKS
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.evidence.report_plan import PlanChange
from ampdoctor.scaling.trace import Division, divisors, reduction_shift

_SAME = "the same for every plan of a batch on a cluster."
_ACTIVATIONS: Mapping[Reduction, str] = {
    "mean": f"log2(m'A'/(mA)) for a mean over the micro-batch, divided by the accumulation: {_SAME}",
    "tokens": f"log2(m'A'/(mA)) for a mean over the step's tokens, times the ranks that are averaged: {_SAME}",
    "step": "They follow the global batch, for a mean over the step's tokens whose ranks are added up.",
    "sum": "Nothing, for a sum that nothing divides.",
}
"""By how much activation gradients move, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From one plan to another.

    Attributes:
        before: The plan in force.
        after: The plan to come.
        devices: All devices before and after.
        samples: Of an epoch; None if nobody has said.
        said: What is known of the job.
    """

    before: BatchPlan
    after: BatchPlan
    devices: tuple[int, int]
    samples: int | None
    said: BatchSettings

    @property
    def same_batch(self) -> bool:
        """Whether the global batch stays."""
        return self.before.global_batch == self.after.global_batch


def has_scale(said: BatchSettings) -> bool:
    """Whether the job may have a loss scale: it is in fp16, or nobody has said what it is in."""
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
    """What that scale does to weight gradients, of which a larger micro-batch sums more samples."""
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


def _figure(before: int, after: int, division: Division) -> str:
    return f"{_order(before, division)} -> {_order(after, division)}"


def _order(ranks: int, division: Division) -> str:
    first, then = divisors(ranks, division)
    return f"/{first} sum /{then:g}" if division == "split" else f"/{first} sum" if then == 1 else f"sum /{then:g}"


def _said(before: int, after: int, division: Division) -> str:
    then, now = reduction_shift(before, division), reduction_shift(after, division)
    flush = f"what is divided first flushes {then.lowest:.3g} -> {now.lowest:.3g} binades earlier"
    over = f"the sum overflows {-then.highest:.3g} -> {-now.highest:.3g} binades earlier at worst"
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
    """Returns a shift in words."""
    if binades == 0:
        return "as before"
    many = f"{abs(binades):.3g} binade{'' if abs(binades) == 1 else 's'}"
    return f"{many} {'smaller' if binades > 0 else 'larger'}"
