"""Rules on tensors that are finite and yet not what training leaves behind (AMP110 to AMP112): pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.checkpoint.checkpoint_finding import checkpoint_finding
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, IndexSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import FEW_DISPLACED, LEAST_ELEMENTS, SURE_STEPS
from ampdoctor.evidence.where import Where

MAX_LISTED = 20
"""Tensors that one finding lists in its evidence."""

_ENGINE_FILE = re.compile(r"(^|/)(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")
"""DeepSpeed's own file of a rank: with ZeRO-3 its weights lie in pieces in the optimizer's files (AMP112)."""
_SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance of 1 to the next number."""
_FLUSHED = {"float64": 2.0**-1075, "float32": 2.0**-150, "bfloat16": 2.0**-134, "float16": 2.0**-25}
"""Magnitude up to which a number becomes zero."""


def blank_findings(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Every tensor that holds finite values which no training leaves behind."""
    yield from _wrong_buffers(summary, thresholds)
    yield from _unmoved(summary, thresholds)
    yield from _empty(summary, thresholds)


def address(tensor: TensorSummary | IndexSummary) -> str:
    """A tensor's name with its group in front ("ema.fc.weight")."""
    return f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name


def state_place(tensor: TensorSummary | IndexSummary) -> Where:
    """The address of a tensor of the model's state."""
    return Where(
        phase="checkpoint",
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=address(tensor),
        file=tensor.file or None,
    )


def _wrong_buffers(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    gammas = {(t.file, t.group, t.module): t for t in summary.tensors if t.entry == "weight" and t.module}
    for tensor in summary.tensors:
        if tensor.role not in {"buffer", "ema"} or not tensor.blank or tensor.examined < 2:
            continue
        gamma = gammas.get((tensor.file, tensor.group, tensor.module))
        if tensor.entry == "running_var" and not (gamma is not None and gamma.blank):
            what = f"all {tensor.examined} running variances of {address(tensor)} are 0"
            harm = "in evaluation the layer divides by the root of its epsilon alone"
        elif tensor.entry == "inv_freq":
            what = f"all {tensor.examined} frequencies of {address(tensor)} are 0"
            harm = "every position is rotated by nothing"
        else:
            continue
        yield _buffer(summary, tensor, f"{what[0].upper()}{what[1:]}: {harm}.", {"elements": tensor.examined})
    for table in summary.indices:
        numel = math.prod(table.shape)
        if table.displaced and (table.rounded_as or table.displaced <= thresholds[FEW_DISPLACED] * numel):
            why = f", as a cast to {table.rounded_as} rounds them" if table.rounded_as else ""
            message = (
                f"{table.displaced} of the {numel} positions of {address(table)} are not the number of their place"
                f"{why}: tokens there are given another's position."
            )
            yield _buffer(summary, table, message, {"elements": numel, "displaced": table.displaced})


def _buffer(
    summary: CheckpointSummary, tensor: TensorSummary | IndexSummary, message: str, evidence: dict[str, int]
) -> Finding:
    return checkpoint_finding(
        summary,
        "AMP110",
        "warning",
        message,
        evidence={"dtype": tensor.dtype, "shape": list(tensor.shape), **evidence},
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=address(tensor),
        file=tensor.file,
        cause="bad_checkpoint",
    )


def _unmoved(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    rate, epsilon = _settings(summary, thresholds[SURE_STEPS])
    if rate is None or epsilon is None:
        return
    moments = {(t.name, t.entry): t for t in summary.tensors if t.role == "moment"}
    stuck: list[tuple[TensorSummary, float]] = []
    for weight in summary.tensors:
        value = _initial(weight)
        if weight.role != "weight" or weight.group or weight.examined < 2 or value is None:
            continue
        first, second = moments.get((weight.name, "exp_avg")), moments.get((weight.name, "exp_avg_sq"))
        if first is None or second is None or first.amax is None or second.amax is None:
            continue
        root = math.sqrt(second.amax)
        update = rate * first.amax / (root + epsilon)
        if root >= epsilon and update > _invisible(value, weight.dtype):
            stuck.append((weight, update))
    if not stuck:
        return
    worst, update = stuck[0]
    value = _initial(worst)
    message = (
        f"{_count(stuck)} exactly constant although {'its' if len(stuck) == 1 else 'their'} moments say that gradients "
        f"arrive: all {worst.examined} values of {address(worst)} are {value:.6g}, and its next update reaches "
        f"{update:.2g}."
    )
    evidence = {"value": value, "update": update, "tensors": len(stuck), "listed": _listed([t for t, _ in stuck])}
    yield checkpoint_finding(
        summary,
        "AMP111",
        "warning",
        message,
        evidence=evidence,
        module=worst.module,
        op=f"state:{worst.entry}",
        tensor=address(worst),
        file=worst.file,
        also=(state_place(weight) for weight, _ in stuck[1:]),
        cause="bad_checkpoint",
    )


def _initial(weight: TensorSummary) -> float | None:
    """0 or 1 where all elements are exactly that, which no moved weight is.

    Another shared value says nothing: Adam moves elements in step whose gradients have one sign. Nor does 1 in half,
    where a step there and back lands on it again.
    """
    if weight.blank:
        return 0.0
    return 1.0 if weight.constant == 1 and weight.dtype in {"float32", "float64"} else None


def _settings(summary: CheckpointSummary, sure: float) -> tuple[float | None, float | None]:
    """The smallest learning rate and the largest epsilon; None where one is unknown or 0, or the run has just begun."""
    groups = [group for optimizer in summary.optimizers for group in optimizer.groups]
    rates = [group.learning_rate for group in groups]
    epsilons = [group.epsilon for group in groups if group.epsilon is not None]
    steps = [step for optimizer in summary.optimizers for step, _ in optimizer.steps]
    if not steps or min(steps) < sure or not epsilons:
        return None, None
    if any(rate is None or not 0 < rate < math.inf for rate in rates):
        return None, None
    return min(rate for rate in rates if rate is not None), max(epsilons)


def _invisible(value: float, dtype: str) -> float:
    """The largest update that may leave a number as it is."""
    return max(abs(value) * _SPACING.get(dtype, math.inf), _FLUSHED.get(dtype, math.inf))


def _empty(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    hollow = [t for t in weights if 0 in t.shape and not _ENGINE_FILE.search(t.file)]
    matrices = [t for t in weights if len(t.shape) >= 2 and t.examined]
    elements = sum(t.examined for t in matrices)
    if len(hollow) >= 2 and 2 * len(hollow) >= len(weights):
        message = (
            f"{len(hollow)} of {len(weights)} weights have no element, {address(hollow[0])} first: they were saved "
            "without having been gathered from the processes that hold them."
        )
        listed = hollow
    elif len(matrices) >= 2 and all(t.blank for t in matrices) and elements >= thresholds[LEAST_ELEMENTS]:
        message = f"All {len(matrices)} matrices of the model are exactly zero, {address(matrices[0])} first."
        listed = matrices
    else:
        return
    worst = listed[0]
    yield checkpoint_finding(
        summary,
        "AMP112",
        "error",
        message,
        evidence={"tensors": len(listed), "weights": len(weights), "listed": _listed(listed)},
        module=worst.module,
        op=f"state:{worst.entry}",
        tensor=address(worst),
        file=worst.file,
        also=map(state_place, listed[1:]),
        cause="bad_checkpoint",
    )


def _listed(tensors: Sequence[TensorSummary]) -> list[str]:
    return [address(tensor) for tensor in tensors[:MAX_LISTED]]


def _count(stuck: Sequence[object]) -> str:
    return "1 weight is" if len(stuck) == 1 else f"{len(stuck)} weights are"
