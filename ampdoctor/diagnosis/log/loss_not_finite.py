"""AMP701: the logged loss is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.log.log_series import series, trailing_entries
from ampdoctor.diagnosis.tensors.lost_numbers import is_training_loss
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP701",
    "loss-not-finite",
    "The logged loss is NaN or infinite",
    worst="error",
    commands=SCANNED,
    ruins_checkpoint=True,
)


def _is_lost(entry: LogEntry) -> bool:
    """A loss that is not finite, or the 0.0 that the Trainer writes in place of a NaN."""
    if entry.loss is None:
        return False
    hidden = entry.loss == 0 and entry.grad_norm is not None and not math.isfinite(entry.grad_norm)
    return hidden or not math.isfinite(entry.loss)


@RULE.judges(CheckpointSummary)
def _stored_losses(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    """A training loss that was saved under another name than that of a log's."""
    for lost in filter(is_training_loss, summary.lost):
        value, many = f"{lost.last:g}", f"the last of {lost.count} losses in " if lost.count > 1 else "the loss "
        yield checkpoint_finding(
            summary,
            RULE,
            "error",
            f"{many[0].upper()}{many[1:]}{lost.name} is {value}.",
            evidence={"entries": lost.count, "lost": lost.nans + lost.infs},
            phase="loss",
            op="number",
            born="inf" if math.isinf(lost.last) else "nan",
            tensor=lost.name,
            file=lost.file,
        )


@RULE.judges(CheckpointSummary)
def loss_not_finite(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    """A loss that is not finite; an error where it stays so up to the log's end."""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss)]
    lost = [entry for entry in entries if _is_lost(entry)]
    if not lost:
        return
    trailing = trailing_entries(entries, _is_lost)
    first = (trailing or lost)[0]
    fine = [entry for entry in entries if entry.step < first.step and not _is_lost(entry)]
    evidence = {
        "first_step": first.step,
        "entries": len(entries),
        "lost": len(lost),
        "lost_at_the_end": len(trailing),
        "last_finite_step": fine[-1].step if fine else None,
        "last_finite_loss": fine[-1].loss if fine else None,
    }
    said = (
        f"{first.loss:g}" if first.loss != 0 else f"0 beside a gradient norm of {first.grad_norm}, a NaN in disguise,"
    )
    alive = bool(summary.scalers) and not any(s.dead for s in summary.scalers)
    if not trailing:
        ahead = next(entry.step for entry in entries if entry.step > lost[-1].step)
        message = f"The loss was {said} at step {first.step} and is finite again from step {ahead} on."
        severity: Severity = "note"
    elif len(trailing) == 1 and fine and alive:
        message = f"The loss is {said} at the log's last step, {first.step}; the scaler skips such a step."
        severity = "warning"
    else:
        message = f"The loss is {said} from step {first.step} to the log's end{_before(fine)}."
        severity = "error"
    yield checkpoint_finding(
        summary,
        RULE,
        severity,
        message,
        evidence=evidence,
        phase="loss",
        born="inf" if first.loss is not None and math.isinf(first.loss) else "nan",
        global_step=first.step,
    )


def _before(fine: Sequence[LogEntry]) -> str:
    return f", after {fine[-1].loss:.4g} at step {fine[-1].step}" if fine else ""
