"""Rules on the history of a loss scale (AMP706, AMP707): from the log, and from the steps that were not taken.

A scaler that works loses a binade as often as it gains one: its skip rate lies between ln(1 + a/b) / N and a / (b N),
with a and b the binades of a growth and of a backoff and N the growth interval (0.03 to 0.05 % with the defaults).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ampdoctor.diagnosis.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.scaler_rules import fresh_scaler, scale_text
from ampdoctor.evidence.checkpoint import DEAD_SCALE, CheckpointSummary, LogEntry, ScalerState
from ampdoctor.evidence.report import Finding, Severity

SPIRAL_BINADES = 4.0
"""Binades lost without a growth between them that are worth a word (AMP706)."""
LONG_SPIRAL_BINADES = 8.0
"""From here on no scale seems to do."""
FEWEST_BACKOFFS = 5
"""Backoffs from which their rate says something: at equilibrium, fewer are chance (AMP707)."""
NOTABLE_RATE, HARMFUL_RATE = 0.01, 0.1
"""Shares of skipped steps: twenty times the equilibrium of the defaults, and a tenth of the run (AMP707)."""
START_SKIPS = 40
"""Steps that may be skipped while the first scale comes down: from 2^32 to 1 are 32."""

_History = list[tuple[LogEntry, float]]


def scale_findings(summary: CheckpointSummary) -> Iterator[Finding]:
    """What the scale's history says."""
    scaler = summary.scalers[0] if summary.scalers else ScalerState(scale=1.0)
    entries = sorted(summary.log, key=lambda entry: entry.step)
    history = [(e, e.scale) for e in entries if e.scale is not None and 0 < e.scale < math.inf]
    settled = _settled(history)
    yield from _spiral(summary, settled)
    found = list(_rate(summary, scaler, settled))
    yield from found
    if not found:
        yield from _untaken(summary, scaler)


def equilibrium(scaler: ScalerState) -> tuple[float, float] | None:
    """Smallest and largest share of steps that a settled scaler skips; None where its settings have no equilibrium."""
    if scaler.growth_factor <= 1 or not 0 < scaler.backoff_factor < 1 or scaler.growth_interval <= 0:
        return None
    ratio = math.log2(scaler.growth_factor) / -math.log2(scaler.backoff_factor)
    return math.log1p(ratio) / scaler.growth_interval, ratio / scaler.growth_interval


def _settled(history: _History) -> _History:
    """The history from where the first descent has ended."""
    start = next((i for i in range(1, len(history)) if history[i][1] >= history[i - 1][1]), len(history))
    return history[start - 1 :]


def _spiral(summary: CheckpointSummary, settled: _History) -> Iterator[Finding]:
    if len(settled) < 2:
        return
    top = max((i for i in range(1, len(settled)) if settled[i][1] > settled[i - 1][1]), default=0)
    (first, high), (last, low) = settled[top], settled[-1]
    fall = math.log2(high) - math.log2(low)
    if fall < SPIRAL_BINADES:
        return
    bad = fall >= LONG_SPIRAL_BINADES or low < 1
    began = next(e.step for e, scale in settled[top:] if scale < high)
    severity: Severity = "error" if low <= DEAD_SCALE else "warning" if bad else "note"
    message = (
        f"The loss scale has fallen from {scale_text(high)} at step {first.step} to {scale_text(low)} at step "
        f"{last.step} without growing once: {fall:.3g} binades since step {began}."
    )
    yield checkpoint_finding(
        summary,
        "AMP706",
        severity,
        message,
        evidence={"from": high, "to": low, "binades": fall, "first_step": began, "last_step": last.step},
        phase="scaler",
        op="scaler_state",
        global_step=began,
        cause="scaler_collapse" if low < 1 else None,
        prescription=fresh_scaler() if low < 1 else None,
    )


def _rate(summary: CheckpointSummary, scaler: ScalerState, settled: _History) -> Iterator[Finding]:
    if len(settled) < 2:
        return
    step_down = -math.log2(scaler.backoff_factor) if 0 < scaler.backoff_factor < 1 else 1.0
    pairs = itertools.pairwise(settled)
    lost = sum(math.log2(before) - math.log2(after) for (_, before), (_, after) in pairs if after < before)
    steps = settled[-1][0].step - settled[0][0].step
    backoffs = round(lost / step_down)
    if backoffs < FEWEST_BACKOFFS or steps <= 0:
        return
    yield from _skips(summary, scaler, backoffs, steps, what="the logged scale backed off")


def _untaken(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    """Steps that the run counted and the optimizer did not take."""
    steps, taken = summary.global_step, [optimizer.steps[-1][0] for optimizer in summary.optimizers if optimizer.steps]
    if not summary.scalers or steps is None or len(taken) != 1 or not 0 < taken[0] < steps:
        return
    skipped = steps - int(taken[0])
    if skipped > START_SKIPS and skipped >= HARMFUL_RATE * steps:
        words = "the optimizer did not step (or its state is younger than the run, or it accumulates)"
        yield from _skips(summary, scaler, skipped, steps, what=words, certain=False)


def _skips(
    summary: CheckpointSummary, scaler: ScalerState, count: int, steps: int, *, what: str, certain: bool = True
) -> Iterator[Finding]:
    rate = min(count / steps, 1.0)
    usual = equilibrium(scaler)
    if rate < max(NOTABLE_RATE, 3 * usual[1] if usual else 0.0):
        return
    beside = f" At equilibrium it is {100 * usual[0]:.2g} to {100 * usual[1]:.2g} %." if usual else ""
    message = f"In {count} of {steps} steps {what}: {100 * rate:.3g} % were skipped.{beside}"
    yield checkpoint_finding(
        summary,
        "AMP707",
        "warning" if certain and rate >= HARMFUL_RATE else "note",
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
