"""Rules on the history of a loss scale (AMP403, AMP706, AMP707): from the log, and from the steps that were not taken.

A scaler that works loses a binade as often as it gains one: its skip rate lies between ln(1 + a/b) / N and a / (b N),
with a and b the binades of a growth and of a backoff and N the growth interval (0.03 to 0.05 % with the defaults).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

from ampdoctor.diagnosis.checkpoint.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.checkpoint.scaler_rules import fresh_scaler, scale_text
from ampdoctor.evidence.of_checkpoints.checkpoint import DEAD_SCALE, CheckpointSummary, LogEntry, ScalerState
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import (
    FEWEST_BACKOFFS,
    FROZEN_INTERVALS,
    HARMFUL_RATE,
    LONG_FALL,
    NORM_RISE,
    NOTABLE_FALL,
    NOTABLE_RATE,
)

USUAL_ENTRIES = 50
"""Entries whose median scale is what was usual; a notable fall below it is one, whatever grew in between (AMP706)."""
NORM_DECAY = 0.97
"""Of the moving average and variance of the norms before, ZClip's."""
LEAST_NORMS = 20
"""Norms from which these say something."""
LEAST_DEVIATION = 0.05
"""Standard deviation of a norm's logarithm that is taken at least: a log of constant norms has none."""
HIGHEST_CAP = 2.0**24
"""Apex's largest scale: one that stays there, or above, may be at a cap."""
START_SKIPS = 40
"""Steps that may be skipped while a first scale comes down: from 2^32 to 1 are 32."""
LEAST_SETTLING = 100
"""Steps without a backoff that end a first descent (hysteresis and noise make shorter rests on its way), and steps that
it may take at least, whatever the growth interval."""
SLOW_REST = 10
"""Clean steps after which a backoff is a slow one: far above what the gradients bear, nearly every step backs off."""
SLOW_BACKOFFS = 8
"""Slow backoffs that no first descent has.

Gradients whose largest values have a power-law tail of index a overflow 2^a times as seldom a binade lower: from one
step in 10 to one in a growth interval of N are log2(N / 10) / a binades, 7.6 with the default N at a = 1, where norms
cease to have a mean. Measured in 300 simulated descents each, hysteresis 1 or 2: at most 3 with norms that scatter by
0.7 binades (log-normal), 7 by 2.5.
"""
DEFAULT_INTERVAL = 2000
"""GradScaler's growth interval."""

_History = list[tuple[LogEntry, float]]


def scale_findings(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """What the scale's history says."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    history = [(e, e.scale) for e in entries if e.scale is not None and 0 < e.scale < math.inf]
    scaler = summary.scalers[0] if summary.scalers else _inferred(history)
    starts = _starts(history, scaler)
    settled = [_settled(one, scaler) for one in starts]
    if starts:
        yield from _spiral(summary, starts[-1], settled[-1], _interval(scaler), thresholds)
        if scaler is not None and not summary.scalers:  # a stored one tells it by its own counter
            yield from _stands(summary, starts[-1], scaler.growth_interval, thresholds)
    found = list(_rate(summary, scaler, settled, thresholds)) if scaler is not None else []
    yield from found
    if not found and summary.scalers:
        yield from _untaken(summary, summary.scalers[0], len(starts), thresholds)


def equilibrium(scaler: ScalerState) -> tuple[float, float] | None:
    """Smallest and largest share of steps that a settled scaler skips; None where its settings have no equilibrium."""
    if scaler.growth_factor <= 1 or not 0 < scaler.backoff_factor < 1 or scaler.growth_interval <= 0:
        return None
    ratio = math.log2(scaler.growth_factor) / -math.log2(scaler.backoff_factor)
    return math.log1p(ratio) / scaler.growth_interval, ratio / scaler.growth_interval


def _inferred(history: _History) -> ScalerState | None:
    """A scaler whose interval the log shows: growths come no sooner than that after the change before them.

    None without a growth after another change. Of entries that lie apart, the shortest time that they leave is taken.
    """
    interval, changed = math.inf, None
    for (before, scale), (entry, after) in itertools.pairwise(history):
        if changed is not None and scale < after <= 2 * scale:
            interval = min(interval, before.step - changed + 1)
        if after != scale:
            changed = entry.step
    if math.isinf(interval):
        return None
    return ScalerState(scale=history[-1][1], growth_interval=max(int(interval), 1))


def _starts(history: _History, scaler: ScalerState | None) -> list[_History]:
    """The history in pieces: a jump up by more than growths can do in that time is another scaler's first scale."""
    starts: list[_History] = [history[:1]] if history else []
    growth = math.log2(scaler.growth_factor) if scaler is not None and scaler.growth_factor > 1 else 1.0
    for (before, scale), (entry, after) in itertools.pairwise(history):
        growths = 1 + (max(entry.step - before.step - 1, 0) // _interval(scaler))
        if math.log2(after) - math.log2(scale) > growth * growths * (1 + 1e-6):
            starts.append([])
        starts[-1].append((entry, after))
    return starts


def _settled(start: _History, scaler: ScalerState | None) -> _History:
    """A piece of the history from where its first descent has ended; [] while it lasts.

    It ends with a growth, a long rest, or when there was time for a growth. A fall with clean stretches between many of
    its backoffs is none: it counts from the first of them. Where entries lie apart, only those between which the scale
    stays are known to be clean, and a drop between two counts as one backoff.
    """
    until = start[0][0].step + max(_interval(scaler), LEAST_SETTLING)
    resting = 0
    slow: list[int] = []
    settled: int | None = None
    for index in range(1, len(start)):
        old, (entry, new) = start[index - 1][1], start[index]
        if new > old or entry.step >= until:
            settled = index - 1
        elif new < old:
            if start[index - 1][0].step - start[resting][0].step >= SLOW_REST:
                slow.append(resting)
            resting = index
        elif entry.step - start[resting][0].step >= LEAST_SETTLING:
            settled = resting
        if settled is not None:
            break
    if len(slow) >= SLOW_BACKOFFS:
        return start[slow[0] :]
    return [] if settled is None else start[settled:]


def _interval(scaler: ScalerState | None) -> int:
    return scaler.growth_interval if scaler is not None and scaler.growth_interval > 0 else DEFAULT_INTERVAL


def _spiral(
    summary: CheckpointSummary, start: _History, settled: _History, interval: int, thresholds: Thresholds
) -> Iterator[Finding]:
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
    if grew or below:  # with growths in between, which do not make up for what is lost
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
    severity: Severity = "error" if low <= DEAD_SCALE else "warning" if bad else "note"
    message = (
        f"The loss scale has fallen from {scale_text(high)} at step {first.step} to {scale_text(low)} at step "
        f"{last.step} {'though it grew at times' if grew else 'without growing once'}: {fall:.3g} binades since step "
        f"{began}{f', and the gradient norm has risen by {rise:.3g} standard deviations with it' if alarm else ''}."
    )
    yield checkpoint_finding(
        summary,
        "AMP706",
        severity,
        message,
        evidence={
            "from": high,
            "to": low,
            "binades": fall,
            "first_step": began,
            "last_step": last.step,
            "norm_rise": rise,
        },
        phase="scaler",
        op="scaler_state",
        global_step=began,
        cause="scaler_collapse" if low < 1 else None,
        prescription=fresh_scaler() if low < 1 else None,
    )


def _rise(summary: CheckpointSummary, began: int) -> float | None:
    """By how many standard deviations the median gradient norm from a step on lies above those before; None without.

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


def _stands(summary: CheckpointSummary, start: _History, interval: int, thresholds: Thresholds) -> Iterator[Finding]:
    """A scale that used to grow and stays where it is, with no overflow to hold it there.

    Only where every step is logged: between two entries it may have grown and lost that again, as in health it does.
    """
    scale, last = start[-1][1], start[-1][0].step
    rest = 1
    while rest < len(start) and start[-rest - 1][1] == scale and start[-rest - 1][0].step == last - rest:
        rest += 1
    first = start[-rest][0].step
    norms = [e.grad_norm for e in summary.log if e.grad_norm is not None and first <= e.step <= last]
    if (
        last - first < thresholds[FROZEN_INTERVALS] * interval
        or scale >= HIGHEST_CAP
        or not all(map(math.isfinite, norms))
    ):
        return
    yield checkpoint_finding(
        summary,
        "AMP403",
        "note",
        f"The loss scale has stayed at {scale_text(scale)} from step {first} to {last} without an overflow; before, it "
        f"grew after {interval} steps.",
        evidence={"scale": scale, "first_step": first, "last_step": last, "growth_interval": interval},
        phase="scaler",
        op="scaler_state",
        global_step=first,
    )


def _rate(
    summary: CheckpointSummary, scaler: ScalerState, settled: list[_History], thresholds: Thresholds
) -> Iterator[Finding]:
    step_down = -math.log2(scaler.backoff_factor) if 0 < scaler.backoff_factor < 1 else 1.0
    pairs = [pair for piece in settled for pair in itertools.pairwise(piece)]
    lost = sum(math.log2(before) - math.log2(after) for (_, before), (_, after) in pairs if after < before)
    steps = sum(later.step - entry.step for (entry, _), (later, _) in pairs)
    backoffs = round(lost / step_down)
    if backoffs < thresholds[FEWEST_BACKOFFS] or steps <= 0:
        return
    yield from _skips(summary, scaler, backoffs, steps, thresholds, what="the logged scale backed off")


def _untaken(summary: CheckpointSummary, scaler: ScalerState, starts: int, thresholds: Thresholds) -> Iterator[Finding]:
    """Steps that the run counted and the optimizer did not take."""
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
    yield checkpoint_finding(
        summary,
        "AMP707",
        "warning" if certain and rate >= thresholds[HARMFUL_RATE] else "note",
        message,
        evidence={
            "skip_rate": rate,
            "skipped": count,
            "steps": steps,
            "equilibrium": list(usual) if usual else None,
            "growth_interval": scaler.growth_interval,
        },
        phase="scaler",
        op="scaler_state",
    )
