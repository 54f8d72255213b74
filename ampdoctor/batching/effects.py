"""What another plan of the same global batch changes, in figures; docs/plan.md says what follows from each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ampdoctor.batching.plans import BatchPlan, BatchSettings, gradient_shift
from ampdoctor.evidence.report_plan import PlanChange
from ampdoctor.scaling.trace import GradReduceScaling, divisors

_DIVISIONS: tuple[GradReduceScaling, ...] = ("before", "after", "split")
_NO_WINDOW = ("megatron", "torchtitan")  # they count samples over epochs, so that no step is left in part


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step from one plan to another."""

    before: BatchPlan
    after: BatchPlan
    devices: tuple[int, int]  # all devices before and after
    samples: int | None  # of an epoch, if given
    said: BatchSettings  # what is known of the job


def has_scale(said: BatchSettings) -> bool:
    """Returns whether the job may have a loss scale: it is in fp16, or its precision is unknown."""
    return said.precision in (None, "fp16")


def changes(step: Step) -> tuple[PlanChange, ...]:
    """Returns what changes, in the order in which a user should read it."""
    return tuple(PlanChange(what=what, figure=figure) for what, figure in _figures(step))


def _figures(step: Step) -> Iterator[tuple[str, str]]:
    old, new, said = step.before, step.after, step.said
    same = old.global_batch == new.global_batch
    batch = new.global_batch / old.global_batch
    yield "learning rate", "x 1" if same else f"x {batch:.4g} (SGD) or x {math.sqrt(batch):.4g} (Adam)"
    if has_scale(said):
        yield from _half_gradients(step)
        yield from _reduces(old.data_parallel, new.data_parallel, said)
    else:
        yield "gradients' range", "no loss scale"
    yield "last partial window", _windows(step)
    means = [plan.accumulation * plan.data_parallel for plan in (old, new)]
    whole = said.reduction in ("tokens", "step", "sum")
    yield "token-weighted averages", "over the whole step" if whole else f"{means[0]} -> {means[1]} means"
    ranks = f"{old.micro_batch * old.data_parallel} -> {new.micro_batch * new.data_parallel}"
    yield "BatchNorm statistics", f"{old.micro_batch} -> {new.micro_batch} samples (over all ranks {ranks})"
    if same:
        steps = "" if step.samples is None else f" ({-(-step.samples // new.global_batch)})"
        yield "optimizer steps per epoch", f"x 1{steps}"
        yield "micro-batches per epoch", f"x {new.accumulation / old.accumulation:.3g} a rank"


def _half_gradients(step: Step) -> Iterator[tuple[str, str]]:
    shift = gradient_shift(step.before, step.after, step.said.reduction or "mean")
    mixed = shift.activation_mixed
    batch_norm = "" if mixed == shift.activation else f" (what BatchNorm mixes into them: {smaller(mixed)})"
    yield "fp16 activation gradients", smaller(shift.activation) + batch_norm
    yield "fp16 local weight gradients", " to ".join(map(smaller, sorted({shift.weight, shift.weight_noise})))
    scale, least = math.ceil(shift.activation), shift.weight_least
    kept = f" (x 2^{math.floor(least)} where weight gradients would overflow)" if least < shift.activation else ""
    yield "loss scale", f"x 2^{scale}{kept}"


def _reduces(before: int, after: int, said: BatchSettings) -> Iterator[tuple[str, str]]:
    if before == after:
        return
    if said.division == "none":
        yield "reduce", f"{before} -> {after} ranks, not in fp16"
        return
    for division in _DIVISIONS if said.division is None else (said.division,):
        yield "reduce in fp16", f"{_order(before, division)} -> {_order(after, division)}"


def _order(ranks: int, division: GradReduceScaling) -> str:
    first, then = divisors(ranks, division)
    return f"/{first} sum /{then:g}" if division == "split" else f"/{first} sum" if then == 1 else f"sum /{then:g}"


def left_over(plan: BatchPlan, samples: int) -> int:
    """Returns how many micro-batches each rank has for the last window of an epoch; 0 if it is whole.

    Ranks that run short repeat samples (DistributedSampler, Accelerate's `even_batches`), so that all have as many.
    """
    return -(-samples // (plan.micro_batch * plan.data_parallel)) % plan.accumulation


def _windows(step: Step) -> str:
    if step.said.framework in _NO_WINDOW:
        return "none"
    return f"{_window(step.before, step.samples)} -> {_window(step.after, step.samples)} micro-batches"


def _window(plan: BatchPlan, samples: int | None) -> str:
    if samples is None and plan.accumulation > 1:
        return f"up to {plan.accumulation - 1} of {plan.accumulation}"
    return f"{left_over(plan, samples or 0)} of {plan.accumulation}"


def smaller(binades: float) -> str:
    """Formats a shift."""
    if binades == 0:
        return "as before"
    return f"{2.0 ** abs(binades):.3g} times {'smaller' if binades > 0 else 'larger'}"
