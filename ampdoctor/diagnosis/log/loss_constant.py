"""AMP705: the logged loss is exactly constant."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.log.log_series import series, trailing_entries
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

CONSTANT_ENTRIES = Threshold(
    code="AMP705",
    name="entries",
    default=10,
    unit="entries",
    lowest=2,
    highest=1_000_000,
    why="Entries of exactly the same loss at the log's end: of different batches not even two have it to the last "
    "digit.",
)
LEAST_LOSS = Threshold(
    code="AMP705",
    name="loss",
    default=0.01,
    unit="loss",
    lowest=0.0,
    highest=1e6,
    why="Loss below which nothing is said: written with four decimals it has fewer than 100 values left.",
)
RULE = register(
    "AMP705",
    "loss-constant",
    "The logged loss is exactly constant",
    worst="warning",
    commands=(*SCANNED, "health"),
    thresholds=(CONSTANT_ENTRIES, LEAST_LOSS),
)


@RULE.judges(CheckpointSummary)
def loss_constant(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """A loss that is the same to the last digit, up to the log's end."""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss)]
    if not entries:
        return
    last = entries[-1]
    value = last.loss
    if value is None or not thresholds[LEAST_LOSS] <= abs(value) < math.inf:
        return
    same = trailing_entries(entries, lambda e: e.loss == value)
    resting = all(e.learning_rate == 0 for e in same) or all(e.grad_norm == 0 for e in same)
    if len(same) < thresholds[CONSTANT_ENTRIES] or resting:
        return
    rounded = all(e.loss is not None and round(e.loss, 4) == e.loss for e in entries)
    message = (
        f"The loss is exactly {value:.17g} in the last {len(same)} entries, from step {same[0].step} on: the weights "
        "do not move, or the output does not depend on the input."
    )
    yield checkpoint_finding(
        summary,
        RULE,
        "note" if rounded else "warning",
        message,
        evidence={"loss": value, "first_step": same[0].step, "entries": len(same), "rounded": rounded},
        phase="loss",
        global_step=same[0].step,
    )
