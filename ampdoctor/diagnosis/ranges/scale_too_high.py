"""AMP405: the loss scale is above what the gradients allow."""

from __future__ import annotations

from dataclasses import replace

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.report import Finding, Prescription

RULE = register(
    "AMP405", "scale-too-high", "The loss scale is above what the gradients allow", worst="error", commands=REPLAYED
)


def scale_too_high(
    scale: float,
    wanted: float,
    *,
    step: int,
    harmed: str | None,
    bound_by: str,
    prescription: Prescription | None,
    begun_again: int = 0,
) -> Finding:
    """AMP405.

    Args:
        scale: The run's loss scale at that step.
        wanted: The recommended one.
        step: First step that is harmed, or the last that is skipped.
        harmed: What became non-finite; None where steps are skipped to the end.
        bound_by: The tensor that forbids more.
        prescription: The change.
        begun_again: How often the scale was back at its first value after a skip.
    """
    what = "the scaler still skips the last step"
    if begun_again:
        what = f"the scaler is made anew {begun_again} times, as in each epoch, and still skips the last step"
    if harmed is not None:
        what = f"{harmed} becomes non-finite, and nothing skips the step"
    found = range_finding(
        RULE,
        "warning" if harmed is None and not begun_again else "error",
        f"at a loss scale of {scale:g} scaled gradients overflow fp16: {what} (step {step}); "
        f"{bound_by} fits up to {wanted:g}",
        cause="grad_overflow",
        where=where_at(step, phase="backward", nonfinite="inf"),
        evidence={"loss_scale": scale, "largest_that_fits": wanted, "bound_by": bound_by, "harmed": harmed},
        prescription=prescription,
    )
    return replace(found, help=f"Make the GradScaler once, before the epochs. {found.help}") if begun_again else found
