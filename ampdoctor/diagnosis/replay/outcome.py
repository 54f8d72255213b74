"""Rules on the replay itself: not reproduced, not deterministic, not finite in fp32 either."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdoctor.diagnosis.catalogue import MEASURED, REPLAYED, rule, scale_text
from ampdoctor.diagnosis.health.loss_rules import STEPS_NOT_FINITE
from ampdoctor.diagnosis.health.run_rules import NO_STEP_TAKEN
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Report, Severity
from ampdoctor.evidence.trace import NonFiniteOrigin

NOT_REPRODUCED = rule("AMP902", REPLAYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """Evidence from outside the replay that the run fails."""

    why: str  # the evidence in words
    step: int | None = None  # the first global step at which it fails, if known


def known_failure(
    of_log: Iterable[Finding], loss: float | None, scaler: ScalerState | None, *, said: bool
) -> KnownFailure | None:
    """Returns the evidence that the run fails: its log's, a saved loss, a falling scale, or that the user `said` so."""
    for one in of_log:
        step, lost, norm = one.where.global_step, one.evidence.get("loss"), one.evidence.get("gradient_norm")
        if one.code == STEPS_NOT_FINITE.code and one.severity != "note":
            if lost is not None and not math.isfinite(lost):
                return KnownFailure(why=f"its log has a loss of {lost} at step {step}", step=step)
            if one.severity == "error":
                return KnownFailure(why=f"its log has gradient norms of {norm} from step {step} on", step=step)
        if one.code == NO_STEP_TAKEN.code and one.severity == "error":
            return KnownFailure(why="by its log no step is taken any more", step=step)
    if loss is not None and not math.isfinite(loss):
        return KnownFailure(why=f"a loss of {loss} was saved with its checkpoint")
    if scaler is not None and 0 < scaler.scale < 1 and scaler.growth_tracker == 0:
        return KnownFailure(why=f"its checkpoint's loss scale has come down to {scale_text(scaler.scale)}")
    return KnownFailure(why="so the user says") if said else None


def not_reproduced_finding(known: KnownFailure, seen: Mapping[str, Any], differs: Sequence[str]) -> Finding:
    """Makes the note: why a clean replay (`seen`, in numbers) proves no healthy run, and what to change."""
    steps = seen["steps"]
    return NOT_REPRODUCED.finding(
        "note",
        f"the run is known to fail ({known.why}); {steps} step{'' if steps == 1 else 's'} of it stayed finite here",
        where=Where(step=max(steps - 1, 0), phase="loss"),
        evidence={"known_from": known.why, "failing_step": known.step, **seen, "differences": list(differs)},
        advice="What differs here: " + "; ".join(differs) + ".",
    )


def comparison_left_out(report: Report) -> str | None:
    """Returns the option with which the user limited the comparison with fp32, if a known failure did not show."""
    compared = next((one.evidence.get("compared") for one in report.found if one.code == NOT_REPRODUCED.code), None)
    return None if compared is None else "--compare-steps" if compared else "--no-compare"


NONDETERMINISTIC_REPLAY = rule("AMP901", REPLAYED)


def nondeterministic_finding(
    step: int, what: str, first: float, second: float, severity: Severity = "warning"
) -> Finding:
    """Makes the finding for a step that gave other bits; the loss or the largest values of `what` differed first."""
    return NONDETERMINISTIC_REPLAY.finding(
        severity,
        f"step {step} gives other numbers from the same state and random state. First the {what or 'loss'} differs: "
        f"{first:.9g}, then {second:.9g}.",
        where=Where(step=step, phase="forward"),
        evidence={"differs": what or "loss", "first": first, "second": second},
        advice="Seed every generator in the factory, and keep counters and files of the loop inside it.",
    )


NONFINITE_IN_FP32 = rule("AMP206", MEASURED)

DIVERGES = (
    "No precision and no loss scale cures it: lower the learning rate or warm it up, clip the gradients, and look at "
    "the data and the formula."
)


def diverging_finding(origin: NonFiniteOrigin, losses: Sequence[float | None]) -> Finding:
    """Makes the finding for a run that its updates ruin in fp32 too; `losses` are fp32's up to that step."""
    last = len(losses) - 1
    before = losses[last - 1]
    grew = "" if losses[0] is None or before is None else f" (loss {losses[0]:.3g} in step 0, {before:.3g} before it)"
    return NONFINITE_IN_FP32.finding(
        "error",
        f"step {origin.where.step} is not finite, and in fp32 from the start step {last} is not either{grew}. "
        "The updates drive the run there: precision is not the cause.",
        where=Where(step=origin.where.step, phase=origin.where.phase, nonfinite=origin.where.nonfinite),
        evidence={"fp32_step": last, "fp32_losses": list(losses)},
        advice=DIVERGES,
        prescription=Prescription.untried(DIVERGES, "how large a step the run bears is not tried"),
    )


def nonfinite_in_fp32(steps: Sequence[int]) -> Finding:
    """Makes the finding of AMP206: the fp32 reference itself is not finite at these steps."""
    return NONFINITE_IN_FP32.finding(
        "error",
        f"step {steps[0]} is not finite in fp32 either (loss, gradients or state): precision is not the cause",
        where=Where(step=steps[0], phase="backward", nonfinite="nan"),
        evidence={"steps": list(steps)},
        prescription=Prescription.untried(
            NONFINITE_IN_FP32.page.texts["action"], "what to change depends on what makes the value"
        ),
    )
