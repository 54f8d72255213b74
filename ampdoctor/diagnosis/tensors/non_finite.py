"""AMP101 to AMP103 and AMP108: what is NaN or infinite, by what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ampdoctor.diagnosis.catalogue.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, Rule, register
from ampdoctor.diagnosis.tensors.average_through_half import cast_averages
from ampdoctor.diagnosis.tensors.lost_numbers import is_training_loss
from ampdoctor.diagnosis.tensors.tensor_finding import (
    MAX_FINDINGS,
    MAX_LISTED,
    address,
    is_mask,
    label,
    numbers,
    rest_finding,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LostNumbers, TensorRole, TensorSummary
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds

NON_FINITE_WEIGHT = register(
    "AMP101", "non-finite-weight", "A weight is NaN or infinite", worst="error", commands=SCANNED, ruins_checkpoint=True
)
NON_FINITE_BUFFER = register(
    "AMP102", "non-finite-buffer", "A buffer is NaN or infinite", worst="error", commands=SCANNED, ruins_checkpoint=True
)
NON_FINITE_OPTIMIZER_STATE = register(
    "AMP103",
    "non-finite-optimizer-state",
    "Optimizer state is NaN or infinite",
    worst="error",
    commands=SCANNED,
    ruins_checkpoint=True,
)
NON_FINITE_TENSOR = register(
    "AMP108",
    "non-finite-tensor",
    "A tensor or a number of unknown purpose is NaN or infinite",
    worst="warning",
    commands=SCANNED,
    ruins_checkpoint=True,
)


@NON_FINITE_WEIGHT.judges(CheckpointSummary)
def _weights(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    cast = cast_averages(summary)  # AMP114 says what became of these
    for role in ("weight", "ema"):
        yield from _each(summary, NON_FINITE_WEIGHT, [t for t in _sick(summary, role) if address(t) not in cast])


@NON_FINITE_BUFFER.judges(CheckpointSummary)
def _buffers(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    yield from _each(summary, NON_FINITE_BUFFER, _sick(summary, "buffer"))


@NON_FINITE_OPTIMIZER_STATE.judges(CheckpointSummary)
def _optimizer_state(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    states = [
        t for t in summary.tensors if t.nonfinite and (t.role == "moment" or (t.role == "other" and t.entry == "step"))
    ]
    yield from _each(summary, NON_FINITE_OPTIMIZER_STATE, states, prescribe=_without)


@NON_FINITE_TENSOR.judges(CheckpointSummary)
def _others(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    loose = [
        t
        for t in summary.tensors
        if t.role == "other" and t.entry != "step" and (t.examined > 1 or t.nans) and t.nonfinite and not is_mask(t)
    ]
    yield from _each(summary, NON_FINITE_TENSOR, loose, severity="warning", cause=None)


@NON_FINITE_TENSOR.judges(CheckpointSummary)
def _numbers(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    told = [one for one in summary.lost if one.nans and not is_training_loss(one)]
    standing = [one for one in told if math.isnan(one.last)]
    passed = [one for one in told if not math.isnan(one.last)]
    if standing:
        yield _number_finding(summary, standing, "warning")
    if passed:
        yield _number_finding(summary, passed, "note")


def _sick(summary: CheckpointSummary, role: TensorRole) -> list[TensorSummary]:
    return [t for t in summary.tensors if t.role == role and t.nonfinite and not _benign_buffer(t)]


def _benign_buffer(tensor: TensorSummary) -> bool:
    """-Inf in a mask, and observers of quantisation before their first batch."""
    if tensor.nans:
        return False
    if tensor.entry.startswith(("min_val", "max_val")):
        return tensor.infs == tensor.examined
    return is_mask(tensor) or (tensor.entry.endswith(("mask", "masked_bias", "alibi")) and not tensor.pos_infs)


def _each(
    summary: CheckpointSummary,
    rule: Rule,
    tensors: Sequence[TensorSummary],
    *,
    severity: Severity = "error",
    cause: str | None = "bad_checkpoint",
    prescribe: Callable[[TensorSummary], Prescription | None] = lambda _: None,
) -> Iterator[Finding]:
    for tensor in tensors[:MAX_FINDINGS]:
        copy = ", an averaged copy," if tensor.role == "ema" else ""
        message = f"{label(tensor)}{copy} holds {_counts(tensor)} among {tensor.examined} {tensor.dtype} values."
        figures, cure = numbers(tensor), prescribe(tensor)
        yield tensor_finding(
            summary, rule, severity, tensor, message, figures, nonfinite=True, cause=cause, prescription=cure
        )
    cure = prescribe(tensors[MAX_FINDINGS]) if len(tensors) > MAX_FINDINGS else None
    yield from rest_finding(
        summary, rule, severity, tensors, "are not finite", nonfinite=True, cause=cause, prescription=cure
    )


def _without(tensor: TensorSummary) -> Prescription:
    """The state dropped, which the optimizer then makes anew."""
    return Prescription(
        kind="optimizer",
        value={"reset_state": [address(tensor)]},
        status="not_run",
        reason=NOT_REPLAYED,
        detail=f"Drop the optimizer state of {tensor.name} before resuming.",
    )


def _counts(tensor: TensorSummary) -> str:
    parts = ((tensor.nans, "NaN"), (tensor.pos_infs, "+Inf"), (tensor.neg_infs, "-Inf"))
    return ", ".join(f"{count} {word}" for count, word in parts if count)


def _number_finding(summary: CheckpointSummary, lost: Sequence[LostNumbers], severity: Severity) -> Finding:
    first = lost[0]
    name = first.name or "the file"
    which = f"{first.nans} of {first.count} numbers {'is' if first.nans == 1 else 'are'} NaN{_end(first)}"
    what = f"{name} is NaN" if first.count == 1 else f"In {name}, {which}"
    places = "one more place" if len(lost) == 2 else f"{len(lost) - 1} more places"
    more = f", and so are numbers in {places}" if len(lost) > 1 else ""
    place = Where(phase="checkpoint", op="number", tensor=first.name or None, file=first.file or None)
    return checkpoint_finding(
        summary,
        NON_FINITE_TENSOR,
        severity,
        f"{what}{more}.",
        evidence={
            "numbers": first.count,
            "nans": first.nans,
            "infs": first.infs,
            "listed": [one.name for one in lost[:MAX_LISTED]],
        },
        op="number",
        born="nan",
        tensor=first.name or None,
        file=first.file,
        also=(replace(place, tensor=one.name or None, file=one.file or None) for one in lost[1:]),
    )


def _end(lost: LostNumbers) -> str:
    return "" if math.isnan(lost.last) else f", and the last is {lost.last:.4g}"
