"""AMP302: activations do not fit fp16."""

from __future__ import annotations

from collections.abc import Mapping

from ampdoctor.diagnosis.catalogue.rule import RECOMMENDED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import Threshold, Thresholds

HEADROOM = Threshold(
    code="AMP302",
    name="headroom",
    default=1.0,
    unit="binades",
    lowest=0.0,
    highest=15.0,
    why="Distance to fp16's 65504 within which activations are reported: one doubling from overflow.",
)
RULE = register(
    "AMP302",
    "forward-range",
    "Activations do not fit fp16",
    worst="error",
    commands=RECOMMENDED,
    thresholds=(HEADROOM,),
)


def near_limit(thresholds: Thresholds) -> float:
    """Magnitude from which activations are close to overflow in fp16 (AMP302)."""
    near: float = FP16_MAX / 2.0 ** thresholds[HEADROOM]
    return near


def forward_range(
    modules: Mapping[str, float], *, broken: str | None, step: int | None, prescription: Prescription | None
) -> Finding:
    """AMP302.

    Args:
        modules: Largest magnitude by module, of those near or beyond the limit.
        broken: What became non-finite in the fp16 replay; None where it stayed finite.
        step: The step where it did.
        prescription: The change.
    """
    worst = max(modules, key=lambda name: (modules[name], name), default="")
    size = f"activations of {worst or 'the model'} reach {modules[worst]:.4g}" if modules else "a value of the forward"
    tail = f", and in fp16 {broken} is not finite at step {step}" if broken is not None else ""
    beyond = " does not fit" if not modules else ""
    return range_finding(
        RULE,
        "error" if broken is not None else "warning",
        f"{size}{beyond} (fp16 ends at 65504){tail}: no loss scale helps a forward",
        cause="forward_overflow",
        where=where_at(step, phase="forward", module=worst, nonfinite="inf" if broken is not None else "none"),
        also=tuple(where_at(None, phase="forward", module=name) for name in sorted(modules) if name != worst),
        evidence={"modules": dict(sorted(modules.items())), "limit": FP16_MAX, "nonfinite": broken},
        prescription=prescription,
    )
