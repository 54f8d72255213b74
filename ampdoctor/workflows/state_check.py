"""The state of a run before its first step, and of its scaler after the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.findings import state_finding
from ampdoctor.evidence.where import Where
from ampdoctor.probes.nonfinite import state_tensors
from ampdoctor.probes.op_trace import is_nonfinite, stats_of

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.replay.session import Session

DEAD_SCALE = 2.0**-128
"""At and below this scale 1/scale is infinite in fp32, and a clean step writes infinities (measured, torch 2.13)."""


def sick_state(session: Session) -> list[Finding]:
    """What is non-finite before step 0. A buffer may hold infinities on purpose: only a step can show harm."""
    found = []
    for kind, name, tensor in state_tensors(session):
        if kind == "buffer" or not is_nonfinite(tensor):
            continue
        stats = stats_of(tensor)
        if kind == "param" and not stats.nans and not tensor.requires_grad:
            continue  # a mask that is kept as a parameter
        path, _, key = name.partition(":")
        module, _, leaf = path.rpartition(".")
        op = f"optimizer_state:{key}" if kind == "optimizer_state" else f"state:{leaf}"
        where = Where(
            step=0, phase="checkpoint", module=module, op=op, tensor=path, nonfinite="nan" if stats.nans else "inf"
        )
        found.append(state_finding(kind, where, stats))
    return found


def scaler_section(session: Session, findings: Sequence[Finding]) -> dict[str, Any] | None:
    """The report's `scaler` section: the scaler as the replay left it, and what a verified prescription changes."""
    if not session.events.enabled:
        return None
    state = session.scaler.state_dict()
    current = {key: value for key, value in state.items() if not key.startswith("_")}
    cures = [f.prescription for f in findings if f.prescription is not None and f.prescription.verified]
    scales = [
        cure.value["init_scale"] if cure.kind == "scaler" else cure.value
        for cure in cures
        if cure.kind in ("init_scale", "scaler")
    ]
    settings = {key: value for key, value in current.items() if key != "scale"}
    recommended = {**settings, "init_scale": scales[0]} if scales else None
    return {
        "current": current,
        "recommended": recommended,
        "change": recommended is not None,
        "bound_by": None,
        "predicted": None,
        "observed": None,
    }
