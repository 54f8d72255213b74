"""Rules on an optimizer's saved state (AMP502 to AMP505): pure functions of a checkpoint's summary.

Values that are not finite are AMP103's affair, clamped ones AMP107's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.checkpoint.blank_rules import MAX_LISTED
from ampdoctor.diagnosis.checkpoint.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary
from ampdoctor.evidence.of_checkpoints.optimizer import OptimizerGroup, OptimizerSummary, StarvedMoment
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import LARGEST_UPDATE, MANY_STARVED
from ampdoctor.evidence.where import Where

FP16_FLUSH_AT = 2.0**-25
"""Magnitude up to which a number becomes zero in fp16."""
DIVIDING_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "sum"})
"""Moments whose root divides the update: Adam's, RMSprop's and Adadelta's, Adagrad's."""
STEP_LIMITS = {"bfloat16": 256.0, "float16": 2048.0}
"""Whole number to which 1 can no longer be added: 2 to the number of significant bits."""


def optimizer_findings(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Everything that is wrong with a checkpoint's optimizers beside the values of their moments."""
    for optimizer in summary.optimizers:
        yield from _starved(summary, optimizer, thresholds)
        yield from _epsilon(summary, optimizer)
        yield from _steps(summary, optimizer)
        yield from _settings(summary, optimizer)


def _starved(summary: CheckpointSummary, optimizer: OptimizerSummary, thresholds: Thresholds) -> Iterator[Finding]:
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
        "AMP502",
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


def _epsilon(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
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
    yield _finding(summary, optimizer, "AMP503", "warning", message, {"epsilon": lost[0].epsilon})


def _steps(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    if not optimizer.steps:
        return
    last = optimizer.steps[-1][0]
    for dtype in optimizer.step_dtypes:
        limit = STEP_LIMITS.get(dtype)
        if limit is None:
            continue
        stuck = last >= limit
        message = (
            f"Steps are counted in {dtype}, which cannot add 1 to {limit:g}: the count "
            f"{f'stands still at {last:g}' if stuck else f'is {last:g} and will stop there'}, and Adam's bias "
            "correction with it."
        )
        evidence = {"dtype": dtype, "step": last, "limit": limit}
        yield _finding(summary, optimizer, "AMP504", "warning" if stuck else "note", message, evidence)
    if len(optimizer.steps) > 1:
        first = optimizer.steps[0][0]
        parameters = sum(count for _, count in optimizer.steps)
        behind = parameters - optimizer.steps[-1][1]
        message = (
            f"Parameters have not taken the same number of steps: {behind} of {parameters} have taken fewer than "
            f"{last:g}, one of them {first:g}. They joined late, had no gradient at times, or were skipped."
        )
        evidence = {"steps": [{"step": step, "parameters": count} for step, count in optimizer.steps[-MAX_LISTED:]]}
        yield _finding(summary, optimizer, "AMP504", "note", message, evidence)


def _settings(summary: CheckpointSummary, optimizer: OptimizerSummary) -> Iterator[Finding]:
    ruinous, odd = [], []
    for group in optimizer.groups:
        ruinous += _ruinous(group)
        odd += _odd(group)
    zeros = [t for t in summary.tensors if t.role == "moment" and t.entry in DIVIDING_MOMENTS and t.zeros]
    if zeros and any(group.epsilon == 0 for group in optimizer.groups):
        ruinous.append(f"eps is 0 and the second moment of {zeros[0].name} has zeros, so its update is 0 / 0")
    for severity, wrong in (("error", ruinous), ("warning", odd)):
        clauses = list(dict.fromkeys(wrong))
        if clauses:
            grade: Severity = "error" if severity == "error" else "warning"
            message = f"The optimizer's settings cannot be right: {'; '.join(clauses)}."
            yield _finding(summary, optimizer, "AMP505", grade, message, {"wrong": clauses})


def _ruinous(group: OptimizerGroup) -> list[str]:
    """Settings that put NaN or Inf into the weights with the next step."""
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value}" for name, value in named if value is not None and not math.isfinite(value)]
    clauses += [f"a beta is {beta:g}" for beta in group.betas if not beta < 1]
    return clauses


def _odd(group: OptimizerGroup) -> list[str]:
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value:g}, below 0" for name, value in named if value is not None and -math.inf < value < 0]
    clauses += [f"a beta is {beta:g}, below 0" for beta in group.betas if beta < 0]
    return clauses


def _finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    optimizer: OptimizerSummary,
    code: str,
    severity: Severity,
    message: str,
    evidence: dict[str, object],
) -> Finding:
    return checkpoint_finding(
        summary,
        code,
        severity,
        message,
        evidence={"optimizer": optimizer.path, **evidence},
        phase="optimizer",
        op="optimizer_state:step" if code == "AMP504" else "optimizer_state:param_groups",
        cause="bad_checkpoint" if code == "AMP505" and severity == "error" else None,
    )
