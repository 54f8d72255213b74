"""AMP303: no single loss scale serves all modules."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import RECOMMENDED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import FP32_SHARE, Thresholds

RULE = register(
    "AMP303",
    "no-common-scale",
    "No single loss scale serves all modules",
    worst="warning",
    commands=RECOMMENDED,
    thresholds=(FP32_SHARE,),
)


def no_common_scale(
    modules: Sequence[str], share: float, scale: float, prescription: Prescription | None, thresholds: Thresholds
) -> Finding:
    """AMP303: the modules that the best scale misses, and their share of the parameters."""
    return range_finding(
        RULE,
        "warning" if share > thresholds[FP32_SHARE] else "note",
        f"no single loss scale serves all modules: at {scale:g}, the best, the gradients of {len(modules)} of them "
        f"({share:.1%} of the parameters) lose more than bf16 would",
        where=where_at(None, phase="backward", module=modules[0]),
        also=tuple(where_at(None, phase="backward", module=name) for name in modules[1:]),
        evidence={"modules": list(modules), "share": share, "loss_scale": scale},
        prescription=prescription,
    )
