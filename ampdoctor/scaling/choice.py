"""The loss scale that a profile asks for, and what it predicts of any scaler."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ampdoctor.evidence.ranges import ISLANDS_AT_MOST
from ampdoctor.scaling.closed_forms import highest_exponent, loss_scale_limit, upper_log2
from ampdoctor.scaling.measured import Measured, MeasuredSite
from ampdoctor.scaling.settings import ScalerSettings
from ampdoctor.scaling.simulate import simulate, skip_rate

TOLERATED_ERROR = 5e-3
"""Relative L2 error of a gradient tensor that is as good as bf16's: runs at or below it trained like fp32 (measured on
small transformers, three seeds; bf16 itself has 3e-3 to 5.5e-3)."""
COMPOUNDING = 3.5
"""A run's gradient error over that of rounding each tensor once: the median where fewer than 1 % of the activation
gradients flush; where more do, the error is larger by an unknown factor."""
MAX_EXPONENT = 24
"""No scale above 2^24 is proposed (Apex has the same cap): more buys nothing where nothing flushes, and a run whose
gradients start near zero would ask for any number."""
DEFAULT_INTERVAL = 2000
DEFAULT_TAIL = math.log(2.0) / DEFAULT_INTERVAL
"""The quantile at which a scaler with torch's defaults settles."""
NOISE = 2.0**-18
"""A weight gradient this far below its module's largest output gradient has cancelled (fp32 keeps 24 bits, and sums
over some thousand terms lose some), or has inputs that fp16 itself cannot hold: no loss scale is to blame."""
_SEARCHED = 64
"""Exponents below a tensor's highest one that are searched: more than fp16's 40 binades."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleChoice:
    """The scale for one profile.

    Attributes:
        exponent: log2 of the scale; the largest at which no gradient is expected to overflow.
        bound_by: What forbids more: a site's label, the loss, or the cap.
        unserved: Modules whose gradients this scale does not serve; () where one scale serves all.
        share: Their share of the weight (parameter elements) of all measured modules.
        fp32_modules: What to keep in fp32 with this scale: all of `unserved` where they are few, else nothing, and then
            the scale is one at which nothing overflows.
    """

    exponent: int
    bound_by: str
    unserved: tuple[str, ...] = ()
    share: float = 0.0
    fp32_modules: tuple[str, ...] = ()

    @property
    def settings(self) -> ScalerSettings:
        """A GradScaler that starts there, torch's other defaults kept."""
        return ScalerSettings(scale=2.0**self.exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a scaler would do over the recorded steps, from histograms alone; fractions of nonzero elements.

    Attributes:
        skip_rate: Share of steps skipped.
        skipped: Number of them.
        poisoned: A step would write infinities into the weights.
        settled: The last step is taken.
        scale: Loss scale of a typical taken step.
        activation_flushed, weight_flushed: Share that becomes zero at it.
        relative_error: L2 error of the weight gradients at it, from rounding alone: a lower bound, because errors of
            activation gradients add to it.
    """

    skip_rate: float
    skipped: int
    poisoned: bool
    settled: bool
    scale: float
    activation_flushed: float
    weight_flushed: float
    relative_error: float


def choose_scale(measured: Measured) -> ScaleChoice | None:
    """The scale, and the modules that it leaves out; None where no half gradient has a finite nonzero value.

    Args:
        measured: The profile.
    """
    limits = _limits(measured)
    if not limits:
        return None
    exponent, bound_by = min((highest, m.site.label) for m, highest in limits)
    limits = _without_noise(measured, limits)
    choice = ScaleChoice(exponent=exponent, bound_by=bound_by)
    if not all(_tolerable(measured, m, exponent) for m, _ in limits):
        choice = _among_intervals(_intervals(measured, limits), choice, limits)
    return _capped(measured, choice)


def _among_intervals(
    intervals: list[Interval], safe: ScaleChoice, limits: list[tuple[MeasuredSite, int]]
) -> ScaleChoice:
    """The best scale, the modules that it misses in fp32; where those are too many, the scale that is safe for all."""
    exponent, missed, share = stab(intervals)
    if share <= ISLANDS_AT_MOST and "" not in missed:
        kept = [(h, m.site.label) for m, h in limits if m.site.module not in missed]
        _, bound_by = min(kept)
        return ScaleChoice(exponent=exponent, bound_by=bound_by, unserved=missed, share=share, fp32_modules=missed)
    lost = [i for i in intervals if not i.lowest <= safe.exponent <= i.highest]
    total = sum(i.weight for i in intervals)
    return replace(safe, unserved=tuple(sorted(i.module for i in lost)), share=sum(i.weight for i in lost) / total)


def predict(measured: Measured, settings: ScalerSettings, without: Collection[str] = ()) -> Prediction:
    """What a scaler with these settings would have done.

    Args:
        measured: The profile.
        settings: The scaler at the first step.
        without: Modules in fp32.
    """
    steps = simulate(settings, measured.trace(without))
    taken = [step.scale for step in steps if not step.skipped]
    scale = statistics.median_high(taken) if taken else (steps[-1].scale if steps else settings.scale)
    usable = scale if 0.0 < scale < math.inf else 2.0**-149
    activation = measured.factor("activation_grad", usable)
    weight = measured.factor("weight_grad", usable)
    weights = measured.merged("weight_grad", without)
    return Prediction(
        skip_rate=skip_rate(steps),
        skipped=sum(step.skipped for step in steps),
        poisoned=any(step.poisoned for step in steps),
        settled=not steps or not steps[-1].skipped,
        scale=scale,
        activation_flushed=measured.merged("activation_grad", without).flushed("fp16", activation),
        weight_flushed=weights.flushed("fp16", weight),
        relative_error=weights.relative_error("fp16", weight),
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """The scales that serve a module: 2^lowest to 2^highest; none where lowest is above highest."""

    module: str
    weight: int
    lowest: int
    highest: int


def stab(intervals: Sequence[Interval]) -> tuple[int, tuple[str, ...], float]:
    """The exponent inside intervals of the largest total weight; among equals the largest.

    What it misses is the cheapest set of modules to keep out of half precision: each such set leaves intervals with a
    common point, and the kept weight is largest here.

    Returns:
        The exponent, the modules missed in sorted order, and their share of the whole weight.
    """
    candidates = sorted({i.highest for i in intervals})  # moving up to the next right end loses no interval
    total = sum(i.weight for i in intervals)

    def kept(s: int) -> int:
        return sum(i.weight for i in intervals if i.lowest <= s <= i.highest)

    best = max(candidates, key=lambda s: (kept(s), s))
    missed = sorted({i.module for i in intervals if not i.lowest <= best <= i.highest})
    return best, tuple(missed), 1.0 - kept(best) / total


def _limits(measured: Measured) -> list[tuple[MeasuredSite, int]]:
    """Each half gradient with the largest exponent at which it is not expected to overflow."""
    found = []
    for m in measured.half_gradients():
        series = measured.log2_series(m.site)
        if series:
            found.append((m, highest_exponent(upper_log2(series, DEFAULT_TAIL))))
    return found


def _without_noise(measured: Measured, limits: list[tuple[MeasuredSite, int]]) -> list[tuple[MeasuredSite, int]]:
    """Leave out weight gradients that are what fp32's rounding left of a sum that cancels: nothing can be lost there.

    A key projection's bias is the common case: softmax does not see it, so its gradient is zero but for noise.
    """
    outputs = {
        m.site.module: m.histogram.amax or 0.0
        for m in measured.sites
        if m.site.kind == "activation_grad" and m.site.part == "output"
    }
    return [
        (m, highest)
        for m, highest in limits
        if m.site.kind != "weight_grad" or (m.histogram.amax or 0.0) > NOISE * outputs.get(m.site.module, 0.0)
    ]


def _tolerable(measured: Measured, m: MeasuredSite, exponent: int) -> bool:
    error = m.histogram.relative_error("fp16", measured.factor(m.site.kind, 2.0**exponent))
    return COMPOUNDING * error <= TOLERATED_ERROR


def _intervals(measured: Measured, limits: list[tuple[MeasuredSite, int]]) -> list[Interval]:
    """One interval a module: what serves all its gradients."""
    merged: dict[str, Interval] = {}
    for m, highest in limits:
        lowest = _lowest_tolerable(measured, m, highest)
        name = m.site.module
        known = merged.get(name, Interval(name, m.site.weight, lowest, highest))
        merged[name] = replace(known, lowest=max(known.lowest, lowest), highest=min(known.highest, highest))
    return list(merged.values())


def _lowest_tolerable(measured: Measured, m: MeasuredSite, highest: int) -> int:
    """Smallest exponent with a tolerable error: that falls with the scale until something overflows."""
    if not _tolerable(measured, m, highest):
        return highest + 1
    low, high = highest - _SEARCHED, highest
    while low < high:
        middle = (low + high) // 2
        if _tolerable(measured, m, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _capped(measured: Measured, choice: ScaleChoice) -> ScaleChoice:
    profile = measured.profile
    if profile.loss_in_half and profile.loss_amax is not None and math.isfinite(profile.loss_amax):
        limit = loss_scale_limit(profile.loss_amax)
        if limit is not None and limit < choice.exponent:
            choice = replace(choice, exponent=limit, bound_by="the loss, which stays fp16 when it is scaled")
    if choice.exponent > MAX_EXPONENT:
        choice = replace(choice, exponent=MAX_EXPONENT, bound_by="the cap, as no gradient comes near")
    return choice
