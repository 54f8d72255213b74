"""AMP503: the optimizer's epsilon is zero in its format."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.optimizer.optimizer_finding import DIVIDING_MOMENTS, optimizer_finding
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_FLUSH_AT
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP503", "epsilon-lost", "The optimizer's epsilon is zero in its format", worst="warning", commands=SCANNED
)


@RULE.judges(CheckpointSummary)
def _epsilon_lost(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for optimizer in summary.optimizers:
        yield from _of(summary, optimizer)


def _of(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    lost = [g for g in optimizer.groups if g.epsilon is not None and 0 <= g.epsilon <= FP16_FLUSH_AT and not g.fused]
    squares = [t for t in summary.tensors if t.role == "moment" and t.entry in DIVIDING_MOMENTS]
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    halves = [all(t.dtype == "float16" for t in tensors) for tensors in (squares, weights) if tensors]
    if not lost or len(halves) < 2 or not all(halves):
        return
    message = (
        f"eps {lost[0].epsilon:g} becomes zero in fp16, in which weights and second moments are kept: "
        "where a gradient's square flushes to zero, the update is 0 / 0 or infinite."
    )
    yield optimizer_finding(summary, optimizer, RULE, "warning", message, {"epsilon": lost[0].epsilon})
