"""AMP405: the loss scale is above what the gradients allow."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.report import Finding, Prescription

RULE = register(
    "AMP405", "scale-too-high", "The loss scale is above what the gradients allow", worst="error", commands=REPLAYED
)


def scale_too_high(
    scale: float, wanted: float, *, step: int, harmed: str | None, bound_by: str, prescription: Prescription | None
) -> Finding:
    """AMP405.

    Args:
        scale: The run's loss scale at that step.
        wanted: The recommended one.
        step: First step that is harmed, or the last that is skipped.
        harmed: What became non-finite; None where steps are skipped to the end.
        bound_by: The tensor that forbids more.
        prescription: The change.
    """
    what = "the scaler still skips the last step"
    if harmed is not None:
        what = f"{harmed} becomes non-finite, and nothing skips the step"
    return range_finding(
        RULE,
        "warning" if harmed is None else "error",
        f"at a loss scale of {scale:g} scaled gradients overflow fp16: {what} (step {step}); "
        f"{bound_by} fits up to {wanted:g}",
        cause="grad_overflow",
        where=where_at(step, phase="backward", nonfinite="inf"),
        evidence={"loss_scale": scale, "largest_that_fits": wanted, "bound_by": bound_by, "harmed": harmed},
        prescription=prescription,
    )
