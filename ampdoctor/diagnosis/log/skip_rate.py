"""AMP707: more steps are skipped than the scaler needs.

A scaler that works loses a binade as often as it gains one: its skip rate lies between ln(1 + a/b) / N and a / (b N),
with a and b the binades of a growth and of a backoff and N the growth interval (0.03 to 0.05 % with the defaults).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scale_history import History, scale_history
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import HORIZON, SKIP_RATE, Threshold, Thresholds

FEWEST_BACKOFFS = Threshold(
    code="AMP707",
    name="backoffs",
    default=5,
    unit="backoffs",
    lowest=1,
    highest=1_000_000,
    why="Backoffs in the log from which their rate says something: at equilibrium, fewer are chance.",
)
NOTABLE_RATE = Threshold(
    code="AMP707",
    name="notable",
    default=0.01,
    unit="share",
    why="Share of skipped steps that is worth a note: twenty times the equilibrium of the default settings.",
)
HARMFUL_RATE = Threshold(
    code="AMP707",
    name="harmful",
    default=0.1,
    unit="share",
    why="From here on it is a warning: a tenth of the run is lost work.",
    above=NOTABLE_RATE,
)
RULE = register(
    "AMP707",
    "skip-rate",
    "More steps are skipped than the scaler needs",
    worst="warning",
    commands=SCANNED,
    thresholds=(FEWEST_BACKOFFS, NOTABLE_RATE, HARMFUL_RATE, SKIP_RATE, HORIZON),
)

START_SKIPS = 40
"""Steps that may be skipped while a first scale comes down: from 2^32 to 1 are 32."""


def equilibrium(scaler: ScalerState) -> tuple[float, float] | None:
    """Smallest and largest share of steps that a settled scaler skips; None where its settings have no equilibrium."""
    if scaler.growth_factor <= 1 or not 0 < scaler.backoff_factor < 1 or scaler.growth_interval <= 0:
        return None
    ratio = math.log2(scaler.growth_factor) / -math.log2(scaler.backoff_factor)
    return math.log1p(ratio) / scaler.growth_interval, ratio / scaler.growth_interval


@RULE.judges(CheckpointSummary)
def skip_rate(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Backoffs that are logged; else skips that are; else, beside a stored scaler, steps that were not taken."""
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
    """Steps of which the log says that they were skipped: a scaler with patience skips without backing off."""
    told = [entry.skipped for entry in summary.log if entry.skipped is not None]
    if sum(told) > START_SKIPS * max(starts, 1):
        words = "the log says that the optimizer's step was left out"
        yield from _skips(summary, scaler, sum(told), len(told), thresholds, what=words)


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
        RULE,
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
