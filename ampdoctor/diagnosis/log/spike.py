"""AMP704: a spike in the loss or the gradient norm, as bad as `health` calls the same step (AMP720)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.log.log_series import Series, series
from ampdoctor.diagnosis.over_time.course import LENGTH
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.diagnosis.trends.of_steps.gradient_jump import gradient_jump
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SPIKE_FACTOR = Threshold(
    code="AMP704",
    name="factor",
    default=20.0,
    unit="factor",
    lowest=1.0,
    highest=1e9,
    why="Times the usual from which a loss or a norm is a spike: in 54 small runs those with batches of 8 or more that "
    "did not diverge stay below 17.",
)
SPIKE_DEVIATIONS = Threshold(
    code="AMP704",
    name="deviations",
    default=10.0,
    unit="standard deviations",
    lowest=0.0,
    highest=1000.0,
    why="Robust standard deviations of its logarithm by which it is above the usual as well: noisy runs have large "
    "factors.",
)
RETURNED = Threshold(
    code="AMP704",
    name="returned",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e9,
    why="Times the loss before the spike within which the run has come back: else it is a warning.",
)
RULE = register(
    "AMP704",
    "spike",
    "A spike in the loss or the gradient norm",
    worst="warning",
    commands=SCANNED,
    thresholds=(SPIKE_FACTOR, SPIKE_DEVIATIONS, RETURNED),
)

WINDOW = 50
"""Entries before one that say what is usual (AMP704)."""
LEAST_WINDOW = 20
_PAST = 4 * LENGTH
"""Entries before the first spike that are heard to know what was usual: a window, and what makes it settle."""
LEAST_DEVIATION = 0.05
"""Standard deviation of a logarithm that is taken at least: a log of constant norms has none (AMP704)."""


@RULE.judges(CheckpointSummary)
def _spike(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    losses = [(entry, value) for entry, value in series(summary, lambda e: e.loss) if 0 < value < math.inf]
    norms = [(entry, value) for entry, value in series(summary, lambda e: e.grad_norm) if 0 < value < math.inf]
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
        RULE,
        "warning" if lasting or _jumps(summary, [spike[1].step for spike in found], thresholds) else "note",
        message,
        evidence=evidence,
        phase="loss" if what == "loss" else "backward",
        global_step=entry.step,
    )


def _jumps(summary: CheckpointSummary, steps: Sequence[int], thresholds: Thresholds) -> bool:
    """Is one of these steps beyond whatever was usual before it, so that `health` warns of it (AMP720)?"""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss if e.grad_norm is None else e.grad_norm)]
    first = next((at for at, entry in enumerate(entries) if entry.step >= min(steps)), 0)
    moment, spikes = StepMoment(), frozenset(steps)
    for entry in entries[max(0, first - _PAST) :]:
        if entry.step > max(spikes):
            break
        rate = () if entry.learning_rate is None else (entry.learning_rate,)
        line = StepLine(
            step=entry.step,
            loss=entry.loss,
            gradient_norm=entry.grad_norm,
            loss_scale=entry.scale,
            learning_rates=rate,
        )
        moment.hear(line)
        if entry.step in spikes and gradient_jump(moment, thresholds):
            return True
    return False


def _outliers(values: Series, thresholds: Thresholds) -> Iterator[tuple[LogEntry, float, float]]:
    """(entry, value, median before it) of every value far above the entries before it."""
    for index in range(LEAST_WINDOW, len(values)):
        entry, value = values[index]
        before = [math.log(v) for _, v in values[max(0, index - WINDOW) : index]]
        middle = statistics.median(before)
        deviation = max(1.4826 * statistics.median(abs(v - middle) for v in before), LEAST_DEVIATION)
        above = math.log(value) - middle
        if above > max(math.log(thresholds[SPIKE_FACTOR]), thresholds[SPIKE_DEVIATIONS] * deviation):
            yield entry, value, math.exp(middle)
