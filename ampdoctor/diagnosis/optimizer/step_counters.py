"""AMP504: the optimizer's step counters stand still or disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.optimizer.optimizer_finding import optimizer_finding
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerGroup, OptimizerSummary, TensorSummary
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

WRONG_UPDATE = Threshold(
    code="AMP504",
    name="update",
    default=0.1,
    unit="share",
    why="Share of its length by which every update is off from which a counter that stands still is an error: the "
    "error from which training was measurably worse (as AMP301.error_bad).",
)
RULE = register(
    "AMP504",
    "step-counters",
    "The optimizer's step counters stand still or disagree",
    worst="error",
    commands=SCANNED,
    thresholds=(WRONG_UPDATE,),
)

STEP_LIMITS = {"bfloat16": 256.0, "float16": 2048.0}
"""Whole number to which 1 can no longer be added: 2 to the number of significant bits."""


def length_at(count: float, betas: Sequence[float]) -> float:
    """Returns the length of Adam's updates where the counter stands still, over what it should be; 1.0 is right.

    Adam multiplies by sqrt(1 - b2^n) / (1 - b1^n), which goes to 1 as its averages settle; it stays what it is at the
    count at which n stops.

    Args:
        count: Where the counter stands.
        betas: Decay rates of both moments; others than two are no Adam's, and 1.0 is returned.
    """
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or count <= 0:
        return 1.0
    first, second = (1.0 if beta == 0 else -math.expm1(count * math.log(beta)) for beta in betas)  # 1 - beta^count
    return math.sqrt(second) / first if first else math.inf  # a count that is no number of steps: freed memory


def severity_of_standing(length: float, dtype: str, thresholds: Thresholds) -> Severity:
    """How bad a counter is that stands still.

    Args:
        length: As `length_at` gives it.
        dtype: The counter's format, without "torch.".
        thresholds: From which error on it is one.
    """
    off = abs(length - 1)
    if off >= thresholds[WRONG_UPDATE]:
        return "error"
    return "warning" if off > 1 / STEP_LIMITS[dtype] else "note"  # below that the format itself rounds as much


def standing_words(dtype: str, count: float, length: float) -> str:
    """What a counter that stands still does, as a sentence."""
    return (
        f"Steps are counted in {dtype}, which cannot add 1 to {STEP_LIMITS[dtype]:g}: the count stands still at "
        f"{count:g}, and Adam's bias correction with it, so that updates are {length:.3g} times as long as they should "
        "be for ever."
    )


@RULE.judges(CheckpointSummary)
def _step_counters(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for optimizer in summary.optimizers:
        yield from _in_half(summary, optimizer, thresholds)
        yield from _disagreeing(summary, optimizer)


def _in_half(summary: CheckpointSummary, optimizer: OptimizerSummary, thresholds: Thresholds) -> Iterator[Finding]:
    if not optimizer.steps:
        return
    last = optimizer.steps[-1][0]
    for dtype in optimizer.step_dtypes:
        limit = STEP_LIMITS.get(dtype)
        if limit is None:
            continue
        stored = [t for t in summary.tensors if t.entry == "step" and t.dtype == dtype]
        counters = [counter for counter in stored if _is_of(counter, optimizer, summary)]
        lengths = [1.0 if _widened(group) else length_at(last, group.betas) for group in optimizer.groups]
        length = max(lengths, key=lambda one: abs(one - 1), default=1.0)
        stands = last >= limit and not all(map(_widened, optimizer.groups))
        severity = severity_of_standing(length, dtype, thresholds) if stands else "note"
        if stands:
            message = standing_words(dtype, last, length)
        else:
            ends = f"Steps are counted in {dtype}, which cannot add 1 to {limit:g}: the count is {last:g}"
            widened = ", and torch loads it as fp32 for a fused or capturable optimizer, rounded as it is"
            message = f"{ends}{' and will stop there' if last < limit else widened}."
        places = [_place(counter) for counter in counters] or [Where(phase="optimizer", op="optimizer_state:step")]
        yield checkpoint_finding(
            summary,
            RULE,
            severity,
            message,
            evidence={
                "optimizer": optimizer.path,
                "dtype": dtype,
                "step": last,
                "limit": limit,
                "update_length": length,
                "counters": len(counters),
            },
            phase="optimizer",
            module=places[0].module,
            op="optimizer_state:step",
            tensor=places[0].tensor,
            file=places[0].file,
            also=places[1:],
            cause="bad_checkpoint" if severity == "error" else None,
        )


def _disagreeing(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    if len(optimizer.steps) < 2:
        return
    first, last = optimizer.steps[0][0], optimizer.steps[-1][0]
    parameters = sum(count for _, count in optimizer.steps)
    behind = parameters - optimizer.steps[-1][1]
    message = (
        f"Parameters have not taken the same number of steps: {behind} of {parameters} have taken fewer than "
        f"{last:g}, one of them {first:g}. They joined late, had no gradient at times, or were skipped."
    )
    evidence: dict[str, object] = {
        "steps": [{"step": step, "parameters": count} for step, count in optimizer.steps[-MAX_LISTED:]]
    }
    yield optimizer_finding(summary, optimizer, RULE, "note", message, evidence, op="optimizer_state:step")


def _widened(group: OptimizerGroup) -> bool:
    """Whether torch loads its counters as fp32, whatever they were saved in (torch 2.13, `load_state_dict`)."""
    return group.fused or group.capturable


def _is_of(counter: TensorSummary, optimizer: OptimizerSummary, summary: CheckpointSummary) -> bool:
    own = {counter.group, f"{counter.file}:{counter.group}"}
    return counter.role == "other" and (len(summary.optimizers) == 1 or optimizer.path in own)


def _place(counter: TensorSummary) -> Where:
    return Where(
        phase="optimizer",
        module=counter.module,
        op="optimizer_state:step",
        tensor=f"{counter.group}.{counter.name}" if counter.group else counter.name,
        file=counter.file or None,
    )
