"""AMP505: optimizer settings that cannot be right."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.optimizer.optimizer_finding import DIVIDING_MOMENTS, optimizer_finding
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerGroup, OptimizerSummary
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP505", "optimizer-settings", "Optimizer settings that cannot be right", worst="error", commands=SCANNED
)


@RULE.judges(CheckpointSummary)
def _optimizer_settings(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for optimizer in summary.optimizers:
        yield from _of(summary, optimizer)


def _of(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    ruinous, odd = [], []
    for group in optimizer.groups:
        ruinous += _ruinous(group)
        odd += _odd(group)
    zeros = [t for t in summary.tensors if t.role == "moment" and t.entry in DIVIDING_MOMENTS and t.zeros]
    if zeros and any(group.epsilon == 0 for group in optimizer.groups):
        ruinous.append(f"eps is 0 and the second moment of {zeros[0].name} has zeros, so its update is 0 / 0")
    for severity, wrong in (("error", ruinous), ("warning", odd)):
        clauses = list(dict.fromkeys(wrong))
        if clauses:
            grade: Severity = "error" if severity == "error" else "warning"
            cause = "bad_checkpoint" if grade == "error" else None
            message = f"The optimizer's settings cannot be right: {'; '.join(clauses)}."
            yield optimizer_finding(summary, optimizer, RULE, grade, message, {"wrong": clauses}, cause=cause)


def _ruinous(group: OptimizerGroup) -> list[str]:
    """Settings that put NaN or Inf into the weights with the next step."""
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value}" for name, value in named if value is not None and not math.isfinite(value)]
    clauses += [f"a beta is {beta:g}" for beta in group.betas if not beta < 1]
    return clauses


def _odd(group: OptimizerGroup) -> list[str]:
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value:g}, below 0" for name, value in named if value is not None and -math.inf < value < 0]
    clauses += [f"a beta is {beta:g}, below 0" for beta in group.betas if beta < 0]
    return clauses
