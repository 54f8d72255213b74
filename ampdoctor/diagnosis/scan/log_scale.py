"""Rules on the loss scale in a training log: how often steps are skipped, how far it falls."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue import SCANNED, rule
from ampdoctor.diagnosis.scan.scaler import History, interval_of, scale_history, scale_text, without_a_scale
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, CheckpointSummary, LogEntry, ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

SKIP_RATE_RULE = rule("AMP707", SCANNED)
FEWEST_BACKOFFS = SKIP_RATE_RULE["backoffs"]
NOTABLE_RATE = SKIP_RATE_RULE["notable"]
HARMFUL_RATE = SKIP_RATE_RULE["harmful"]

START_SKIPS = 40  # skips that a falling first scale may need: from 2^32 to 1 are 32


def equilibrium(scaler: ScalerState) -> tuple[float, float] | None:
    """Returns the smallest and largest share of steps that a settled scaler skips, if there is an equilibrium."""
    if scaler.growth_factor <= 1 or not 0 < scaler.backoff_factor < 1 or scaler.growth_interval <= 0:
        return None
    ratio = math.log2(scaler.growth_factor) / -math.log2(scaler.backoff_factor)
    return math.log1p(ratio) / scaler.growth_interval, ratio / scaler.growth_interval


@SKIP_RATE_RULE.judges(CheckpointSummary)
def skip_rate(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges logged backoffs, else logged skips, else steps that were not taken according to a stored scaler."""
    history = scale_history(summary)
    found = [] if history.scaler is None else list(_logged(summary, history.scaler, history.settled, thresholds))
    if not found and history.scaler is not None:
        found = list(_told(summary, history.scaler, len(history.starts), thresholds))
    yield from found
    if not found and summary.scalers:
        yield from _untaken(summary, summary.scalers[0], len(history.starts), thresholds)


def _logged(
    summary: CheckpointSummary, scaler: ScalerState, settled: list[History], thresholds: Thresholds
) -> Iterator[Finding]:
    step_down = -math.log2(scaler.backoff_factor) if 0 < scaler.backoff_factor < 1 else 1.0
    pairs = [pair for piece in settled for pair in itertools.pairwise(piece)]
    lost = sum(math.log2(before) - math.log2(after) for (_, before), (_, after) in pairs if after < before)
    steps = sum(later.step - entry.step for (entry, _), (later, _) in pairs)
    backoffs = round(lost / step_down)
    if backoffs < thresholds[FEWEST_BACKOFFS] or steps <= 0:
        return
    yield from _skips(summary, scaler, backoffs, steps, thresholds, what="the logged scale backed off")


def _told(summary: CheckpointSummary, scaler: ScalerState, starts: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges steps that the log calls skipped: a scaler with hysteresis skips without backing off."""
    told = [entry.skipped for entry in summary.log if entry.skipped is not None]
    if sum(told) > START_SKIPS * max(starts, 1):
        words = "the log says that the optimizer's step was left out"
        yield from _skips(summary, scaler, sum(told), len(told), thresholds, what=words)


def _untaken(summary: CheckpointSummary, scaler: ScalerState, starts: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges steps that the run counted and the optimizer did not take."""
    steps, taken = summary.global_step, [optimizer.steps[-1][0] for optimizer in summary.optimizers if optimizer.steps]
    if steps is None or len(taken) != 1 or not 0 < taken[0] < steps:
        return
    skipped = steps - int(taken[0])
    if skipped > START_SKIPS * max(starts, 1) and skipped >= thresholds[HARMFUL_RATE] * steps:
        words = "the optimizer did not step (or its state is younger than the run, or it accumulates)"
        yield from _skips(summary, scaler, skipped, steps, thresholds, what=words, certain=False)


def _skips(
    summary: CheckpointSummary,
    scaler: ScalerState,
    count: int,
    steps: int,
    thresholds: Thresholds,
    *,
    what: str,
    certain: bool = True,
) -> Iterator[Finding]:
    rate = min(count / steps, 1.0)
    usual = equilibrium(scaler)
    if rate < max(thresholds[NOTABLE_RATE], 3 * usual[1] if usual else 0.0):
        return
    beside = f" At equilibrium it is {100 * usual[0]:.2g} to {100 * usual[1]:.2g} %." if usual else ""
    message = f"In {count} of {steps} steps {what}: {100 * rate:.3g} % were skipped.{beside}"
    yield SKIP_RATE_RULE.finding(
        "warning" if certain and rate >= thresholds[HARMFUL_RATE] else "note",
        message,
        where=Where(phase="scaler", global_step=summary.global_step, op="scaler_state"),
        evidence={
            "skip_rate": rate,
            "skipped": count,
            "steps": steps,
            "equilibrium": list(usual) if usual else None,
            "growth_interval": scaler.growth_interval,
        },
    )


SCALE_SPIRAL = rule("AMP706", SCANNED)
NOTABLE_FALL = SCALE_SPIRAL["fall"]
LONG_FALL = SCALE_SPIRAL["long_fall"]
NORM_RISE = SCALE_SPIRAL["norm_rise"]

USUAL_ENTRIES = 50
"""Entries whose median scale was the usual one. A notable fall below it counts, whatever grew in between (AMP706)."""
NORM_DECAY = 0.97  # decay of the moving average and variance of the norms before: ZClip's
IN_A_ROW = 4  # successive entries in which the scale falls to 1 and below, as for the error of AMP723
LEAST_NORMS = 20  # fewer norms are not compared
LEAST_DEVIATION = 0.05  # least standard deviation of a norm's logarithm: a log of constant norms has none


@SCALE_SPIRAL.judges(CheckpointSummary)
def scale_spiral(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges a scale that has fallen more than it rose, up to the log's end."""
    history = scale_history(summary)
    if not history.starts:
        return
    start, settled, interval = history.starts[-1], history.settled[-1], interval_of(history.scaler)
    notable, long = thresholds[NOTABLE_FALL], thresholds[LONG_FALL]
    fallen = settled if start[-1][1] >= 1 else start
    if len(fallen) < 2:
        return
    low = fallen[-1][1]
    top = max((i for i in range(1, len(fallen)) if fallen[i][1] > fallen[i - 1][1]), default=0)
    net = math.log2(fallen[0][1]) - math.log2(low)
    since = math.log2(fallen[top][1]) - math.log2(low)
    grew = top > 0 and net > max(since, long - 1e-6)
    usual = statistics.median_high(scale for _, scale in fallen[-USUAL_ENTRIES:])
    below = since < notable <= math.log2(usual) - math.log2(low)
    if grew or below:  # growths in between do not make up for the loss
        grew, top = True, 0 if grew else max(i for i, (_, scale) in enumerate(fallen) if scale >= usual)
    (first, high), (last, low) = fallen[top], fallen[-1]
    fall = math.log2(high) - math.log2(low)
    if fall < notable:
        return
    began = next(e.step for e, scale in fallen[top:] if scale < high)
    sudden = below or next(e.step for e, scale in fallen[top:] if scale <= low) - began <= interval
    rise = _rise(summary, began) if sudden else None
    alarm = rise is not None and rise > thresholds[NORM_RISE]
    if below and not alarm and fall < long:
        return
    bad = fall >= long or low < 1 or alarm
    falling = len(fallen) > IN_A_ROW and all(after < before for (_, before), (_, after) in _last(fallen))
    severity: Severity = "error" if low <= DEAD_SCALE or (low <= 1 and falling) else "warning" if bad else "note"
    message = (
        f"The loss scale has fallen from {scale_text(high)} at step {first.step} to {scale_text(low)} at step "
        f"{last.step} {'though it grew at times' if grew else 'without growing once'}: {fall:.3g} binades since step "
        f"{began}{f', and the gradient norm has risen by {rise:.3g} standard deviations with it' if alarm else ''}."
    )
    yield SCALE_SPIRAL.finding(
        severity,
        message,
        where=Where(phase="scaler", global_step=began, op="scaler_state"),
        cause="scaler_collapse" if low < 1 else None,
        evidence={
            "from": high,
            "to": low,
            "binades": fall,
            "first_step": began,
            "last_step": last.step,
            "norm_rise": rise,
        },
        prescription=without_a_scale() if low < 1 else None,
    )


def _last(history: History) -> Iterator[tuple[tuple[LogEntry, float], tuple[LogEntry, float]]]:
    return itertools.pairwise(history[-IN_A_ROW - 1 :])


def _rise(summary: CheckpointSummary, began: int) -> float | None:
    """Returns how far the median gradient norm from a step on is above those before, in standard deviations.

    Of logarithms, as norms have a long tail. The median, because among many norms one is always high by chance.
    """
    norms = [
        (entry.step, math.log(entry.grad_norm))
        for entry in sorted(summary.log, key=lambda entry: entry.step)
        if entry.grad_norm is not None and 0 < entry.grad_norm < math.inf
    ]
    before, after = [v for step, v in norms if step < began], [v for step, v in norms if step >= began]
    if len(before) < LEAST_NORMS or not after:
        return None
    mean, variance = statistics.fmean(before[:LEAST_NORMS]), statistics.pvariance(before[:LEAST_NORMS])
    for value in before[LEAST_NORMS:]:
        variance = NORM_DECAY * (variance + (1 - NORM_DECAY) * (value - mean) ** 2)
        mean += (1 - NORM_DECAY) * (value - mean)
    return (statistics.median(after) - mean) / max(math.sqrt(variance), LEAST_DEVIATION)
