"""AMP504: the optimizer's step counters stand still or disagree."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.optimizer.optimizer_finding import optimizer_finding
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary
from ampdoctor.evidence.of_checkpoints.optimizer import OptimizerSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP504",
    "step-counters",
    "The optimizer's step counters stand still or disagree",
    worst="warning",
    commands=SCANNED,
)

STEP_LIMITS = {"bfloat16": 256.0, "float16": 2048.0}
"""Whole number to which 1 can no longer be added: 2 to the number of significant bits."""


@RULE.judges(CheckpointSummary)
def _step_counters(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for optimizer in summary.optimizers:
        yield from _of(summary, optimizer)


def _of(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    if not optimizer.steps:
        return
    last = optimizer.steps[-1][0]
    for dtype in optimizer.step_dtypes:
        limit = STEP_LIMITS.get(dtype)
        if limit is None:
            continue
        stuck = last >= limit
        message = (
            f"Steps are counted in {dtype}, which cannot add 1 to {limit:g}: the count "
            f"{f'stands still at {last:g}' if stuck else f'is {last:g} and will stop there'}, and Adam's bias "
            "correction with it."
        )
        evidence = {"dtype": dtype, "step": last, "limit": limit}
        yield optimizer_finding(
            summary, optimizer, RULE, "warning" if stuck else "note", message, evidence, op="optimizer_state:step"
        )
    if len(optimizer.steps) > 1:
        first = optimizer.steps[0][0]
        parameters = sum(count for _, count in optimizer.steps)
        behind = parameters - optimizer.steps[-1][1]
        message = (
            f"Parameters have not taken the same number of steps: {behind} of {parameters} have taken fewer than "
            f"{last:g}, one of them {first:g}. They joined late, had no gradient at times, or were skipped."
        )
        evidence = {"steps": [{"step": step, "parameters": count} for step, count in optimizer.steps[-MAX_LISTED:]]}
        yield optimizer_finding(summary, optimizer, RULE, "note", message, evidence, op="optimizer_state:step")
