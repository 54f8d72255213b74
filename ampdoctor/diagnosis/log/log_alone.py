"""Judges the end of a log without a checkpoint; `health` and `scan` share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampdoctor.diagnosis.log.gradients_vanished import gradients_vanished
from ampdoctor.diagnosis.log.loss_constant import loss_constant
from ampdoctor.evidence.checkpoint_stats import RUN_LOG, CheckpointSummary, LogEntry
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

_RULES = ((gradients_vanished, "gradient"), (loss_constant, "optimizer"))
"""Those whose like `health` does not have, and what moved first."""


def at_the_end(entries: Sequence[LogEntry], thresholds: Thresholds) -> tuple[Finding, ...]:
    """Returns what the last entries of a run's log say: gradients that are zero, a loss that is constant.

    Args:
        entries: In the order of the steps.
        thresholds: Those in force.
    """
    summary = CheckpointSummary(format=RUN_LOG, tensors=(), log=tuple(entries))
    return tuple(
        replace(
            finding,
            where=replace(finding.where, step=finding.where.global_step, global_step=None),
            evidence={"first": first, **finding.evidence},
        )
        for find, first in _RULES
        for finding in find(summary, thresholds)
    )
