"""AMP109: elsewhere the file needs torch.load's unsafe mode."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP109", "foreign-objects", "Elsewhere the file needs torch.load's unsafe mode", worst="note", commands=SCANNED
)

MAX_NAMED = 3
"""Foreign names that a sentence holds."""


@RULE.judges(CheckpointSummary)
def _foreign_objects(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    names = summary.foreign
    if not names:
        return
    shown = f"{', '.join(names[:MAX_NAMED])}{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}"
    message = (
        f"torch.load(weights_only=True) refuses this file: it asks for {shown}. Loading it elsewhere takes "
        "its unsafe mode, which runs whatever the file says."
    )
    yield checkpoint_finding(
        summary, RULE, "note", message, evidence={"count": len(names), "names": list(names[:MAX_LISTED])}
    )
