"""Rules on the training log beside a checkpoint (AMP701 to AMP705): pure functions of its summary.

A log shows a step now and then, and only the last of several. What is alarming in one line (a skipped step's infinite
norm, one large gradient) is everyday life of a scaler; what a run does not come back from is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from ampdoctor.diagnosis.checkpoint.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.checkpoint.scale_history import scale_findings
from ampdoctor.diagnosis.checkpoint.vanished import MOMENTUM_STEPS, loss_fell, vanished_findings
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, LogEntry
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import (
    CONSTANT_ENTRIES,
    HOPELESS_STEPS,
    LEAST_LOSS,
    LEAST_UNFINITE,
    RETURNED,
    SETTLING_STEPS,
    SPIKE_DEVIATIONS,
    SPIKE_FACTOR,
)

WINDOW = 50
"""Entries before one that say what is usual (AMP704)."""
LEAST_WINDOW = 20
LEAST_DEVIATION = 0.05
"""Standard deviation of a logarithm that is taken at least: a log of constant norms has none (AMP704)."""

_Series = list[tuple[LogEntry, float]]


def log_findings(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Everything that the training log says is wrong."""
    lost = list(_loss(summary))
    yield from lost
    if not any(finding.severity == "error" for finding in lost):
        yield from _norms(summary, thresholds)
    yield from vanished_findings(summary, thresholds)
    yield from _spikes(summary, thresholds)
    yield from _constant(summary, thresholds)
    yield from scale_findings(summary, thresholds)


def _series(summary: CheckpointSummary, of: Callable[[LogEntry], float | None]) -> _Series:
    """The entries that have a value, with it, by step."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    return [(entry, value) for entry in entries if (value := of(entry)) is not None]


def _is_lost(entry: LogEntry) -> bool:
    """A loss that is not finite, or the 0.0 that the Trainer writes in place of a NaN."""
    if entry.loss is None:
        return False
    hidden = entry.loss == 0 and entry.grad_norm is not None and not math.isfinite(entry.grad_norm)
    return hidden or not math.isfinite(entry.loss)


def _loss(summary: CheckpointSummary) -> Iterator[Finding]:
    entries = [entry for entry, _ in _series(summary, lambda e: e.loss)]
    lost = [entry for entry in entries if _is_lost(entry)]
    if not lost:
        return
    trailing = _trailing(entries, _is_lost)
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
        severity = "note"
    elif len(trailing) == 1 and fine and alive:
        message = f"The loss is {said} at the log's last step, {first.step}; the scaler skips such a step."
        severity = "warning"
    else:
        message = f"The loss is {said} from step {first.step} to the log's end{_before(fine)}."
        severity = "error"
    yield checkpoint_finding(
        summary,
        "AMP701",
        "error" if severity == "error" else "warning" if severity == "warning" else "note",
        message,
        evidence=evidence,
        phase="loss",
        born="inf" if first.loss is not None and math.isinf(first.loss) else "nan",
        global_step=first.step,
    )


def _before(fine: Sequence[LogEntry]) -> str:
    return f", after {fine[-1].loss:.4g} at step {fine[-1].step}" if fine else ""


def _trailing(entries: Sequence[LogEntry], test: Callable[[LogEntry], bool]) -> list[LogEntry]:
    """The entries at the end that all pass the test."""
    found: list[LogEntry] = []
    for entry in reversed(entries):
        if not test(entry):
            break
        found.append(entry)
    return found[::-1]


def _norms(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    entries = [entry for entry, _ in _series(summary, lambda e: e.grad_norm)]
    trailing = _trailing(entries, lambda e: e.grad_norm is not None and not math.isfinite(e.grad_norm))
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
        "AMP703",
        severity,
        f"The gradient norm is {first.grad_norm} from step {first.step} to the log's end, in {len(trailing)} entries "
        f"over {steps} steps: {said}.",
        evidence={"first_step": first.step, "last_step": last.step, "entries": len(trailing), "steps": steps},
        phase="backward",
        born="nan" if first.grad_norm is not None and math.isnan(first.grad_norm) else "inf",
        global_step=first.step,
    )


def _spikes(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    losses = [(entry, value) for entry, value in _series(summary, lambda e: e.loss) if 0 < value < math.inf]
    norms = [(entry, value) for entry, value in _series(summary, lambda e: e.grad_norm) if 0 < value < math.inf]
    found = [
        (what, *spike)
        for what, values in (("loss", losses), ("gradient norm", norms))
        for spike in _outliers(values, thresholds)
    ]
    if not found:
        return
    what, entry, value, usual = max(found, key=lambda spike: spike[2] / spike[3])
    first = min(found, key=lambda spike: spike[1].step)[1].step
    before = [v for e, v in losses if e.step < first][-WINDOW:]
    after = [v for e, v in losses if e.step > first]
    lasting = (
        len(after) >= 5
        and len(before) >= 5
        and statistics.median(after[-5:]) > thresholds[RETURNED] * statistics.median(before)
    )
    evidence = {
        "step": entry.step,
        "value": value,
        "usual": usual,
        "spikes": [{"step": e.step, "what": w, "value": v, "usual": u} for w, e, v, u in found[:20]],
        "loss_before": statistics.median(before) if before else None,
        "loss_at_the_end": statistics.median(after[-5:]) if after else None,
    }
    message = (
        f"The {what} of step {entry.step} is {value:.3g}, {value / usual:.3g} times what was usual before it"
        f"{', and the loss has not come back since' if lasting else ''}; {len(found)} such "
        f"{'entry' if len(found) == 1 else 'entries'} in the log."
    )
    yield checkpoint_finding(
        summary,
        "AMP704",
        "warning" if lasting else "note",
        message,
        evidence=evidence,
        phase="loss" if what == "loss" else "backward",
        global_step=entry.step,
    )


def _outliers(values: _Series, thresholds: Thresholds) -> Iterator[tuple[LogEntry, float, float]]:
    """(entry, value, median before it) of every value far above the entries before it."""
    for index in range(LEAST_WINDOW, len(values)):
        entry, value = values[index]
        before = [math.log(v) for _, v in values[max(0, index - WINDOW) : index]]
        middle = statistics.median(before)
        deviation = max(1.4826 * statistics.median(abs(v - middle) for v in before), LEAST_DEVIATION)
        above = math.log(value) - middle
        if above > max(math.log(thresholds[SPIKE_FACTOR]), thresholds[SPIKE_DEVIATIONS] * deviation):
            yield entry, value, math.exp(middle)


def _constant(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    entries = [entry for entry, _ in _series(summary, lambda e: e.loss)]
    if not entries:
        return
    last = entries[-1]
    value = last.loss
    if value is None or not thresholds[LEAST_LOSS] <= abs(value) < math.inf:
        return
    same = _trailing(entries, lambda e: e.loss == value)
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
        "AMP705",
        "note" if rounded else "warning",
        message,
        evidence={"loss": value, "first_step": same[0].step, "entries": len(same), "rounded": rounded},
        phase="loss",
        global_step=same[0].step,
    )
