"""A loss scale with which no step of a replay can be right (AMP401), or that has collapsed (AMP402)."""

from __future__ import annotations

from ampdoctor.diagnosis.scaler.collapsed_scaler import RULE as COLLAPSED
from ampdoctor.diagnosis.scaler.dead_scaler import RULE, dead_words
from ampdoctor.diagnosis.scaler.scaler_finding import scale_text, starting_scale
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity


def dead_scaler_finding(scale: float, dead_at: float, where: Where, cure: Prescription | None) -> Finding:
    """A loss scale with which every step does harm, or is skipped where the scale is not finite.

    Args:
        scale: Before the step; one that came to that in the replay is a collapse, and no fault of what was saved.
        dead_at: At and below this, 1/scale is not finite in fp32.
        where: Where its reciprocal is taken, or the checkpoint.
        cure: A fresh scaler.
    """
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_collapse" if where.step else "bad_checkpoint",
        where=where,
        message=f"before {f'step {where.step}' if where.step else 'the first step'} the loss scale is "
        f"{dead_words(scale)}",
        evidence={"scale": scale, "dead_at_or_below": dead_at},
        help="Start from a fresh GradScaler, or one with a sane init_scale.",
        prescription=cure,
    )


def dead_saved_scale_finding(saved: float, own: float | None, dead_at: float) -> Finding:
    """A checkpoint's loss scale with which every step would do harm, and which the replay does not continue.

    Args:
        saved: The checkpoint's.
        own: The scale at which the replay starts; None if it has no scaler.
        dead_at: At and below this, 1/scale is not finite in fp32.
    """
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        cause="bad_checkpoint",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        message=f"the checkpoint's loss scale is {saved:g}, with which no step can be right; "
        f"{starting_scale('the replay', own)}{' instead' if own is not None else ''}",
        evidence={"checkpoint_scale": saved, "run_scale": own, "dead_at_or_below": dead_at},
        help="Do not load this scaler state: start from a fresh GradScaler, as the replay does.",
    )


def collapsed_saved_scale_finding(lost: ScalerState, own: float | None) -> Finding:
    """A checkpoint's loss scale that has fallen below 1, and that the run neither continues nor needs.

    Args:
        lost: The checkpoint's scaler.
        own: The scale at which the run starts, and takes steps; None if it has no scaler.
    """
    return Finding(
        code=COLLAPSED.code,
        name=COLLAPSED.name,
        severity="warning",
        cause="scaler_collapse",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        message=f"the checkpoint's loss scale has collapsed to {scale_text(lost.scale)}: step after step was skipped "
        f"before it was saved; {starting_scale('the run', own)}, and takes its steps",
        evidence={"checkpoint_scale": lost.scale, "run_scale": own, "growth_tracker": lost.growth_tracker},
        help="Do not load this scaler state: go on without it, from a checkpoint before the collapse where there is "
        "one.",
    )


def collapsed_scale_finding(saved: float, own: float, cure: Prescription, severity: Severity) -> Finding:
    """A checkpoint's loss scale that has fallen below 1, where the run's own scaler starts higher.

    Args:
        saved: The checkpoint's, with which the replay goes on.
        own: The scale at which the factory's scaler starts.
        cure: A fresh scaler.
        severity: That of a scan of the same checkpoint (`collapse_severity`).
    """
    return Finding(
        code=COLLAPSED.code,
        name=COLLAPSED.name,
        severity=severity,
        cause="scaler_collapse",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        message=f"the checkpoint's loss scale has collapsed to {scale_text(saved)}, where the run's own scaler starts "
        f"at {scale_text(own)}: step after step was skipped before it was saved, and gradients are lost at that scale; "
        "changes are tried with a fresh scaler",
        evidence={"checkpoint_scale": saved, "run_scale": own},
        help="Resume without the scaler's state, from a checkpoint before the collapse where there is one.",
        prescription=cure,
    )


def unusable_scale_finding(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """The scale before the first step, or one that the scaler reaches, has no finite inverse in fp32.

    Args:
        scale: Before the first step.
        prescription: The change.
        reached: That scale is sound; the scaler's settings take it to one that is not.
    """
    falls = f"from {scale:g} the scaler's settings take the loss scale to one that has no finite inverse in fp32"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        message=f"{falls if reached else f'the loss scale of {scale:g} has no finite inverse in fp32'}: a step that is "
        "not skipped writes infinities into the weights",
        cause="scaler_collapse" if reached else "bad_checkpoint",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        evidence={"scale": scale},
        help=RULE.page.action,
        prescription=prescription,
    )
