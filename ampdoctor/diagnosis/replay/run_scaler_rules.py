"""Rules on the settings of a run's own scaler: AMP401, AMP403 and AMP404 as of a checkpoint's, and AMP411.

AMP411 is what a resumed run loses of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.checkpoint.scaler_rules import (
    FRESH_SCALER,
    dead_words,
    fresh_scaler,
    frozen_words,
    scaler_numbers,
    wrong_settings,
)
from ampdoctor.evidence.of_checkpoints.checkpoint import ScalerState
from ampdoctor.evidence.of_runs.scaler_settings import RefusedSetting, ResumedScaler
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.where import Where

LOADED = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings that `load_state_dict` replaces together with the scale and the count of clean steps (torch's GradScaler);
the scale is state, and meant to be replaced."""


def run_scaler_findings(scaler: ScalerState, refused: Sequence[RefusedSetting] = ()) -> Iterator[Finding]:
    """Everything that is wrong with the scaler with which a replay starts.

    Args:
        scaler: Its state before step 0.
        refused: Settings that torch refuses, in whose place `scaler` has others.
    """
    if scaler.dead:
        message = f"the run's loss scale is {dead_words(scaler.scale)}"
        cure = fresh_scaler("Make the scaler with GradScaler's own defaults.")
        yield _finding("AMP401", "error", message, scaler_numbers(scaler), cause="bad_checkpoint", prescription=cure)
    frozen = frozen_words(scaler)
    if frozen is not None:
        yield _finding("AMP403", "warning", frozen[0].lower() + frozen[1:].rstrip("."), scaler_numbers(scaler))
    yield from _settings(scaler, refused)


def _settings(scaler: ScalerState, refused: Sequence[RefusedSetting]) -> Iterator[Finding]:
    wrong = wrong_settings(scaler)
    if not wrong and not refused:
        return
    said = [f"{r.name}={r.given}, which torch refuses at its first use ({r.raised})" for r in refused]
    evidence: dict[str, Any] = {**scaler_numbers(scaler), "wrong": [*said, *wrong.values()]}
    if refused:
        evidence["refused"] = {r.name: {"given": r.given, "used": r.used, "raised": r.raised} for r in refused}
    better = {name: FRESH_SCALER[name] for name in wrong if name in FRESH_SCALER} | {r.name: r.used for r in refused}
    yield _finding(
        "AMP404",
        "error" if refused else "warning",
        f"the run's loss scaler has settings that cannot work: {'; '.join([*said, *wrong.values()])}",
        evidence,
        cause="scaler_misuse" if refused else None,
        prescription=_with(better, replayed=bool(refused) and not wrong) if better else None,
    )


def _with(better: Mapping[str, float], *, replayed: bool) -> Prescription:
    arguments = ", ".join(f"{name}={_plain(value)}" for name, value in better.items())
    return Prescription(
        kind="scaler",
        value=dict(better),
        status="intervention" if replayed else "not_run",
        reason="the replay ran with it in place of what torch refuses" if replayed else "not replayed by itself",
        detail=f"GradScaler({arguments})",
    )


def overwritten_finding(scalers: ResumedScaler) -> Finding | None:
    """Settings of the run that are lost when it loads the checkpoint's scaler state (AMP411).

    A warning where the replay's loading replaced what the run asks for. A note where the run handed over a scaler that
    the replay leaves as it is, but which differs from GradScaler's defaults and from the checkpoint: a resumed run that
    loads the state loses that.
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
        f"{name} {_plain(of['run'])} (the checkpoint: {_plain(of['checkpoint'])})" for name, of in lost.items()
    )
    ends = (
        "a run that loads the checkpoint's scaler state loses that"
        if kept
        else "loading the checkpoint's scaler state replaces that"
    )
    setters = "; ".join(f"scaler.set_{name}({_plain(of['run'])})" for name, of in lost.items())
    return _finding(
        "AMP411",
        "note" if kept else "warning",
        f"the run's scaler asks for {pairs}: {ends}",
        {"settings": lost},
        prescription=Prescription(
            kind="code",
            value=setters,
            status="not_run",
            reason="which of the two is meant, only the run's author knows",
            detail=f"after scaler.load_state_dict(...), if the run's own are meant: {setters}",
        ),
    )


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _finding(
    code: str,
    severity: Severity,
    message: str,
    evidence: Mapping[str, Any],
    *,
    cause: str | None = None,
    prescription: Prescription | None = None,
) -> Finding:
    return Finding(
        code=code,
        name=RULES[code].name,
        severity=severity,
        message=message,
        cause=cause,
        where=Where(step=0, phase="scaler", op="scaler_state"),
        evidence=evidence,
        help=RULES[code].page.action,
        prescription=prescription,
    )
