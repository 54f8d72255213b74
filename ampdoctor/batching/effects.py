"""What another plan of the same global batch changes, in figures; docs/plan.md says what follows from each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.batching.plans import (
    AnyPlan,
    BatchPlan,
    BatchSettings,
    GradientShift,
    GradReduceScaling,
    Reduction,
    gradient_shift,
)
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report_plan import FlushedByPlan, FlushedOfPlan, PlanChange
from ampdoctor.evidence.run_facts import GRADIENTS, SiteKind
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.ranges.profile import SURE_BELOW, RangeProfile
from ampdoctor.scaling.choose import cancelled
from ampdoctor.scaling.closed_forms import TAIL, highest_exponent, upper_log2

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


def smaller(log2: float) -> str:
    """Formats a shift."""
    if log2 == 0:
        return "as before"
    return f"{2.0 ** abs(log2):.3g} times {'smaller' if log2 > 0 else 'larger'}"


# -- from a measured profile: which share of each gradient fp16 flushes to zero, before and after --


def flushed_plan(
    profile: RangeProfile, before: AnyPlan, after: AnyPlan, reduction: Reduction = "mean", *, file: str = ""
) -> FlushedByPlan:
    """Returns the flushed shares of every gradient under both plans, and the `init_scale` that keeps them.

    The profile has its own accumulation, and is assumed to have the micro-batch of `before`; it may come from one
    device. Raises UsageError for a run without a loss scale. `init_scale` is the smallest power of two, from the scale
    that moves with the activation gradients on, at which no gradient loses more than before; if one would overflow
    there, the largest at which none does. Weight gradients that cancel (`scaling.choose.cancelled`) are left out:
    their small values are fp32's own rounding.
    """
    if profile.run.precision != "fp16":
        raise UsageError(f"a run in {profile.run.precision} has no loss scale: profile the job in fp16")
    now = profile.run.loss_scale
    measured = BatchPlan(micro_batch=before.micro_batch, accumulation=profile.run.accumulation, data_parallel=1)
    gradients = _Gradients(
        profile,
        then=gradient_shift(measured, before, reduction),
        new=gradient_shift(measured, after, reduction),
        now=now,
    )
    shift = gradient_shift(before, after, reduction).activation
    wanted = gradients.smallest_that_keeps(math.ceil(math.log2(now) + shift))
    limit, label = gradients.limit()
    kept = 2.0 ** min(wanted, limit)
    lossy = any(gradients.shares("", [i], kept).after_most > SURE_BELOW for i in profile.of_kind("activation_grad"))

    of_kinds = ([i for i in gradients.indices if profile.sites[i].kind == kind] for kind in GRADIENTS)
    layers = (gradients.shares(profile.sites[i].place.shown, [i], kept, lossy=lossy) for i in gradients.indices)
    return FlushedByPlan(
        profile=file,
        scale=now,
        init_scale=kept,
        bound_by=label if wanted > limit else None,
        totals=tuple(gradients.shares("", found, kept, lossy=lossy) for found in of_kinds if found),
        layers=tuple(sorted(layers, key=lambda one: (one.before - one.after_most, one.layer, one.kind))),
    )


class _Gradients:
    """Half gradients of a profile that do not cancel; `then` and `new` are the shifts from the measured plan."""

    def __init__(self, profile: RangeProfile, *, then: GradientShift, new: GradientShift, now: float) -> None:
        self._profile = profile
        self._then = then
        self._new = new
        self._now = now
        noise = cancelled(profile)
        self.indices = [index for index in profile.half_gradients() if index not in noise]

    def shares(self, layer: str, indices: list[int], kept: float, *, lossy: bool = False) -> FlushedOfPlan:
        """Returns the joint shares of these sites, which are of one kind.

        Weight gradients lose more than their own magnitudes show where an activation gradient loses 1 % (`lossy`).
        """
        kind = self._profile.sites[indices[0]].kind
        histogram = sum((self._profile.histograms[index] for index in indices), Histogram.empty())
        least, most = self._ends(self._new, kind)
        return FlushedOfPlan(
            layer=layer,
            kind="weight_grad" if kind == "weight_grad" else "activation_grad",
            before=self._share(histogram, kind, self._now, self._ends(self._then, kind)[1]),
            after=self._share(histogram, kind, self._now, least),
            after_most=self._share(histogram, kind, self._now, most),
            kept=self._share(histogram, kind, kept, most),
            lower_bound=lossy and kind == "weight_grad",
        )

    def smallest_that_keeps(self, exponent: int) -> int:
        """Returns the smallest exponent from this one on at which no gradient loses more than before."""
        return max((self._keeps(index, exponent) for index in self.indices), default=exponent)

    def limit(self) -> tuple[float, str]:
        """Returns the largest exponent at which no gradient should overflow, and the first that would."""
        limits: list[tuple[float, str]] = []
        for index in self._profile.half_gradients():
            site, series = self._profile.sites[index], self._profile.log2_series(index)
            if series:
                largest = upper_log2(series, TAIL) - self._ends(self._new, site.kind)[0]
                limits.append((highest_exponent(largest), site.label))
        return min(limits, default=(math.inf, ""))

    def _keeps(self, index: int, exponent: int) -> int:
        kind, histogram = self._profile.sites[index].kind, self._profile.histograms[index]
        most = self._ends(self._new, kind)[1]
        before = self._share(histogram, kind, self._now, self._ends(self._then, kind)[1])
        while self._share(histogram, kind, 2.0**exponent, most) > before:
            exponent += 1  # ends: at a scale that moves with these gradients, nothing differs from before
        return exponent

    def _share(self, histogram: Histogram, kind: SiteKind, scale: float, shift: float) -> float:
        return histogram.flushed("fp16", self._profile.factor(kind, scale) * 2.0**-shift)

    def _ends(self, shift: GradientShift, kind: SiteKind) -> tuple[float, float]:
        """Returns the least and the most by which gradients of a kind become smaller."""
        if kind == "weight_grad":
            return shift.weight_least, shift.weight_most
        return shift.activation, shift.activation
