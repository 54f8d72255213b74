"""Predicts how another loss-scaler setting would have worked in a run, from the headroom in its log.

A log has no gradients, but it bounds the largest of each step: that of a skipped step overflowed at its scale, that of
a taken step did not, and the headroom is its distance from overflow. A span of many steps keeps the extremes of their
headroom: one of its steps gets the largest gradient, the others the median one. The scaler's own rules
(`ampdoctor.scaling`) do the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.report_health import HealthRun
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments
from ampdoctor.evidence.targets import Framework
from ampdoctor.evidence.thresholds import FLUSHED, SKIP_RATE, Thresholds
from ampdoctor.numerics import FORMATS
from ampdoctor.scaling import LIM, ScalerSettings, choose, highest_exponent, upper_log2
from ampdoctor.scaling.choose import DEFAULT_TAIL, MAX_EXPONENT
from ampdoctor.scaling.closed_forms import find_spikes
from ampdoctor.scaling.scalers import RULES, GradScalerSim, Simulation, expressible, simulate_lanes
from ampdoctor.scaling.search import FEWEST_STEPS, MOST_SKIPS, WORTH_SKIPS, drawn
from ampdoctor.scaling.trace import find_drift

Array = NDArray[np.float64]
NO_ROOM = math.log2(FORMATS["fp16"].max)  # log2 of the value at a headroom of 0 powers of two: 65504
FP16_BINADES = NO_ROOM + 24  # from fp16's smallest number, 2^-24, to its largest: the largest possible headroom
HAIR = 1e-6  # distance from the limit in powers of two, more than the rounding error of a logarithm


def with_proposed_scaling(run: HealthRun, thresholds: Thresholds, framework: Framework = "torch") -> HealthRun:
    """Return the run with `recommended` and `would_be` of its scaler, where other settings would have been better."""
    # Better means fewer skipped steps, by a thousandth of all; or, where gradients were flushed to zero, a scale at
    # least twice as large for few skipped steps. A run with several scalers is returned unchanged: its headroom does
    # not say whose gradients it belongs to.
    if len(run.scalers) != 1 or not run.steps:
        return run
    gradients = largest_gradients(run)
    if gradients is None or gradients.known < FEWEST_STEPS:
        return run
    settings = proposed(gradients.log2_amax, thresholds, framework)
    simulated = simulate_lanes([settings], np.exp2(gradients.log2_amax)[None, :], framework)
    if not _better(simulated, gradients, flushes=_flushes(run, thresholds)):
        return run
    path = drawn(simulated)
    would_be = ScalePath(
        points=tuple((step + run.first_step, scale) for step, scale in path.points),
        changes=path.changes,
        skips=tuple(step + run.first_step for step in path.skips),
        skipped=path.skipped,
        replica=0,
    )
    recommended = ScalerArguments(**settings.arguments())
    return replace(run, scalers=(replace(run.scalers[0], recommended=recommended, would_be=would_be),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestGradients:
    """Bounds from a log on the largest gradient of each step of the run."""

    log2_amax: Array  # one for each step from first to last, finite; for a skipped step the least that overflows
    scale: Array  # the loss scale of each step
    skipped: int  # number of skipped steps
    known: int  # number of spans with a headroom in the log


def largest_gradients(run: HealthRun) -> LargestGradients | None:
    """Return the largest gradients of a run with one scaler; None where its log has no headroom or no scale."""
    # Between two steps with a known headroom, the earlier one's largest gradient is used, within the step's own bounds.
    curve = next((curve for curve in run.curves if curve.name == "headroom_binades"), None)
    points = [(step, scale) for step, scale in run.scalers[0].path.points if 0.0 < scale < math.inf]
    if curve is None or not points or not run.axis.last:
        return None
    first = np.array(run.axis.first) - run.first_step
    last = np.array(run.axis.last) - run.first_step
    steps = np.arange(int(last[-1]) + 1)
    starts, scales = np.array(points).T
    log2_scale = np.log2(scales)[np.maximum(np.searchsorted(starts, steps + run.first_step, side="right") - 1, 0)]

    usual, least = (_numbers(values) for values in (curve.middle, curve.low))
    known = np.flatnonzero(np.isfinite(usual))
    if len(known) == 0 or np.median(usual[known]) > FP16_BINADES:  # a run in bf16 with a scaler that it does not need
        return None
    of_span = np.clip(np.searchsorted(last, steps), 0, len(last) - 1)
    source = known[np.clip(np.searchsorted(known, np.arange(len(last)), side="right") - 1, 0, None)]
    # a headroom holds at the scale of its own span; a span without one keeps the gradient of the last known span
    scale_then = log2_scale[last[source]]
    log2_amax = (NO_ROOM - usual[source] - scale_then)[of_span]
    worst = (first[known] + last[known]) // 2
    log2_amax[worst] = NO_ROOM - least[known] - log2_scale[worst]
    log2_amax = np.minimum(log2_amax, LIM - log2_scale - HAIR)  # a taken step did not overflow

    skipped, exact = _skipped_steps(run, first, last)
    highest = np.array([log2_scale[begin : end + 1].max() for begin, end in zip(first, last, strict=True)])
    overflowed = log2_scale[skipped] if exact else highest[of_span[skipped]]
    log2_amax[skipped] = LIM - overflowed + HAIR
    return LargestGradients(log2_amax=log2_amax, scale=np.exp2(log2_scale), skipped=len(skipped), known=len(known))


def proposed(log2_amax: Array, thresholds: Thresholds, framework: Framework) -> ScalerSettings:
    """Return settings in closed form for a run with these largest gradients: `log2_amax` of shape (steps,), finite."""
    drift = find_drift(log2_amax)
    spikes = find_spikes(log2_amax - drift.slope * np.arange(len(log2_amax)))
    largest = [float(part.max()) for part in np.array_split(log2_amax, min(2000, len(log2_amax)))]
    halves = RULES[framework] is not GradScalerSim
    backoff = 0.5 if halves else choose.backoff_factor(spikes, hysteresis_available=False).value
    interval = choose.growth_interval(
        2.0, backoff, skip_rate=thresholds[SKIP_RATE], drift=drift.slope, steps_left=len(log2_amax), spikes=spikes
    ).value
    return expressible(
        ScalerSettings(
            scale=2.0 ** min(highest_exponent(upper_log2(largest, DEFAULT_TAIL)), MAX_EXPONENT),
            growth_factor=2.0 if halves else choose.growth_factor(drift.slope, interval).value,
            backoff_factor=backoff,
            growth_interval=int(interval),
            hysteresis=int(choose.hysteresis(spikes).value),
        ),
        framework,
    )


def _numbers(values: tuple[float | None, ...]) -> Array:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _skipped_steps(run: HealthRun, first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """Return the skipped steps, and whether they are exact."""
    # Where the path has only some of them, they are spread evenly over each span that counts them
    path = run.scalers[0].path
    if len(path.skips) == path.skipped:
        return np.array([step - run.first_step for step in path.skips], np.int64), True
    found = [
        np.linspace(begin, end, min(many, end - begin + 1) + 2)[1:-1].round().astype(np.int64)
        for begin, end, many in zip(first.tolist(), last.tolist(), run.axis.skipped, strict=False)
        if many
    ]
    return (np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)), False


def _better(simulated: Simulation, gradients: LargestGradients, *, flushes: bool) -> bool:
    steps = len(gradients.log2_amax)
    skips = int((simulated.skipped[0, 0] | simulated.ended[0, 0]).sum())
    if gradients.skipped - skips >= WORTH_SKIPS * steps:
        return True
    gained = float(np.median(np.log2(simulated.scale[0, 0])) - np.median(np.log2(gradients.scale)))
    return flushes and gained >= 1.0 and skips <= max(gradients.skipped, MOST_SKIPS * steps)


def _flushes(run: HealthRun, thresholds: Thresholds) -> bool:
    """Return whether, at most measurements, some tensor's gradients were flushed beyond the threshold."""
    for one in run.maps:
        if one.name == "flushed_share" and one.role == "gradient" and one.values:
            shares = np.array([[math.nan if v is None else v for v in row] for row in one.values], np.float64)
            worst = [float(np.nanmax(column)) for column in shares.T if not np.isnan(column).all()]
            if worst and float(np.median(worst)) > thresholds[FLUSHED]:
                return True
    return False
