"""What another plan of the same global batch changes, in figures; docs/plan.md says what follows from each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.batching.plans import BatchPlan, BatchSettings, GradientShift, GradReduceScaling, gradient_shift
from ampdoctor.evidence.report_plan import PlanChange

_DIVISIONS: tuple[GradReduceScaling, ...] = ("before", "after", "split")


def has_scale(said: BatchSettings) -> bool:
    """Returns whether the job may have a loss scale: it is in fp16, or its precision is unknown."""
    return said.precision in (None, "fp16")


def changes(old: BatchPlan, new: BatchPlan, said: BatchSettings) -> tuple[PlanChange, ...]:
    """Returns what changes from one plan to another, in the order in which a user should read it."""
    return tuple(PlanChange(what=what, figure=figure) for what, figure in _figures(old, new, said))


def _figures(old: BatchPlan, new: BatchPlan, said: BatchSettings) -> Iterator[tuple[str, str]]:
    same = old.global_batch == new.global_batch
    batch = new.global_batch / old.global_batch
    yield "learning rate", "x 1" if same else f"x {batch:.4g} (SGD) or x {math.sqrt(batch):.4g} (Adam)"
    if has_scale(said):
        yield from _half_gradients(gradient_shift(old, new, said.reduction or "mean"))
        yield from _reduces(old.data_parallel, new.data_parallel, said)
    else:
        yield "gradients' range", "no loss scale"
    accumulations = (old.accumulation, new.accumulation)
    windows = " -> ".join(f"up to {each - 1} of {each}" if each > 1 else "0 of 1" for each in accumulations)
    counts_over_epochs = said.framework == "megatron"  # no step is left in part
    yield "last partial window", "none" if counts_over_epochs else f"{windows} micro-batches"
    means = [plan.accumulation * plan.data_parallel for plan in (old, new)]
    whole = said.reduction in ("tokens", "step", "sum")
    yield "token-weighted averages", "over the whole step" if whole else f"{means[0]} -> {means[1]} means"
    ranks = f"{old.micro_batch * old.data_parallel} -> {new.micro_batch * new.data_parallel}"
    yield "BatchNorm statistics", f"{old.micro_batch} -> {new.micro_batch} samples (over all ranks {ranks})"
    if same:
        yield "optimizer steps per epoch", "x 1"
        yield "micro-batches per epoch", f"x {new.accumulation / old.accumulation:.3g} a rank"


def _half_gradients(shift: GradientShift) -> Iterator[tuple[str, str]]:
    yield "fp16 activation gradients", smaller(shift.activation)
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


def divisors(ranks: int, division: GradReduceScaling) -> tuple[int, float]:
    """Returns the divisors of a reduction over `ranks`: before its sum, and after it.

    FSDP's first divisor doubles, from 1, as long as it divides n and is below the remaining quotient (torch's
    `DefaultState._get_gradient_predivide_factor`): both are about sqrt(n) for a power of two, and far from it where n
    has few factors of 2.
    """
    if division == "before":
        return ranks, 1.0
    before = 1
    while division == "split" and ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


def smaller(binades: float) -> str:
    """Formats a shift."""
    if binades == 0:
        return "as before"
    return f"{2.0 ** abs(binades):.3g} times {'smaller' if binades > 0 else 'larger'}"
