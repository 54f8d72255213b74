"""A loss scale that a recommendation cannot start from (AMP401)."""

from __future__ import annotations

from ampdoctor.diagnosis.ranges.range_finding import range_finding
from ampdoctor.diagnosis.scaler.dead_scaler import RULE
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.where import Where


def dead_scaler(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """AMP401: the scale before the first step, or one that the scaler reaches, has no finite inverse in fp32.

    Args:
        scale: Before the first step.
        prescription: The change.
        reached: That scale is sound; the scaler's settings take it to one that is not.
    """
    falls = f"from {scale:g} the scaler's settings take the loss scale to one that has no finite inverse in fp32"
    return range_finding(
        RULE,
        "error",
        f"{falls if reached else f'the loss scale of {scale:g} has no finite inverse in fp32'}: a step that is not "
        "skipped writes infinities into the weights",
        cause="scaler_collapse" if reached else "bad_checkpoint",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        evidence={"scale": scale},
        prescription=prescription,
    )
