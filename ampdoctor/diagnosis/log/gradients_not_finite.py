"""AMP703: the logged gradient norm is NaN or infinite up to the end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.log.log_series import MOMENTUM_STEPS, loss_fell, series, trailing_entries
from ampdoctor.diagnosis.log.loss_not_finite import loss_not_finite
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LEAST_UNFINITE = Threshold(
    code="AMP703",
    name="entries",
    default=3,
    unit="entries",
    lowest=1,
    highest=1_000_000,
    why="Entries of a gradient norm that is not finite at the log's end: one is a skipped step, as it should be.",
)
HOPELESS_STEPS = Threshold(
    code="AMP703",
    name="hopeless",
    default=8,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps without a finite gradient after which it is an error: 8 halvings of the loss scale.",
)
SETTLING_STEPS = Threshold(
    code="AMP703",
    name="settling",
    default=40,
    unit="steps",
    lowest=0,
    highest=1_000_000,
    why="Steps granted to a scaler at the start of a run: from the highest initial scale, 2^32, down to 1 are 32.",
)
RULE = register(
    "AMP703",
    "gradients-not-finite",
    "The logged gradient norm is NaN or infinite up to the end",
    worst="error",
    commands=SCANNED,
    thresholds=(LEAST_UNFINITE, HOPELESS_STEPS, SETTLING_STEPS),
    ruins_checkpoint=True,
)


@RULE.judges(CheckpointSummary)
def _gradients_not_finite(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    if any(lost.severity == "error" for lost in loss_not_finite(summary, thresholds)):  # the gradients say no more
        return
    entries = [entry for entry, _ in series(summary, lambda e: e.grad_norm)]
    trailing = trailing_entries(entries, lambda e: e.grad_norm is not None and not math.isfinite(e.grad_norm))
    if len(trailing) < thresholds[LEAST_UNFINITE]:
        return
    first, last = trailing[0], trailing[-1]
    steps = last.step - first.step + 1
    dead = any(scaler.dead for scaler in summary.scalers)
    if len(trailing) == len(entries) and steps <= thresholds[SETTLING_STEPS] and not dead:
        return
    measured = any(e.grad_norm is not None and not math.isnan(e.grad_norm) for e in entries)
    learns = loss_fell(e for e in summary.log if e.step >= first.step + (MOMENTUM_STEPS if measured else 0))
    if learns and len(trailing) == len(entries):
        return
    severity: Severity = "error" if steps >= thresholds[HOPELESS_STEPS] else "warning"
    said = "no loss scale that was tried in that time worked"
    if learns:
        severity, said = "note", "the loss falls all the same, so the norm is not what the optimizer saw"
    elif not measured and not dead:
        severity, said = "note", "it may never have been measured"
    yield checkpoint_finding(
        summary,
        RULE,
        severity,
        f"The gradient norm is {first.grad_norm} from step {first.step} to the log's end, in {len(trailing)} entries "
        f"over {steps} steps: {said}.",
        evidence={"first_step": first.step, "last_step": last.step, "entries": len(trailing), "steps": steps},
        phase="backward",
        born="nan" if first.grad_norm is not None and math.isnan(first.grad_norm) else "inf",
        global_step=first.step,
    )
