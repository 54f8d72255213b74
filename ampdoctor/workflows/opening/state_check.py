"""The state of a run before its first step, and of its scaler after the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ampdoctor.checkpoints.measures.summary import NEVER_NEGATIVE
from ampdoctor.diagnosis.replay.bad_state import impossible_finding, saturated_finding, state_finding
from ampdoctor.diagnosis.scaler.scaler_finding import FRESH_SCALER
from ampdoctor.diagnosis.scaler.scaler_settings import wrong_settings
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.codec import from_plain
from ampdoctor.evidence.report.scaler import ScalerArguments, ScalerSection
from ampdoctor.evidence.where import Where
from ampdoctor.probes.cheap.nonfinite import state_tensors
from ampdoctor.probes.ops.exact import is_nonfinite, stats_of
from ampdoctor.replay.load_checkpoint import scaler_state_of

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.replay.session import Session

_STATISTICS = ("running_mean", "running_var")
"""Buffers that never hold an infinity on purpose."""
_HOLD_FP16 = (torch.float16, torch.float32)
"""Formats that hold fp16's largest number exactly: weights clamped to it stay there if they are stored wider."""


def sick_state(session: Session) -> list[Finding]:
    """Returns what cannot be right before step 0: non-finite, a negative square, clamped to fp16's largest number.

    A buffer may hold infinities on purpose: only a step can show harm.
    """
    found = []
    for kind, name, tensor in state_tensors(session):
        path, _, key = name.partition(":")
        module, _, leaf = path.rpartition(".")
        op = f"optimizer_state:{key}" if kind == "optimizer_state" else f"state:{leaf}"
        where = Where(step=0, phase="checkpoint", module=module, op=op, tensor=path, nonfinite="none")
        if (kind != "buffer" or leaf in _STATISTICS) and is_nonfinite(tensor):
            stats = stats_of(tensor)
            if kind == "param" and not stats.nans and not tensor.requires_grad:
                continue  # a mask that is kept as a parameter
            found.append(state_finding(kind, replace(where, nonfinite="nan" if stats.nans else "inf"), stats))
        elif (key or leaf) in NEVER_NEGATIVE and tensor.is_floating_point():
            lowest = float(tensor.min()) if tensor.numel() else 0.0
            if lowest < -_tolerated(session, module, leaf):
                found.append(impossible_finding(where, stats_of(tensor), int((tensor < 0).sum()), lowest))
        elif kind == "param" and tensor.requires_grad and tensor.dtype in _HOLD_FP16:
            at_max = int((tensor.detach().abs() == FP16_MAX).sum())
            if at_max:
                found.append(saturated_finding(where, stats_of(tensor), at_max))
    return found


def _tolerated(session: Session, module: str, leaf: str) -> float:
    """Returns how far below zero a running variance may be: BatchNorm adds its epsilon before it takes the root."""
    if leaf != "running_var":
        return 0.0
    real = {clean: name for name, clean in session.module_names.items()}
    owner = dict(session.model.named_modules()).get(real.get(module, module))
    epsilon = getattr(owner, "eps", 0.0)
    return float(epsilon) if isinstance(epsilon, int | float) else 0.0


def scaler_after(session: Session, findings: Sequence[Finding]) -> ScalerSection | None:
    """Returns the report's `scaler` section: the scaler after the replay, and what a verified prescription changes."""
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
    own = scaler_state_of(session.scaler)
    sound = {name: FRESH_SCALER[name] for name in wrong_settings(own) if name in current} if own is not None else {}
    settings = {key: value for key, value in current.items() if key != "scale"} | sound
    recommended = from_plain(ScalerArguments, {**settings, "init_scale": scales[0]}) if scales else None
    return ScalerSection(current=current, recommended=recommended, change=recommended is not None)
