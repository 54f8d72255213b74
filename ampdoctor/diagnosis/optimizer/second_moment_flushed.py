"""AMP502: a second moment was flushed to zero where the first was not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerSummary, StarvedMoment
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import Threshold, Thresholds

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
LONGER_UPDATE = Threshold(
    code="AMP502",
    name="longer",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Length of a replayed first update over that with the state begun anew, which is one learning rate an element: "
    "twice is what no settled state of the same gradients gives.",
)
RULE = register(
    "AMP502",
    "second-moment-flushed",
    "A second moment was flushed to zero where the first was not",
    worst="error",
    commands=SCANNED,
    thresholds=(LARGEST_UPDATE, MANY_STARVED, LONGER_UPDATE),
)

_SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126}
"""Smallest normal number of the formats in which only a conversion loses an ordinary square; below it squares may be
flushed, as processors can be told to."""


def explained(betas: Sequence[float], smallest: float) -> float | None:
    """Returns the largest first moment beside a second one of zero that rounding in its own format explains.

    Adam's first moment m and second moment v are weighted sums over the same gradients. By Cauchy and Schwarz
    |m| <= c sqrt(v) with c^2 = (1 - b1)^2 / ((1 - b2)(1 - b1^2 / b2)), where b1^2 < b2: 7.3 for (0.9, 0.999). A v that
    was rounded to zero in every step has lost at most `smallest` a step, which adds up to smallest / (1 - b2).

    Args:
        betas: Decay rates of both moments.
        smallest: The smallest number that the second moment's format holds.

    Returns:
        The bound on |m|, in units of gradients; None where there is none, because the second moment forgets faster.
    """
    if len(betas) != 2:
        return None
    first, second = betas
    if not (0 <= first < 1 and 0 < second < 1 and first * first < second):
        return None
    return (1 - first) / (1 - second) * math.sqrt(smallest / (1 - first * first / second))


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
    harmful = thresholds[LARGEST_UPDATE] * epsilon
    sick = [m for m in optimizer.starved if m.largest > harmful and not _by_itself(m, optimizer)]
    if not sick:
        return
    first, worst = sick[0], max(sick, key=lambda moment: moment.largest)
    starved, examined = sum(m.starved for m in sick), sum(m.examined for m in optimizer.starved)
    size = f"up to {worst.largest / epsilon:.2g}" if epsilon else "infinitely many"
    wide = first.dtype in _SMALLEST
    lost = f" {first.dtype} does not lose squares of that size: they were in fp16 once." if wide else ""
    among = f" in {len(sick)} tensors, {first.name} first," if len(sick) > 1 else ""
    message = (
        f"{starved} of {examined} second moments in {worst.dtype} are zero where the first moment is not:{among} "
        f"{worst.name} has {worst.largest:.2g} over eps {epsilon:g} there, an update of {size} learning rates.{lost}"
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
        module=first.module,
        op=f"optimizer_state:{first.entry}",
        tensor=_place(first).tensor,
        file=first.file,
        also=map(_place, sick[1:]),
        cause="bad_checkpoint" if wide else "optimizer_precision",
        prescription=Prescription(
            kind="optimizer",
            value={"reset_state": [moment.name for moment in sick[:MAX_LISTED]]},
            status="not_run",
            reason=NOT_REPLAYED,
            detail="Drop the optimizer state of these parameters, and keep second moments in fp32 or bf16.",
        ),
    )


def _by_itself(moment: StarvedMoment, optimizer: OptimizerSummary) -> bool:
    """Whether the format that the file has it in loses such squares itself, or the optimizer is none that keeps both.

    A narrow one loses them while it trains: how large the first moment is, is then judged by the update alone.
    """
    smallest = _SMALLEST.get(moment.dtype)
    if smallest is None:
        return False
    bounds = [explained(group.betas, smallest) for group in optimizer.groups]
    return not bounds or any(bound is None or moment.largest <= bound for bound in bounds)


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
