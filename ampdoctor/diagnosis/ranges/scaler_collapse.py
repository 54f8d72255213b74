"""AMP406: no loss scale of 1 or more works."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.report import Finding, Prescription

RULE = register("AMP406", "scaler-collapse", "No loss scale of 1 or more works", worst="error", commands=REPLAYED)


def no_valid_scale(
    fits: float, *, bound_by: str, stuck: bool, step: int | None, prescription: Prescription | None
) -> Finding:
    """AMP406.

    Args:
        fits: The largest scale without an expected overflow, below 1.
        bound_by: The tensor that forbids more.
        stuck: With the run's own scaling no step is taken at the end, or none was until the scale was below 1.
        step: The step that shows it.
        prescription: The change.
    """
    return range_finding(
        RULE,
        "error" if stuck else "warning",
        f"unscaled gradients are beyond fp16: {bound_by} fits only with a loss scale of {fits:g}",
        cause="scaler_collapse",
        where=where_at(step, phase="backward", nonfinite="inf" if stuck else "none"),
        evidence={"largest_that_fits": fits, "bound_by": bound_by},
        prescription=prescription,
    )
