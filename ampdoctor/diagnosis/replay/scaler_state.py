"""Rules on a run's own loss scaler before its first step: dead, with wrong settings, or overwritten."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ampdoctor.diagnosis.catalogue import REPLAYED, rule
from ampdoctor.diagnosis.scan.scaler import COLLAPSED_SCALER as COLLAPSED
from ampdoctor.diagnosis.scan.scaler import (
    DEAD_SCALER,
    FRESH_SCALER,
    FROZEN_SCALER,
    SCALER_SETTINGS,
    dead_words,
    fresh_scaler,
    frozen_words,
    scale_text,
    scaler_numbers,
    starting_scale,
    wrong_settings,
)
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import ResumedScaler

AT_START = Where(step=0, phase="scaler", op="scaler_state")


def dead_scaler_finding(scale: float, dead_at: float, where: Where, cure: Prescription | None) -> Finding:
    """Makes the finding for a loss scale with which every step does harm, or is skipped where it is not finite.

    At and below `dead_at`, 1/scale is not finite in fp32. If the replay itself led to the scale, that is a collapse,
    and the saved state is not at fault. `cure` is a fresh scaler.
    """
    return DEAD_SCALER.finding(
        "error",
        f"before {f'step {where.step}' if where.step else 'the first step'} the loss scale is {dead_words(scale)}",
        where=where,
        cause="scaler_collapse" if where.step else "bad_checkpoint",
        evidence={"scale": scale, "dead_at_or_below": dead_at},
        advice="Start from a fresh GradScaler, or one with a sane init_scale.",
        prescription=cure,
    )


def dead_saved_scale_finding(saved: float, own: float | None, dead_at: float) -> Finding:
    """Makes the finding for a checkpoint's dead loss scale that the replay does not continue; `own` is the replay's."""
    return DEAD_SCALER.finding(
        "warning",
        f"the checkpoint's loss scale is {saved:g}, with which no step can be right; "
        f"{starting_scale('the replay', own)}{' instead' if own is not None else ''}",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        cause="bad_checkpoint",
        evidence={"checkpoint_scale": saved, "run_scale": own, "dead_at_or_below": dead_at},
        advice="Do not load this scaler state: start from a fresh GradScaler, as the replay does.",
    )


def collapsed_saved_scale_finding(lost: ScalerState, own: float | None) -> Finding:
    """Makes the finding for a checkpoint's loss scale below 1 that the run, which steps at `own`, does not need."""
    return COLLAPSED.finding(
        "warning",
        f"the checkpoint's loss scale has collapsed to {scale_text(lost.scale)}: step after step was skipped "
        f"before it was saved; {starting_scale('the run', own)}, and takes its steps",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        cause="scaler_collapse",
        evidence={"checkpoint_scale": lost.scale, "run_scale": own, "growth_tracker": lost.growth_tracker},
        advice="Do not load this scaler state: go on without it, from a checkpoint before the collapse where there is "
        "one.",
    )


def collapsed_scale_finding(saved: float, own: float, cure: Prescription, severity: Severity) -> Finding:
    """Makes the finding for a checkpoint's loss scale below 1, where the run's own scaler starts at `own`, higher.

    The replay continues with the checkpoint's. `severity` is that of a scan of the same checkpoint
    (`collapse_severity`).
    """
    return COLLAPSED.finding(
        severity,
        f"the checkpoint's loss scale has collapsed to {scale_text(saved)}, where the run's own scaler starts "
        f"at {scale_text(own)}: step after step was skipped before it was saved, and gradients are lost at that scale; "
        "changes are tried with a fresh scaler",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        cause="scaler_collapse",
        evidence={"checkpoint_scale": saved, "run_scale": own},
        advice="Resume without the scaler's state, from a checkpoint before the collapse where there is one.",
        prescription=cure,
    )


def unusable_scale_finding(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """Makes the finding for a first loss scale, or with `reached` a later one, without a finite inverse in fp32."""
    falls = f"from {scale:g} the scaler's settings take the loss scale to one that has no finite inverse in fp32"
    return DEAD_SCALER.finding(
        "error",
        f"{falls if reached else f'the loss scale of {scale:g} has no finite inverse in fp32'}: a step that is "
        "not skipped writes infinities into the weights",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        cause="scaler_collapse" if reached else "bad_checkpoint",
        evidence={"scale": scale},
        prescription=prescription,
    )


# -- the run's own settings: AMP401, AMP403 and AMP404, as for a checkpoint's --


def run_scaler_findings(scaler: ScalerState) -> Iterator[Finding]:
    """Yields everything that is wrong with the scaler before step 0."""
    if scaler.dead:
        message = f"the run's loss scale is {dead_words(scaler.scale)}"
        cure = fresh_scaler("Make the scaler with GradScaler's own defaults.")
        yield DEAD_SCALER.finding(
            "error", message, where=AT_START, cause="bad_checkpoint", evidence=scaler_numbers(scaler), prescription=cure
        )
    frozen = frozen_words(scaler)
    if frozen is not None:
        yield FROZEN_SCALER.finding(
            "warning", frozen[0].lower() + frozen[1:].rstrip("."), where=AT_START, evidence=scaler_numbers(scaler)
        )
    wrong = wrong_settings(scaler)
    if wrong:
        better = {name: FRESH_SCALER[name] for name in wrong if name in FRESH_SCALER}
        message = f"the run's loss scaler has settings that cannot work: {'; '.join(wrong.values())}"
        evidence = {**scaler_numbers(scaler), "wrong": list(wrong.values())}
        yield SCALER_SETTINGS.finding(
            "warning", message, where=AT_START, evidence=evidence, prescription=_with(better) if better else None
        )


def _with(better: Mapping[str, float]) -> Prescription:
    arguments = ", ".join(f"{name}={plain(value)}" for name, value in better.items())
    return Prescription(
        kind="scaler",
        value=better,
        status="not_run",
        reason="not replayed by itself",
        detail=f"GradScaler({arguments})",
    )


def plain(value: float) -> str:
    """Formats a setting."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


SETTINGS_OVERWRITTEN = rule("AMP411", REPLAYED)

LOADED = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings that `load_state_dict` replaces together with the scale and the count of clean steps (torch's GradScaler).
The scale is state, and is meant to be replaced."""


def overwritten_finding(scalers: ResumedScaler) -> Finding | None:
    """Makes the finding for settings of the run that are lost when it loads the checkpoint's scaler state (AMP411).

    It is a warning where loading in the replay replaced them. It is a note where the replay keeps the run's scaler,
    which differs from GradScaler's defaults and from the checkpoint: a resumed run that loads the state loses these
    settings.
    """
    lost: dict[str, dict[str, float]] = {}
    kept = True
    for name in LOADED:
        own, file, now = (getattr(one, name) for one in (scalers.own, scalers.file, scalers.now))
        if _same(own, file):
            continue
        replaced = _same(now, file)
        meant = name in scalers.asked if scalers.asked is not None else own != FRESH_SCALER[name]
        if meant and (replaced or scalers.asked is None):
            lost[name] = {"run": own, "checkpoint": file, "replay": now}
            kept = kept and not replaced
    if not lost:
        return None
    pairs = " and ".join(
        f"{name} {plain(of['run'])} (the checkpoint: {plain(of['checkpoint'])})" for name, of in lost.items()
    )
    ends = (
        "a run that loads the checkpoint's scaler state loses that"
        if kept
        else "loading the checkpoint's scaler state replaces that"
    )
    setters = "; ".join(f"scaler.set_{name}({plain(of['run'])})" for name, of in lost.items())
    return SETTINGS_OVERWRITTEN.finding(
        "note" if kept else "warning",
        f"the run's scaler asks for {pairs}: {ends}",
        where=AT_START,
        evidence={"settings": lost},
        prescription=Prescription(
            kind="code",
            value=setters,
            status="not_run",
            reason="which of the two is meant, only the run's author knows",
            detail=f"after scaler.load_state_dict(...), if the run's own are meant: {setters}",
        ),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
