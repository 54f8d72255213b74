"""A run's loss scaling before its first replayed step: its scaler's settings, and the past in its log."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.log.scale_spiral import scale_spiral
from ampdoctor.diagnosis.log.skip_rate import skip_rate
from ampdoctor.diagnosis.replay.run_scaler import run_scaler_findings
from ampdoctor.diagnosis.replay.settings_overwritten import overwritten_finding
from ampdoctor.diagnosis.scaler.collapsed_scaler import collapse_severity, typical_gradient
from ampdoctor.diagnosis.scaler.frozen_scaler import standing_scale
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ampdoctor.evidence.report import Finding, Severity
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.opening.open_replay import OpenReplay


def history_findings(replay: OpenReplay, thresholds: Thresholds) -> list[Finding]:
    """Returns the findings of `scaler_findings` and `log_findings`."""
    return [*scaler_findings(replay), *log_findings(replay, thresholds)]


def scaler_findings(replay: OpenReplay) -> Iterator[Finding]:
    """Yields findings on the settings of the run's own scaler before step 0, and on those that a checkpoint overwrites.

    Args:
        replay: A replay that has made a session.
    """
    if replay.scaler is not None:
        yield from run_scaler_findings(replay.scaler, replay.refused)
    scalers = replay.resumed.scalers if replay.resumed is not None else None
    lost = overwritten_finding(scalers) if scalers is not None else None
    if lost is not None:
        yield lost


def log_findings(replay: OpenReplay, thresholds: Thresholds) -> Iterator[Finding]:
    """The history of the loss scale in the log beside the checkpoint (AMP706, AMP403, AMP707).

    They are at most warnings: the replay shows what is wrong now.

    Args:
        replay: A replay with a checkpoint.
        thresholds: What counts as a fall, and as too many skips.
    """
    resumed = replay.resumed
    if resumed is None or not replay.log:
        return
    scalers = (resumed.file_scaler,) if resumed.file_scaler is not None else ()
    summary = CheckpointSummary(format="", tensors=(), scalers=scalers, global_step=resumed.global_step, log=replay.log)
    for find in (scale_spiral, standing_scale, skip_rate):
        for finding in find(summary, thresholds):
            yield replace(finding, severity="warning") if finding.severity == "error" else finding


def saved_collapse(replay: OpenReplay, session: Session, thresholds: Thresholds) -> Severity | None:
    """Returns how bad a scan calls the collapsed scale with which a checkpoint's run goes on; None without a collapse.

    Args:
        replay: A replay with or without a checkpoint.
        session: The run, whose weights share the gradient's norm.
        thresholds: Of AMP402.
    """
    resumed = replay.resumed
    if resumed is None or resumed.scalers is None or resumed.collapsed_from is None:
        return None
    weights = sum(parameter.numel() for parameter in session.model.parameters())  # frozen ones too: a scan sees no flag
    element = typical_gradient(replay.log, weights)
    return collapse_severity(resumed.scalers.now, element, resumed.global_step, thresholds)


def not_said_yet(findings: Iterable[Finding], said: Iterable[Finding]) -> list[Finding]:
    """Returns the findings whose code is not among `said`: a finding from a replay says more."""
    codes = {finding.code for finding in said}
    return [finding for finding in findings if finding.code not in codes]
