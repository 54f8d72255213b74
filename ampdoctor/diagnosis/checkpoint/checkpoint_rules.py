"""Rules on a checkpoint's tensors (AMP1xx): pure functions of its summary.

A rule reports what certainly harms training as an error and leaves alone what only looks alarming: masks of -Inf or
finfo.min, observers that start at infinity, bf16 weights beyond fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.checkpoint.blank_rules import MAX_LISTED, address, blank_findings, state_place
from ampdoctor.diagnosis.checkpoint.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.checkpoint.log_rules import log_findings
from ampdoctor.diagnosis.checkpoint.optimizer_rules import optimizer_findings
from ampdoctor.diagnosis.checkpoint.scaler_rules import scaler_findings
from ampdoctor.evidence.of_checkpoints.checkpoint import CastLoss, CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding, Prescription, Severity, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import (
    BATCH_NORM_EPSILON,
    ERASED_BY_CAST,
    LOSSY_CAST,
    SATURATED_8_BIT,
)

MAX_FINDINGS = 20
"""Findings of one rule that are listed one by one; a checkpoint that is NaN everywhere would otherwise fill pages."""
MAX_NAMED = 3
"""Foreign names that a sentence holds."""

FP16_MAX = 65504.0
"""fp16's largest finite number."""
FP16_OVERFLOW_AT = 65520.0
"""Halfway between `FP16_MAX` and 65536: from here on rounding to nearest gives Inf."""
SMALLEST_MASK_FILL = 1e4
"""Magnitude from which a tensor of zeros and one other magnitude is taken for an additive mask; GPT-2 uses -1e4."""

_HALF = ("fp16", "bf16")
"""Formats that a cast without a scale is judged for (AMP105); fp8 is never cast to without one."""
_ROLE_WORDS = {
    "weight": "weights", "buffer": "buffers", "ema": "averaged weights", "moment": "moments", "scaler": "scalers",
    "other": "tensors",
}  # fmt: skip

_Rule = Callable[[CheckpointSummary], Iterator[Finding]]
_MeasuringRule = Callable[[CheckpointSummary, Thresholds], Iterator[Finding]]


def diagnose(summary: CheckpointSummary, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """Everything that is wrong with a checkpoint, worst first.

    Args:
        summary: The checkpoint.
        thresholds: What counts as harmful, as too many.
    """
    found = [finding for rule in _RULES for finding in rule(summary)]
    found += [finding for rule in _MEASURING_RULES for finding in rule(summary, thresholds)]
    return tuple(sorted(found, key=finding_order))


def is_mask(tensor: TensorSummary) -> bool:
    """Whether a tensor's values are those of an additive attention mask: zeros and one large value, or -Inf."""
    if tensor.nans or tensor.pos_infs or tensor.role == "moment":
        return False
    if tensor.zeros == 0 and tensor.role != "buffer":
        return False
    if tensor.neg_infs:
        return tensor.amax is None
    return tensor.amax is not None and tensor.amax == tensor.amin and tensor.amax >= SMALLEST_MASK_FILL


def _non_finite(summary: CheckpointSummary) -> Iterator[Finding]:
    sick = [t for t in summary.tensors if t.nonfinite and not _benign_buffer(t)]
    for role in ("weight", "ema"):
        yield from _each(summary, "AMP101", [t for t in sick if t.role == role])
    yield from _each(summary, "AMP102", [t for t in sick if t.role == "buffer"])
    states = [
        t for t in summary.tensors if t.nonfinite and (t.role == "moment" or (t.role == "other" and t.entry == "step"))
    ]
    yield from _each(summary, "AMP103", states)
    loose = [
        t
        for t in summary.tensors
        if t.role == "other" and t.entry != "step" and t.examined > 1 and t.nonfinite and not is_mask(t)
    ]
    yield from _each(summary, "AMP108", loose, severity="warning")


def _benign_buffer(tensor: TensorSummary) -> bool:
    """-Inf in a mask, and observers of quantisation before their first batch."""
    if tensor.nans:
        return False
    if tensor.entry.startswith(("min_val", "max_val")):
        return tensor.infs == tensor.examined
    return is_mask(tensor) or (tensor.entry.endswith(("mask", "masked_bias", "alibi")) and not tensor.pos_infs)


def _each(
    summary: CheckpointSummary, code: str, tensors: Sequence[TensorSummary], severity: Severity = "error"
) -> Iterator[Finding]:
    for tensor in tensors[:MAX_FINDINGS]:
        copy = ", an averaged copy," if tensor.role == "ema" else ""
        message = f"{_label(tensor)}{copy} holds {_counts(tensor)} among {tensor.examined} {tensor.dtype} values."
        yield _finding(summary, code, severity, tensor, message, {**_numbers(tensor)}, nonfinite=True)
    yield from _rest(summary, code, severity, tensors, "are not finite", nonfinite=True)


def _rest(
    summary: CheckpointSummary,
    code: str,
    severity: Severity,
    tensors: Sequence[TensorSummary],
    are: str,
    *,
    nonfinite: bool = False,
) -> Iterator[Finding]:
    """One finding for all tensors beyond `MAX_FINDINGS`, which have one each."""
    rest = tensors[MAX_FINDINGS:]
    if not rest:
        return
    first, alike = rest[0], sum(t.role == rest[0].role for t in summary.tensors)
    message = (
        f"{len(rest)} more {_ROLE_WORDS[first.role]} {are}, {_label(first)} first; {len(tensors)} of {alike} in all."
    )
    evidence = {"role": first.role, "tensors": len(tensors), "listed": [address(t) for t in rest[:MAX_LISTED]]}
    yield _finding(summary, code, severity, first, message, evidence, nonfinite=nonfinite, among=rest)


def _beyond_fp16(summary: CheckpointSummary) -> Iterator[Finding]:
    for tensors in _castable(summary):
        beyond = [t for t in tensors if t.amax is not None and t.amax >= FP16_OVERFLOW_AT]
        if beyond:
            yield _beyond(summary, beyond)


def _beyond(summary: CheckpointSummary, beyond: Sequence[TensorSummary]) -> Finding:
    worst = max(beyond, key=lambda t: t.amax or 0.0)
    cast_by_autocast = any(
        t.role == "weight" and len(t.shape) >= 2 and t.dtype in {"float32", "float64"} for t in beyond
    )
    message = (
        f"{_tensors(beyond)} values beyond fp16, whose largest number is 65504: up to {worst.amax:.4g} in "
        f"{_label(worst)}; a cast to fp16 makes them Inf."
    )
    evidence = {
        "role": worst.role,
        "amax": worst.amax,
        "limit": FP16_MAX,
        "tensors": len(beyond),
        "listed": [_row(t, "fp16") for t in beyond[:MAX_LISTED]],
    }
    severity: Severity = "warning" if cast_by_autocast else "note"
    return _finding(summary, "AMP104", severity, worst, message, evidence, among=beyond)


def _lossy_cast(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    most = thresholds[LOSSY_CAST]
    for tensors in _castable(summary):
        lossy = [(t, loss) for t in tensors for loss in t.casts if loss.format in _HALF and _loses(loss, most)]
        if lossy:
            yield _lossy(summary, lossy, thresholds)


def _lossy(
    summary: CheckpointSummary, lossy: Sequence[tuple[TensorSummary, CastLoss]], thresholds: Thresholds
) -> Finding:
    worst, loss = max(lossy, key=lambda pair: pair[1].relative_error)
    names = sorted({found.format for _, found in lossy}, reverse=True)
    tensors = list({id(t): t for t, _ in lossy}.values())
    erased = any(len(t.shape) >= 2 and found.flushed >= thresholds[ERASED_BY_CAST] for t, found in lossy)
    message = (
        f"A cast to {' or '.join(names)} would change {_tensors(tensors, verb='')} by more than "
        f"{_bound(thresholds[LOSSY_CAST])}, most of all {_label(worst)}: in {loss.format} {_percent(loss.flushed)} of "
        f"its nonzero values become zero, {_percent(loss.subnormal)} subnormal, relative error "
        f"{loss.relative_error:.2g}{_sampled(worst)}."
    )
    evidence = {"role": worst.role, "tensors": len(tensors)} | {
        name: [_row(t, name) for t, found in lossy if found.format == name][:MAX_LISTED] for name in names
    }
    severity: Severity = "warning" if erased else "note"
    return _finding(summary, "AMP105", severity, worst, message, evidence, among=tensors)


def _sampled(tensor: TensorSummary) -> str:
    """A word on where shares come from, where not every element was counted."""
    if tensor.counted >= tensor.examined:
        return ""
    return f" (from a sample of 1 in {round(tensor.examined / max(tensor.counted, 1))}; --exact counts all)"


def _bound(most: float) -> str:
    return "bf16's own rounding" if most == LOSSY_CAST.default else f"a relative error of {most:.3g}"


def _loses(loss: CastLoss, most: float) -> bool:
    """Overflow in fp16 is AMP104's affair and would drown the rest: its error is infinite."""
    return loss.relative_error > most and not (loss.format == "fp16" and loss.overflowed)


def _impossible(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    def severity_of(tensor: TensorSummary) -> Severity:
        harmless = tensor.entry == "running_var" and (tensor.lowest or 0.0) >= -thresholds[BATCH_NORM_EPSILON]
        return "warning" if harmless else "error"

    negative = [t for t in summary.tensors if t.negatives and t.lowest is not None]
    for tensor in negative[:MAX_FINDINGS]:
        lowest = tensor.lowest or 0.0
        message = (
            f"{_label(tensor)} cannot be negative, and {tensor.negatives} of its {tensor.examined} values are, "
            f"down to {lowest:.4g}."
        )
        evidence = {**_numbers(tensor), "negatives": tensor.negatives, "lowest": lowest}
        yield _finding(summary, "AMP106", severity_of(tensor), tensor, message, evidence)
    severity: Severity = "error" if "error" in map(severity_of, negative[MAX_FINDINGS:]) else "warning"
    yield from _rest(summary, "AMP106", severity, negative, "hold negative values, and cannot")
    below = [t for t in summary.indices if t.lowest < 0]
    for at, counter in enumerate(below[: MAX_FINDINGS + 1]):
        others = below[at + 1 :] if at == MAX_FINDINGS else []
        more = f" {len(others)} more do so." if others else ""
        yield checkpoint_finding(
            summary,
            "AMP106",
            "warning",
            f"{address(counter)} counts down to {counter.lowest:.6g}, and a count cannot be negative.{more}",
            evidence={"dtype": counter.dtype, "shape": list(counter.shape), "lowest": counter.lowest},
            module=counter.module,
            op=f"state:{counter.entry}",
            tensor=address(counter),
            file=counter.file,
            also=map(state_place, others),
            cause="bad_checkpoint",
        )


def _saturated(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    share = thresholds[SATURATED_8_BIT]
    clamped = [
        t
        for t in summary.tensors
        if t.role in {"weight", "buffer", "ema", "moment"} and t.at_max and not is_mask(t) and _too_many(t, share)
    ]
    for tensor in clamped[:MAX_FINDINGS]:
        message = (
            f"{tensor.at_max} of {tensor.examined} values of {_label(tensor)} are exactly {tensor.amax:.6g}, "
            f"the largest {tensor.dtype} number: they were clamped."
        )
        yield _finding(summary, "AMP107", "warning", tensor, message, {**_numbers(tensor), "at_max": tensor.at_max})
    yield from _rest(summary, "AMP107", "warning", clamped, "were clamped to their format's largest number")
    before = [t for t in summary.tensors if _clamped_before(t)]
    for tensor in before[:MAX_FINDINGS]:
        message = (
            f"The largest value of {_label(tensor)} is exactly 65504, fp16's largest number, in a {tensor.dtype} "
            "tensor: it was clamped to fp16 and stored wider."
        )
        yield _finding(summary, "AMP107", "warning", tensor, message, _numbers(tensor))
    yield from _rest(summary, "AMP107", "warning", before, "were clamped to fp16 and stored wider")


def _clamped_before(tensor: TensorSummary) -> bool:
    """A matrix or vector of weights whose largest magnitude is fp16's maximum, in a format where that is no limit."""
    return (
        tensor.role in {"weight", "ema"}
        and tensor.dtype in {"float32", "float64"}
        and tensor.amax == FP16_MAX
        and tensor.examined > 1
        and tensor.constant is None
        and not is_mask(tensor)
    )


def _foreign(summary: CheckpointSummary) -> Iterator[Finding]:
    names = summary.foreign
    if not names:
        return
    shown = f"{', '.join(names[:MAX_NAMED])}{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}"
    message = (
        f"torch.load(weights_only=True) refuses this file: it asks for {shown}. Loading it elsewhere takes "
        "its unsafe mode, which runs whatever the file says."
    )
    yield checkpoint_finding(
        summary, "AMP109", "note", message, evidence={"count": len(names), "names": list(names[:MAX_LISTED])}
    )


def _too_many(tensor: TensorSummary, share: float) -> bool:
    """Of a float8 tensor this share; of a wider one a single element."""
    return not tensor.dtype.startswith("float8") or tensor.at_max > share * tensor.examined


_RULES: tuple[_Rule, ...] = (_non_finite, _beyond_fp16, _foreign)
"""Rules without a number that a user could move."""
_MEASURING_RULES: tuple[_MeasuringRule, ...] = (
    _lossy_cast,
    _impossible,
    _saturated,
    blank_findings,
    optimizer_findings,
    scaler_findings,
    log_findings,
)


def _castable(summary: CheckpointSummary) -> list[list[TensorSummary]]:
    """Tensors that somebody may cast, by role."""
    roles = ("weight", "buffer", "ema")
    return [[t for t in summary.tensors if t.role == role and not is_mask(t)] for role in roles]


def _finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    code: str,
    severity: Severity,
    tensor: TensorSummary,
    message: str,
    evidence: Mapping[str, Any],
    *,
    nonfinite: bool = False,
    among: Iterable[TensorSummary] = (),
) -> Finding:
    """A finding about `tensor`, or about all of those `among` which it is the one to show."""
    return checkpoint_finding(
        summary,
        code,
        severity,
        message,
        evidence=evidence,
        module=tensor.module,
        op=_op(tensor),
        born="none" if not nonfinite else "nan" if tensor.nans else "inf",
        tensor=address(tensor),
        file=tensor.file,
        also=(replace(state_place(t), op=_op(t)) for t in among if t is not tensor),
        cause=None if code in {"AMP104", "AMP105", "AMP108"} else "bad_checkpoint",
        prescription=_prescription(code, tensor),
    )


def _prescription(code: str, tensor: TensorSummary) -> Prescription | None:
    if code != "AMP103":
        return None
    return Prescription(
        kind="optimizer",
        value={"reset_state": [address(tensor)]},
        status="not_run",
        reason=NOT_REPLAYED,
        detail=f"Drop the optimizer state of {tensor.name} before resuming.",
    )


def _op(tensor: TensorSummary) -> str:
    in_optimizer = tensor.role == "moment" or (tensor.role == "other" and tensor.entry == "step")
    return f"{'optimizer_state' if in_optimizer else 'state'}:{tensor.entry}"


def _label(tensor: TensorSummary) -> str:
    return f"{tensor.entry} of {address(tensor)}" if _op(tensor).startswith("optimizer_state") else address(tensor)


def _counts(tensor: TensorSummary) -> str:
    parts = ((tensor.nans, "NaN"), (tensor.pos_infs, "+Inf"), (tensor.neg_infs, "-Inf"))
    return ", ".join(f"{count} {word}" for count, word in parts if count)


def _numbers(tensor: TensorSummary) -> dict[str, Any]:
    return {
        "role": tensor.role,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "examined": tensor.examined,
        "nans": tensor.nans,
        "pos_infs": tensor.pos_infs,
        "neg_infs": tensor.neg_infs,
        "amax": tensor.amax,
    }


def _row(tensor: TensorSummary, name: str) -> dict[str, Any]:
    loss = tensor.cast(name)
    row: dict[str, Any] = {"tensor": address(tensor), "dtype": tensor.dtype, "amax": tensor.amax}
    if tensor.counted < tensor.examined:
        row |= {"counted": tensor.counted, "examined": tensor.examined}
    if loss is not None:
        row |= {
            "flushed": loss.flushed,
            "subnormal": loss.subnormal,
            "overflowed": loss.overflowed,
            "relative_error": loss.relative_error,
        }
    return row


def _tensors(tensors: Sequence[TensorSummary], verb: str = " hold") -> str:
    words = _ROLE_WORDS[tensors[0].role]
    if len(tensors) == 1:
        return f"1 {words.removesuffix('s')}{verb and verb + 's'}"
    return f"{len(tensors)} {words}{verb}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
