"""From a measured profile: which share of each gradient fp16 flushes to zero, before and after another plan."""

from __future__ import annotations

import math

from ampdoctor.batching.plans import AnyPlan, BatchPlan, GradientShift, Reduction, gradient_shift
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report_plan import FlushedByPlan, FlushedOfPlan
from ampdoctor.evidence.run_facts import GRADIENTS, SiteKind
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.ranges.profile import SURE_BELOW, RangeProfile
from ampdoctor.scaling.choose import cancelled
from ampdoctor.scaling.closed_forms import TAIL, highest_exponent, upper_log2


def flushed_plan(
    profile: RangeProfile,
    before: AnyPlan,
    after: AnyPlan,
    reduction: Reduction = "mean",
    *,
    file: str = "",
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
