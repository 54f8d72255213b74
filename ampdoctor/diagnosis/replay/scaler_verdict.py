"""What a scaler that keeps skipping steps means, for a replay and for a loop that is watched."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ampdoctor.diagnosis.replay.causes import Cause, cause_of, derivative_beyond
from ampdoctor.evidence.checkpoint_stats import is_dead
from ampdoctor.evidence.report import Severity
from ampdoctor.evidence.trace import Birth, StepOutcome

PERSISTS = 4
"""Steps in a row, up to the end, that a scaler must skip before it counts as unable to settle, if it ever stepped.

A scaler that has just doubled its scale skips one step; an overflow of h binades is left after h more.
"""
NEVER_UPDATED = "scaler.update() is never called, so the scale never changes: call it once, after scaler.step."
MADE_ANEW = (
    "The scale does not come down although scaler.update() is called: a scaler that is made anew in each step forgets "
    "what it has learned. Make it once, before the loop."
)
MAKE_ONCE = (
    "make the GradScaler once, before the epochs, and hand it to what trains one: a new one begins at its init_scale "
    "again, and forgets what the last has learned"
)


@dataclass(frozen=True, slots=True)
class SkipVerdict:
    """What steps mean that a scaler skipped in a row.

    Attributes:
        cause: Why they were skipped.
        severity: A warning where the scale comes down to one that cures: a scaler at work, which should start lower.
        advice: What to do first; "" where the cause's own help says it all.
    """

    cause: Cause
    severity: Severity
    advice: str = ""


def verdict_on_skips(
    birth: Birth | None,
    *,
    scales: Sequence[float],
    steps: int,
    cures: bool,
    updated: bool,
    hopeless: bool = False,
    begun_again: int = 0,
) -> SkipVerdict:
    """Judge steps that were skipped for an overflow which a lower scale may cure.

    Args:
        birth: The overflow; None where no op was seen to make it.
        scales: The loss scale of each call of the scaler's `step`, in order.
        steps: How many steps were skipped.
        cures: A lower scale of at least 1 takes the overflow away.
        updated: The scaler's `update` was called.
        hopeless: fp32, without any scale, does not take it away either.
        begun_again: How often the scale was higher after a skip: of another scaler, as an update only lowers it then.
    """
    cause: Cause = "grad_overflow" if cures else "scaler_collapse"
    if not cures and birth is not None and (hopeless or derivative_beyond(birth)):
        cause = cause_of(birth)  # no scale works because nothing does, or because it is not the scale
    comes_down = steps < PERSISTS or len(set(scales)) > 1  # a scaler made anew in each step does not
    severity: Severity = "warning" if cures and comes_down and not begun_again else "error"
    return SkipVerdict(cause, severity, _advice(scales, updated=updated))


def times_begun_again(outcomes: Sequence[StepOutcome], optimizers: Container[str]) -> int:
    """Returns how often a loss scale is higher after a skip than in it: the scaler is a new one.

    Args:
        outcomes: Steps in a row.
        optimizers: Those whose updates count.
    """
    count = 0
    last: dict[str, float] = {}  # scale of the last update, where it was skipped
    for outcome in outcomes:
        skipped = {id(event) for event in outcome.updates_skipped}
        for event in outcome.events:
            if event.kind != "step" or event.scale is None or event.optimizer not in optimizers:
                continue
            name = event.optimizer
            count += name in last and event.scale > last[name]
            last.pop(name, None)
            if id(event) in skipped:
                last[name] = event.scale
    return count


def _advice(scales: Sequence[float], *, updated: bool) -> str:
    """An update lowers the scale after a skip: a scale that stays is that of scalers which have not skipped before."""
    if len(scales) < 2:
        return ""
    if not updated:
        return NEVER_UPDATED
    return MADE_ANEW if len(scales) >= PERSISTS and len(set(scales)) == 1 and scales[0] > 1.0 else ""


def scale_kills(birth: Birth, scale: float | None) -> bool:
    """The loss scale is dead, and what it makes non-finite comes after the loss."""
    return scale is not None and is_dead(scale) and birth.where.phase not in ("forward", "loss", "data")
