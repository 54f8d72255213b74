"""Chooses the loss scale for a profile, and a scaler's settings in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.evidence.thresholds import ERROR_NOTE, FP32_SHARE, Thresholds
from ampdoctor.numerics.rounding_error import powers, squared_errors
from ampdoctor.ranges.profile import RangeProfile
from ampdoctor.scaling.closed_forms import (
    TAIL,
    Spikes,
    equilibrium_skip_rate,
    highest_exponent,
    loss_scale_limit,
    upper_log2,
)
from ampdoctor.scaling.scalers import ScalerSettings

COMPOUNDING = 3.5
"""A run's gradient error divided by that of rounding each tensor once: the median for runs that flush fewer than 1 % of
the activation gradients; beyond, the error is larger by an unknown factor."""
MAX_EXPONENT = 24
"""No larger scale than 2^24 is proposed (Apex has the same cap). A larger one gains nothing if nothing flushes, and a
run whose gradients start near zero would need any number."""
NOISE = 2.0**-18
"""A weight gradient this far below its module's largest output gradient has cancelled (fp32 keeps 24 bits, and sums
over some thousand terms lose some), or has inputs that fp16 itself cannot hold: the loss scale is not the cause."""
_SEARCHED = 64  # exponents that are searched below a tensor's highest one: more than fp16's 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleChoice:
    """The scale for one profile; with too many modules to keep in fp32, one at which nothing overflows."""

    exponent: int  # log2 of the scale; the largest at which no gradient should overflow
    bound_by: str  # what forbids a larger scale: a site's label, the loss, or the cap
    modules_not_covered: tuple[
        str, ...
    ] = ()  # modules whose gradients this scale does not serve; () if one scale serves all
    share: float = 0.0  # their share of the weight (parameter elements) of all measured modules
    fp32_modules: tuple[str, ...] = ()  # modules to keep in fp32 with this scale

    @property
    def settings(self) -> ScalerSettings:
        """A GradScaler that starts at this scale, with torch's other defaults."""
        return ScalerSettings(scale=2.0**self.exponent)


def choose_scale(profile: RangeProfile, thresholds: Thresholds) -> ScaleChoice | None:
    """Returns the scale and the modules that it does not serve; None if no half gradient has a finite nonzero value."""
    limits = _limits(profile)
    if not limits:
        return None
    exponent, label = min((highest, profile.sites[index].label) for index, highest in limits.items())
    noise = cancelled(profile)
    limits = {index: highest for index, highest in limits.items() if index not in noise}
    choice = ScaleChoice(exponent=exponent, bound_by=label)
    errors = _Errors(profile, limits, thresholds[ERROR_NOTE] / COMPOUNDING)
    if not all(errors.tolerable(index, exponent) for index in limits):
        choice = _among_intervals(profile, limits, errors, choice, thresholds[FP32_SHARE])
    return _capped(profile, choice)


def _among_intervals(
    profile: RangeProfile, limits: Mapping[int, int], errors: _Errors, safe: ScaleChoice, most: float
) -> ScaleChoice:
    """Returns the best scale, with fp32 for the modules it misses; if those are too many, the scale safe for all."""
    intervals = _intervals(profile, limits, errors)
    exponent, missed, share = stab(intervals)
    if share <= most and "" not in missed:
        kept = [(h, profile.sites[i].label) for i, h in limits.items() if profile.sites[i].module not in missed]
        _, bound_by = min(kept)
        return ScaleChoice(
            exponent=exponent, bound_by=bound_by, modules_not_covered=missed, share=share, fp32_modules=missed
        )
    lost = [i for i in intervals if not i.lowest <= safe.exponent <= i.highest]
    total = sum(i.weight for i in intervals)
    return replace(
        safe, modules_not_covered=tuple(sorted(i.module for i in lost)), share=sum(i.weight for i in lost) / total
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """The scales that serve a module: 2^lowest to 2^highest; no scale if lowest is above highest."""

    module: str
    weight: int
    lowest: int
    highest: int


def stab(intervals: Sequence[Interval]) -> tuple[int, tuple[str, ...], float]:
    """Returns the exponent inside intervals of the largest total weight; among equals the largest exponent.

    Also returns the modules missed, sorted, and their share of the whole weight. They are the cheapest set of modules
    to keep out of half precision: without such a set, the other intervals have a common point, and here the kept weight
    is largest.
    """
    candidates = sorted({i.highest for i in intervals})  # moving up to the next right end loses no interval
    total = sum(i.weight for i in intervals)

    def kept(s: int) -> int:
        return sum(i.weight for i in intervals if i.lowest <= s <= i.highest)

    best = max(candidates, key=lambda s: (kept(s), s))
    missed = sorted({i.module for i in intervals if not i.lowest <= best <= i.highest})
    return best, tuple(missed), 1.0 - kept(best) / total


def _limits(profile: RangeProfile) -> dict[int, int]:
    """Maps each half gradient to the largest exponent at which it should not overflow."""
    found = {}
    for index in profile.half_gradients():
        series = profile.log2_series(index)
        if series:
            found[index] = highest_exponent(upper_log2(series, TAIL))
    return found


def cancelled(profile: RangeProfile) -> frozenset[int]:
    """Returns the weight gradients that are only fp32's rounding of a sum that cancels: nothing can be lost there.

    The bias of a key projection is the common case: softmax ignores it, so its gradient is zero apart from noise.
    """
    outputs = {
        site.module: histogram.amax or 0.0
        for site, histogram in zip(profile.sites, profile.histograms, strict=True)
        if site.kind == "activation_grad" and site.place.part == "output"
    }
    return frozenset(
        index
        for index, (site, histogram) in enumerate(zip(profile.sites, profile.histograms, strict=True))
        if site.kind == "weight_grad" and (histogram.amax or 0.0) <= NOISE * outputs.get(site.module, 0.0)
    )


class _Errors:
    """Whether each gradient's relative L2 error in fp16 is at most `tolerated`, up to the exponents of `limits`."""

    def __init__(self, profile: RangeProfile, limits: Mapping[int, int], tolerated: float) -> None:
        self._rows = {index: row for row, index in enumerate(limits)}
        if not limits:
            return
        self._first = min(limits.values()) - _SEARCHED
        base = math.ceil(math.log2(profile.run.base_scale))
        exponents = np.arange(self._first, max(limits.values()) + 1) - base
        counts = np.stack([profile.histograms[index].counts for index in limits])
        total = np.maximum(powers(counts), np.finfo(np.float64).tiny)
        errors = np.sqrt(squared_errors(counts, "fp16", exponents) / total[:, None])
        self._served = errors <= tolerated

    def tolerable(self, index: int, exponent: int) -> bool:
        return bool(self._served[self._rows[index], exponent - self._first])

    def lowest(self, index: int, highest: int) -> int:
        """Returns the smallest exponent from which on it is served up to `highest`; `highest` + 1 if there is none."""
        served = self._served[self._rows[index], : highest - self._first + 1]
        lost = np.flatnonzero(~served)
        return self._first if lost.size == 0 else self._first + int(lost[-1]) + 1


def _intervals(profile: RangeProfile, limits: Mapping[int, int], errors: _Errors) -> list[Interval]:
    """Returns one interval per module, which serves all its gradients."""
    merged: dict[str, Interval] = {}
    for index, highest in limits.items():
        lowest = errors.lowest(index, highest)
        site = profile.sites[index]
        known = merged.get(site.module, Interval(site.module, site.weight, lowest, highest))
        merged[site.module] = replace(known, lowest=max(known.lowest, lowest), highest=min(known.highest, highest))
    return list(merged.values())


def _capped(profile: RangeProfile, choice: ScaleChoice) -> ScaleChoice:
    run = profile.run
    if run.loss_in_half and run.loss_amax is not None and math.isfinite(run.loss_amax):
        limit = loss_scale_limit(run.loss_amax)
        if limit is not None and limit < choice.exponent:
            choice = replace(choice, exponent=limit, bound_by="the loss, which stays fp16 when it is scaled")
    if choice.exponent > MAX_EXPONENT:
        choice = replace(choice, exponent=MAX_EXPONENT, bound_by="the cap, as no gradient comes near")
    return choice


# -- a dynamic scaler's settings in closed form from a trace, each with what bounds it --
#
# a = log2(growth_factor) and b = -log2(backoff_factor) throughout.


NOTHING = "nothing: the usual default"
USUAL_INTERVAL = 2000  # torch's growth_interval
SHORTEST_INTERVAL = 200
"""With a shorter interval, the skips after growths do more harm: 0.35 % of the steps at ln 2 / 200."""
STRONGEST_BACKOFF = 0.125


def growth_interval(
    growth_factor: float, backoff_factor: float, *, skip_rate: float, drift: float = 0.0, spikes: Spikes | None = None
) -> SettingBound:
    """Returns the usual 2000, or clamp(ln(1 + a/b) / rho, 200, smallest upper bound) if 2000 is too short or too long.

    Upper bounds, which win: a/|r|, so that the scale climbs as fast as gradients fall, and `Spikes.longest_interval`.
    `skip_rate` is rho, the share of steps that a settled scaler may skip. `drift` is r, the trend of log2 of the
    largest gradient per step; only a fall binds.
    """
    climb = math.log2(growth_factor)
    wanted = math.ceil(equilibrium_skip_rate(growth_factor, backoff_factor, 1) / skip_rate)
    upper = SettingBound(value=math.inf, by=NOTHING)
    if drift < 0.0:
        upper = SettingBound(value=climb / -drift, by="gradients that shrink")
    ratchet = spikes.longest_interval(growth_factor, backoff_factor) if spikes is not None else math.inf
    if ratchet < upper.value:
        upper = SettingBound(value=ratchet, by="spikes that would ratchet the scale down")
    if upper.value >= USUAL_INTERVAL and wanted <= USUAL_INTERVAL:
        return SettingBound(value=USUAL_INTERVAL, by=NOTHING)
    lower = max(wanted, SHORTEST_INTERVAL)
    if upper.value < USUAL_INTERVAL or upper.value < lower:
        return SettingBound(value=max(1, math.floor(min(lower, upper.value))), by=upper.by)
    return SettingBound(value=lower, by="the skip rate aimed at")


def backoff_factor(spikes: Spikes) -> SettingBound:
    """Returns 1/2 for isolated overflows; 2^-ceil(H/2) for bursts of height 2^H, at least 1/8; 3/4 against ratcheting.

    Each isolated overflow lowers log2 of the scale by b whatever its size, and 3/4 makes b 0.4. But 3/4 skips 1.8 times
    as often at the same interval, so it is only for spikes that would push the interval below 200. `spikes` are at the
    scale that the usual steps allow, and the framework has no hysteresis.
    """
    if spikes.isolated:
        if spikes.longest_interval(2.0, 0.5) < SHORTEST_INTERVAL:
            return SettingBound(value=0.75, by="spikes that would ratchet the scale down")
        return SettingBound(value=0.5, by="isolated spikes")
    halvings = math.ceil(min(spikes.height, 64.0) / 2.0)
    if halvings > 1:
        return SettingBound(value=max(2.0**-halvings, STRONGEST_BACKOFF), by="bursts of overflows")
    return SettingBound(value=0.5, by=NOTHING)


def growth_factor(drift: float, interval: float) -> SettingBound:
    """Returns 2; or 4 if gradients shrink by more than half per interval, which doubling cannot follow."""
    if -drift * interval > 1.0:
        return SettingBound(value=4.0, by="gradients that shrink")
    return SettingBound(value=2.0, by=NOTHING)


def hysteresis(spikes: Spikes) -> SettingBound:
    """Returns 2 if overflows are isolated spikes, so that the first one is ignored; else 1."""
    return SettingBound(value=2, by="isolated spikes") if spikes.isolated else SettingBound(value=1, by=NOTHING)


def alarm_scale(lowest: int) -> SettingBound:
    """Returns the scale at which something is wrong, never a floor: 2^max(lowest that does not flush - 4, -10)."""
    if lowest - 4 <= -10:
        return SettingBound(value=2.0**-10, by="2^-10, at which any run is in trouble")
    return SettingBound(value=2.0 ** (lowest - 4), by="gradients that flush, a factor of 16 further down")
