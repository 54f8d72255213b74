"""AMP502: a second moment was flushed to zero where the first was not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary
from ampdoctor.evidence.of_checkpoints.optimizer import OptimizerSummary, StarvedMoment
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold
from ampdoctor.evidence.where import Where

LARGEST_UPDATE = Threshold(
    code="AMP502",
    name="update",
    default=100.0,
    unit="learning rates",
    lowest=1.0,
    highest=1e12,
    why="Length of one update: Adam's own are about 3 at most, and one of 100 undoes 100 steps.",
)
MANY_STARVED = Threshold(
    code="AMP502",
    name="starved",
    default=1e-3,
    unit="share",
    why="Share of the elements from which it is an error and no warning: a thousandth, our default.",
)
RULE = register(
    "AMP502",
    "second-moment-flushed",
    "A second moment was flushed to zero where the first was not",
    worst="error",
    commands=SCANNED,
    thresholds=(LARGEST_UPDATE, MANY_STARVED),
)


@RULE.judges(CheckpointSummary)
def _second_moment_flushed(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for optimizer in summary.optimizers:
        yield from _of(summary, optimizer, thresholds)


def _of(summary: CheckpointSummary, optimizer: OptimizerSummary, thresholds: Thresholds) -> Iterator[Finding]:
    epsilons = [group.epsilon for group in optimizer.groups if group.epsilon is not None]
    maxima = any(t.role == "moment" and t.entry == "max_exp_avg_sq" for t in summary.tensors)
    if not epsilons or maxima or not math.isfinite(max(epsilons)) or max(epsilons) < 0:
        return
    epsilon = max(epsilons)
    sick = [m for m in optimizer.starved if m.largest > thresholds[LARGEST_UPDATE] * epsilon]
    if not sick:
        return
    worst = max(sick, key=lambda moment: moment.largest)
    starved, examined = sum(m.starved for m in sick), sum(m.examined for m in optimizer.starved)
    size = f"up to {worst.largest / epsilon:.2g}" if epsilon else "infinitely many"
    message = (
        f"{starved} of {examined} second moments in {worst.dtype} are zero where the first moment is not: {worst.name} "
        f"has {worst.largest:.2g} over eps {epsilon:g} there, an update of {size} learning rates."
    )
    evidence = {
        "epsilon": epsilon,
        "largest_first_moment": worst.largest,
        "starved": starved,
        "examined": examined,
        "tensors": len(sick),
        "listed": [_row(moment) for moment in sick[:MAX_LISTED]],
    }
    yield checkpoint_finding(
        summary,
        RULE,
        "error" if starved >= thresholds[MANY_STARVED] * examined else "warning",
        message,
        evidence=evidence,
        phase="optimizer",
        module=worst.module,
        op=f"optimizer_state:{worst.entry}",
        tensor=_place(worst).tensor,
        file=worst.file,
        also=(_place(moment) for moment in sick if moment is not worst),
        cause="optimizer_precision",
        prescription=Prescription(
            kind="optimizer",
            value={"reset_state": [moment.name for moment in sick[:MAX_LISTED]]},
            status="not_run",
            reason=NOT_REPLAYED,
            detail="Drop the optimizer state of these parameters, and keep second moments in fp32 or bf16.",
        ),
    )


def _place(moment: StarvedMoment) -> Where:
    return Where(
        phase="optimizer",
        module=moment.module,
        op=f"optimizer_state:{moment.entry}",
        tensor=f"{moment.group}.{moment.name}" if moment.group else moment.name,
        file=moment.file or None,
    )


def _row(moment: StarvedMoment) -> dict[str, str | int | float]:
    return {"tensor": moment.name, "starved": moment.starved, "of": moment.examined, "largest": moment.largest}
