"""AMP206: the run is not finite in fp32 either."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import MEASURED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.trace import Birth

RULE = register("AMP206", "nonfinite-in-fp32", "The run is not finite in fp32 either", worst="error", commands=MEASURED)

DIVERGES = (
    "No precision and no loss scale cures it: lower the learning rate or warm it up, clip the gradients, and look at "
    "the data and the formula."
)


def diverging_finding(birth: Birth, losses: Sequence[float | None]) -> Finding:
    """In fp32 the updates drive the run out of the finite as well, at once or a few steps later.

    Args:
        birth: Where it left the compute format first.
        losses: In fp32, of all steps up to the one that is not finite.
    """
    last = len(losses) - 1
    before = losses[last - 1]
    grew = "" if losses[0] is None or before is None else f" (loss {losses[0]:.3g} in step 0, {before:.3g} before it)"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        message=f"step {birth.where.step} is not finite, and in fp32 from the start step {last} is not either{grew}: "
        "the updates drive the run there, and precision is not the cause",
        where=Where(step=birth.where.step, phase=birth.where.phase, nonfinite=birth.where.nonfinite),
        evidence={"fp32_step": last, "fp32_losses": list(losses)},
        help=DIVERGES,
        prescription=Prescription(
            kind="code",
            value=DIVERGES,
            status="not_run",
            detail=DIVERGES,
            reason="how large a step the run bears is not tried",
        ),
    )


def nonfinite_in_fp32(steps: Sequence[int]) -> Finding:
    """AMP206: the fp32 reference itself is not finite at these steps."""
    return range_finding(
        RULE,
        "error",
        f"step {steps[0]} is not finite in fp32 either (loss, gradients or state): precision is not the cause",
        where=where_at(steps[0], phase="backward", nonfinite="nan"),
        evidence={"steps": list(steps)},
        prescription=Prescription(
            kind="code",
            value=RULE.page.action,
            status="not_run",
            detail=RULE.page.action,
            reason="what to change depends on what makes the value",
        ),
    )
