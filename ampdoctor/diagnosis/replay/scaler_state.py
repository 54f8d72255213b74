"""Rules on a run's own loss scaler before its first step: dead, with wrong settings, or overwritten."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ampdoctor.diagnosis.catalogue import REPLAYED, judge, rule, scale_text
from ampdoctor.diagnosis.scan.scaler import (
    DEAD_SCALER,
    FRESH_SCALER,
    FROZEN_SCALER,
    SCALER_SETTINGS,
    dead_words,
    plain,
    starting_scale,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.run_facts import ResumedScaler
from ampdoctor.evidence.thresholds import Thresholds

AT_START = Where(step=0, phase="scaler", op="scaler_state")


def dead_scaler_finding(scale: float, dead_at: float, where: Where, cure: Prescription | None) -> Finding:
    """Makes the finding for a loss scale with which every step does harm or is skipped; `cure` is a fresh scaler."""
    return DEAD_SCALER.finding(
        "error",
        f"before {f'step {where.step}' if where.step else 'the first step'} the loss scale is {dead_words(scale)}",
        where=where,
        cause="scaler_collapse" if where.step else "bad_checkpoint",
        evidence={"scale": scale, "dead_at_or_below": dead_at},
        advice="Start from a fresh GradScaler, or one with a sane init_scale.",
        prescription=cure,
    )


def unusable_scale_finding(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """Makes the finding for a first loss scale, or with `reached` a later one, without a finite inverse in fp32."""
    falls = f"from {scale_text(scale)} the scaler's settings lead to a loss scale whose inverse is not finite in fp32"
    return DEAD_SCALER.finding(
        "error",
        f"{falls if reached else f'the inverse of loss scale {scale_text(scale)} is not finite in fp32'}: "
        "a step that is not skipped writes Inf into the weights",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        cause="scaler_collapse" if reached else "bad_checkpoint",
        evidence={"scale": scale},
        prescription=prescription,
    )


def run_scaler_findings(scaler: ScalerState, thresholds: Thresholds) -> Iterator[Finding]:
    """Yields what scan says of a checkpoint with this scaler: AMP401, AMP403 and AMP404."""
    for finding in judge(CheckpointSummary(format="", tensors=(), scalers=(scaler,)), thresholds):
        if finding.code in {DEAD_SCALER.code, FROZEN_SCALER.code, SCALER_SETTINGS.code}:
            yield replace(finding, where=AT_START)


def unloaded_scale_finding(saved: Finding, own: float | None) -> Finding:
    """Returns scan's finding on a checkpoint's dead or collapsed scale (`saved`) for a run that steps at `own`."""
    return replace(
        saved,
        severity="warning",
        message=f"{saved.message} {starting_scale('The run', own)}{' instead' if own is not None else ''}.",
        help="Do not load this scaler state: start from a fresh GradScaler.",
        prescription=None,
    )


SETTINGS_OVERWRITTEN = rule("AMP411", REPLAYED)

LOADED = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings that `load_state_dict` replaces together with the scale and the count of clean steps (torch's GradScaler).
The scale is state, and is meant to be replaced."""


def overwritten_finding(scalers: ResumedScaler) -> Finding | None:
    """Makes the finding for settings that loading a scaler's state replaces: a note where the replay keeps them."""
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
        prescription=Prescription.untried(
            setters,
            "which of the two is meant, only the run's author knows",
            f"after scaler.load_state_dict(...), if the run's own are meant: {setters}",
        ),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
