"""The settings of a run's own scaler: AMP401, AMP403 and AMP404, as of a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.diagnosis.scaler.dead_scaler import RULE as DEAD_SCALER
from ampdoctor.diagnosis.scaler.dead_scaler import dead_words
from ampdoctor.diagnosis.scaler.frozen_scaler import RULE as FROZEN_SCALER
from ampdoctor.diagnosis.scaler.frozen_scaler import frozen_words
from ampdoctor.diagnosis.scaler.scaler_finding import FRESH_SCALER, fresh_scaler, scaler_numbers
from ampdoctor.diagnosis.scaler.scaler_settings import RULE as SCALER_SETTINGS
from ampdoctor.diagnosis.scaler.scaler_settings import wrong_settings
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import RefusedSetting


def run_scaler_findings(scaler: ScalerState, refused: Sequence[RefusedSetting] = ()) -> Iterator[Finding]:
    """Everything that is wrong with the scaler with which a replay starts.

    Args:
        scaler: Its state before step 0.
        refused: Settings that torch refuses, in whose place `scaler` has others.
    """
    if scaler.dead:
        message = f"the run's loss scale is {dead_words(scaler.scale)}"
        cure = fresh_scaler("Make the scaler with GradScaler's own defaults.")
        yield run_scaler_finding(
            DEAD_SCALER, "error", message, scaler_numbers(scaler), cause="bad_checkpoint", prescription=cure
        )
    frozen = frozen_words(scaler)
    if frozen is not None:
        yield run_scaler_finding(
            FROZEN_SCALER, "warning", frozen[0].lower() + frozen[1:].rstrip("."), scaler_numbers(scaler)
        )
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
    yield run_scaler_finding(
        SCALER_SETTINGS,
        "error" if refused else "warning",
        f"the run's loss scaler has settings that cannot work: {'; '.join([*said, *wrong.values()])}",
        evidence,
        cause="scaler_misuse" if refused else None,
        prescription=_with(better, replayed=bool(refused) and not wrong) if better else None,
    )


def _with(better: Mapping[str, float], *, replayed: bool) -> Prescription:
    arguments = ", ".join(f"{name}={plain(value)}" for name, value in better.items())
    return Prescription(
        kind="scaler",
        value=dict(better),
        status="intervention" if replayed else "not_run",
        reason="the replay ran with it in place of what torch refuses" if replayed else "not replayed by itself",
        detail=f"GradScaler({arguments})",
    )


def plain(value: float) -> str:
    """A setting for a sentence."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def run_scaler_finding(
    rule: Rule,
    severity: Severity,
    message: str,
    evidence: Mapping[str, Any],
    *,
    cause: str | None = None,
    prescription: Prescription | None = None,
) -> Finding:
    """A finding about the scaler with which a replay starts."""
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        cause=cause,
        where=Where(step=0, phase="scaler", op="scaler_state"),
        evidence=evidence,
        help=rule.page.action,
        prescription=prescription,
    )
