"""Findings made from births and causes: the sentence, the numbers, the advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.replay.causes import Cause, cause_of, excess_binades
from ampdoctor.diagnosis.replay.sentences import sentence_of
from ampdoctor.evidence.of_checkpoints.checkpoint import ScalerState
from ampdoctor.evidence.of_runs.trace import Birth, Operand, TensorStats
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.where import Source, Where

CODES: Mapping[Cause, str] = {
    "bad_checkpoint": "AMP101",
    "bad_data": "AMP204",
    "invalid_op": "AMP202",
    "forward_overflow": "AMP201",
    "backward_overflow": "AMP203",
    "grad_overflow": "AMP405",
    "scaler_collapse": "AMP406",
    "scaler_misuse": "AMP407",
    "grad_underflow": "AMP301",
    "optimizer_precision": "AMP501",
}
"""The rule that reports a cause; state found bad has a rule for each kind (`STATE_CODES`)."""

STATE_CODES: Mapping[str, str] = {"param": "AMP101", "buffer": "AMP102", "optimizer_state": "AMP103"}

HELP: Mapping[Cause, str] = {
    "bad_checkpoint": "Go back to a checkpoint from before the value was saved, or repair that tensor.",
    "bad_data": "Check or drop this batch in the data pipeline; rescale inputs that the compute format cannot hold.",
    "invalid_op": "Guard the operand: clamp it, or use an epsilon that the compute format can hold (fp16: at least "
    "1e-7).",
    "forward_overflow": "Run this op in fp32 or bf16, or bring its inputs down before it; no loss scale helps a "
    "forward.",
    "backward_overflow": "Run this op in fp32: its derivative does not fit the compute format.",
    "grad_overflow": "Start from a lower init_scale, or let the scaler find its level.",
    "scaler_collapse": "No loss scale works: use bf16, or bring the loss's own factor down.",
    "scaler_misuse": "Follow the order: backward, unscale_, clip, scaler.step, update.",
    "grad_underflow": "Scale the loss (GradScaler), or use bf16.",
    "optimizer_precision": "Keep optimizer state and updates in fp32 (master weights), or raise epsilon above the "
    "format's tiny; clip gradients whose squares overflow.",
}
MISUSE_ADVICE: Mapping[str, str] = {
    "optimizer.step": "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
    "clip_grad_norm_": "call scaler.unscale_(optimizer) before the gradients are clipped or changed",
    "unscale": "divide the gradients once: leave it to scaler.unscale_ or scaler.step",
    "scaler.unscale_": "call scaler.unscale_(optimizer) once a step, after the last backward",
    "backward": "scale every loss: scaler.scale(loss).backward() for each, with the same scaler",
    "optimizer.zero_grad": "call zero_grad() on each optimizer before the backward of its own loss: another loss's "
    "leaves gradients there",
    "Tensor.grad": "divide gradients by scaler.get_scale() where you use them before scaler.unscale_, or in a hook",
    "scaler.step": "call scaler.update() once, after the step, and step each optimizer with the scaler that scaled its "
    "loss",
    "autograd.grad": "divide what torch.autograd.grad gives for a scaled loss by scaler.get_scale() before you use it",
    "zero_grad": "clear the gradients in every step, also after one that the scaler skipped",
}
"""By `Where.op` of a finding of AMP407: the change that the user has to write."""
DIVERGES = (
    "No precision and no loss scale cures it: lower the learning rate or warm it up, clip the gradients, and look at "
    "the data and the formula."
)
_BEYOND_FLOAT32 = "float32 does not hold it either: bring the op's inputs down, look at the learning rate and the data."


def finding_of_birth(
    birth: Birth,
    *,
    cause: Cause | None = None,
    severity: Severity = "error",
    prescription: Prescription | None = None,
    others: Sequence[Birth] = (),
) -> Finding:
    """The finding for one birth.

    Args:
        birth: The culprit.
        cause: Where a replay showed more than the birth alone (a lower scale cures, no scale does).
        severity: As the harm is.
        prescription: The cure, replayed.
        others: Further births of the same step that harm independently.
    """
    decided = cause or cause_of(birth)
    code = STATE_CODES.get(birth.origin, CODES[decided]) if decided == "bad_checkpoint" else CODES[decided]
    return Finding(
        code=code,
        name=RULES[code].name,
        severity=severity,
        message=sentence_of(birth, decided),
        cause=decided,
        where=birth.where,
        evidence=_numbers(birth, others),
        help=_help(birth, decided),
        prescription=prescription,
    )


def _help(birth: Birth, cause: Cause) -> str:
    beyond = birth.recomputed is not None and birth.recomputed.finite32 is False
    return _BEYOND_FLOAT32 if beyond and cause in ("forward_overflow", "backward_overflow") else HELP[cause]


def diverging_finding(birth: Birth, losses: Sequence[float | None]) -> Finding:
    """In fp32 the updates drive the run out of the finite as well, at once or a few steps later.

    Args:
        birth: Where it left the compute format first.
        losses: In fp32, of all steps up to the one that is not finite.
    """
    rule, last = RULES["AMP206"], len(losses) - 1
    before = losses[last - 1]
    grew = "" if losses[0] is None or before is None else f" (loss {losses[0]:.3g} in step 0, {before:.3g} before it)"
    return Finding(
        code=rule.code,
        name=rule.name,
        severity="error",
        message=f"step {birth.where.step} is not finite, and in fp32 from the start step {last} is not either{grew}: "
        "the updates drive the run there, and precision is not the cause",
        where=Where(step=birth.where.step, phase=birth.where.phase, nonfinite=birth.where.nonfinite),
        evidence={"fp32_step": last, "fp32_losses": list(losses)},
        help=DIVERGES,
        prescription=Prescription(
            kind="code",
            value=DIVERGES,
            status="not_run",
            detail=DIVERGES,
            reason="how large a step the run bears is not tried",
        ),
    )


def state_finding(kind: str, where: Where, stats: TensorStats) -> Finding:
    """A tensor that is non-finite before the first step.

    Args:
        kind: "param", "buffer" or "optimizer_state".
        where: Its address, phase "checkpoint".
        stats: Its numbers.
    """
    code = STATE_CODES[kind]
    count = stats.nans + stats.infs
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="error",
        cause="bad_checkpoint",
        where=where,
        message=f"{where.tensor} ({where.op}) holds {count} non-finite values before the first step",
        evidence={
            "nans": stats.nans,
            "infs": stats.infs,
            "dtype": stats.dtype,
            "shape": list(stats.shape),
            "finite_amax": stats.amax,
        },
        help=HELP["bad_checkpoint"],
        prescription=Prescription(
            kind="code",
            value=f"replace {where.tensor}",
            status="not_run",
            reason="only an earlier checkpoint has the lost values",
            detail="Resume from a checkpoint in which this tensor is finite.",
        ),
    )


def impossible_finding(where: Where, stats: TensorStats, negatives: int, lowest: float) -> Finding:
    """A tensor that is negative where it is a mean of squares.

    Args:
        where: Its address, phase "checkpoint".
        stats: Its numbers.
        negatives: Elements below zero.
        lowest: The least of them.
    """
    message = f"{where.tensor} ({where.op}) cannot be negative, and {negatives} values are, down to {lowest:.4g}"
    return _state_finding("AMP106", where, message, {"negatives": negatives, "lowest": lowest, **_size(stats)})


def saturated_finding(where: Where, stats: TensorStats, at_max: int) -> Finding:
    """A weight that a conversion clamped to fp16's largest number.

    Args:
        where: Its address, phase "checkpoint".
        stats: Its numbers.
        at_max: Elements of exactly that magnitude.
    """
    message = f"{where.tensor} ({where.op}) holds {at_max} values of exactly 65504, fp16's largest: they were clamped"
    return _state_finding("AMP107", where, message, {"at_max": at_max, **_size(stats)})


def _state_finding(code: str, where: Where, message: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="error",
        cause="bad_checkpoint",
        where=where,
        message=message,
        evidence=evidence,
        help=HELP["bad_checkpoint"],
    )


def _size(stats: TensorStats) -> dict[str, Any]:
    return {"dtype": stats.dtype, "shape": list(stats.shape), "finite_amax": stats.amax}


def dead_scaler_finding(scale: float, dead_at: float, where: Where, cure: Prescription | None) -> Finding:
    """A loss scale with which every step does harm.

    Args:
        scale: Before the step; one that came to that in the replay is a collapse, and no fault of what was saved.
        dead_at: At and below this, 1/scale is not finite in fp32.
        where: Where its reciprocal is taken, or the checkpoint.
        cure: A fresh scaler.
    """
    return Finding(
        code="AMP401",
        name=RULES["AMP401"].name,
        severity="error",
        cause="scaler_collapse" if where.step else "bad_checkpoint",
        where=where,
        message=f"the loss scale is {scale:g} before {f'step {where.step}' if where.step else 'the first step'}: "
        "1/scale is not finite in fp32, so a clean step writes non-finite numbers into the weights",
        evidence={"scale": scale, "dead_at_or_below": dead_at},
        help="Start from a fresh GradScaler, or one with a sane init_scale.",
        prescription=cure,
    )


def dead_saved_scale_finding(saved: float, own: float | None, dead_at: float) -> Finding:
    """A checkpoint's loss scale with which every step would do harm, and which the replay does not continue.

    Args:
        saved: The checkpoint's.
        own: The scale at which the replay starts.
        dead_at: At and below this, 1/scale is not finite in fp32.
    """
    return Finding(
        code="AMP401",
        name=RULES["AMP401"].name,
        severity="warning",
        cause="bad_checkpoint",
        where=Where(step=0, phase="checkpoint", op="scaler_state"),
        message=f"the checkpoint's loss scale is {saved:g}, with which no step can be right; the replay starts at "
        f"{own if own is not None else 1:g} instead",
        evidence={"checkpoint_scale": saved, "run_scale": own, "dead_at_or_below": dead_at},
        help="Do not load this scaler state: start from a fresh GradScaler, as the replay does.",
    )


def lost_scale_finding(lost: ScalerState, own: float | None, birth: Birth | None, cure: Prescription | None) -> Finding:
    """A checkpoint's settled loss scale that the run does not continue.

    Args:
        lost: The checkpoint's scaler.
        own: The scale at which the run starts.
        birth: The overflow for which the run skips its steps; None where it does not.
        cure: The run at the checkpoint's scale.
    """
    code = CODES["scaler_misuse"]
    where = Where(step=0, phase="scaler", op="scaler_state") if birth is None else replace(birth.where, phase="scaler")
    skips = "" if birth is None else ", and every step is skipped"
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="warning" if birth is None else "error",
        cause="scaler_misuse",
        where=where,
        message=f"the checkpoint's loss scale had settled at {lost.scale:g} ({lost.growth_tracker} clean steps), but "
        f"the "
        f"run starts at {own if own is not None else 1:g}{skips}",
        evidence={"checkpoint_scale": lost.scale, "run_scale": own, "growth_tracker": lost.growth_tracker},
        help="Load the scaler's state with the rest of the checkpoint: scaler.load_state_dict(checkpoint['scaler']).",
        prescription=cure,
    )


def unguarded_step_finding(birth: Birth, scale: float | None) -> Finding:
    """Gradients that overflowed reached the weights, because the optimizer was stepped past its scaler.

    Args:
        birth: The overflow.
        scale: The loss scale.
    """
    code = CODES["scaler_misuse"]
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="error",
        cause="scaler_misuse",
        where=replace(birth.where, phase="optimizer", module="", op="optimizer.step"),
        message=f"step {birth.where.step}: gradients scaled by {scale if scale is not None else 1:g} overflow, and "
        "optimizer.step() uses them: scaler.step(optimizer) would have skipped the step",
        evidence=_numbers(birth, ()),
        help=HELP["scaler_misuse"],
    )


def refused_call_finding(step: int, method: str, raised: str, source: Source | None) -> Finding:
    """The GradScaler refused a call, because the step had not made the calls that must come before it.

    Args:
        step: The step.
        method: The scaler's method.
        raised: What it raised, type first.
        source: The line that called it.
    """
    code = CODES["scaler_misuse"]
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=step, phase="scaler", op=f"scaler.{method}", source=source),
        message=f"step {step}: the scaler refuses the call of {method}: {raised}",
        evidence={"raised": raised},
        help=HELP["scaler_misuse"],
    )


def nondeterministic_finding(step: int, what: str, first: float, second: float) -> Finding:
    """The same step gave other bits.

    Args:
        step: The step.
        what: The first thing that differed.
        first: Its largest value (the loss itself) when first seen.
        second: The same in the replay.
    """
    return Finding(
        code="AMP901",
        name=RULES["AMP901"].name,
        severity="warning",
        where=Where(step=step, phase="forward"),
        message=f"step {step} does not come back bit by bit from the same state and random state: the first "
        f"difference is the {what or 'loss'}, {first:.9g} and then {second:.9g}",
        evidence={"differs": what or "loss", "first": first, "second": second},
        help="Seed every generator in the factory, and keep counters and files of the loop inside it.",
    )


def _numbers(birth: Birth, others: Sequence[Birth]) -> dict[str, Any]:
    verdict = birth.recomputed
    numbers: dict[str, Any] = {
        "kernel": birth.kernel,
        "origin": birth.origin,
        "inputs": [_shown(stats) for stats in birth.inputs],
        "outputs": [_shown(stats) for stats in birth.outputs],
        "harmed": list(birth.harms[:8]),
        "harmed_count": len(birth.harms),
    }
    if verdict is not None:
        numbers["float64"] = {"finite": verdict.finite, "amax": verdict.amax, "limit": verdict.limit}
        numbers["excess_binades"] = excess_binades(birth)
        if verdict.overflow is not None:
            numbers["overflows_inside"] = verdict.overflow
        if verdict.finite32 is not None:
            numbers["float32"] = {"finite": verdict.finite32, "amax": verdict.amax32}
    if birth.operand is not None:
        numbers["operand"] = _shown_operand(birth.operand)
    if birth.departs and not birth.harms:
        numbers["departs"] = birth.departs
    if others:
        numbers["also"] = [
            {"phase": b.where.phase, "module": b.where.module, "op": b.where.op, "nonfinite": b.where.nonfinite}
            for b in others[:8]
        ]
        numbers["also_count"] = len(others)
    return numbers


def _shown_operand(operand: Operand) -> dict[str, Any]:
    source = operand.source
    return {
        "made_by": operand.made_by,
        "op": operand.op,
        "module": operand.module,
        "source": None if source is None else {"file": source.file, "line": source.line},
        "dtype": operand.dtype,
        "here": operand.here,
        "float64": operand.float64,
        "fraction": operand.fraction,
        "amax": operand.amax,
    }


def _shown(stats: TensorStats) -> dict[str, Any]:
    return {
        "name": stats.name,
        "dtype": stats.dtype,
        "shape": list(stats.shape),
        "amax": stats.amax,
        "nans": stats.nans,
        "infs": stats.infs,
        "zeros": stats.zeros,
    }
