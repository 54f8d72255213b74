"""Which cause: the ordered table, decided from the numbers at a birth and never from the name of an op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ampdoctor.evidence.trace import LOST, Birth, Sightings, StepOutcome, Trace

Cause = Literal[
    "bad_checkpoint",
    "scaler_misuse",
    "stale_casts",
    "bad_data",
    "invalid_op",
    "kernel_defect",
    "forward_overflow",
    "forward_precision",
    "backward_overflow",
    "grad_overflow",
    "scaler_collapse",
    "grad_underflow",
    "optimizer_precision",
]
_LOW_PRECISION = ("float16", "bfloat16", "float8")
STATE = ("param", "buffer", "optimizer_state")
"""Origins of a birth that a checkpoint brought along."""
_OVERFLOWS: Mapping[str, Cause] = {
    "backward": "backward_overflow",
    "scaler": "backward_overflow",
    "optimizer": "optimizer_precision",  # the square of a gradient, beyond what the moment's format holds
}
CODES: Mapping[Cause, str] = {
    "bad_checkpoint": "AMP101",
    "bad_data": "AMP204",
    "invalid_op": "AMP202",
    "kernel_defect": "AMP202",
    "forward_overflow": "AMP201",
    "forward_precision": "AMP208",
    "backward_overflow": "AMP203",
    "grad_overflow": "AMP405",
    "scaler_collapse": "AMP406",
    "scaler_misuse": "AMP407",
    "stale_casts": "AMP210",
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
    "kernel_defect": "Try another kernel: attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), "
    "torch.backends.cudnn.enabled = False, torch.backends.mkldnn.enabled = False (oneDNN), or the op written in "
    "torch's own; fp32 and another shape run another kernel too. Report it with the shapes and the dtype.",
    "forward_overflow": "Run this op in fp32 or bf16, or bring its inputs down before it; no loss scale helps a "
    "forward.",
    "forward_precision": "Compute this in fp32, and count (positions, ids, steps) in integers; no loss scale helps a "
    "forward.",
    "backward_overflow": "Run this op in fp32: its derivative does not fit the compute format.",
    "grad_overflow": "Start from a lower init_scale, or let the scaler find its level.",
    "scaler_collapse": "No loss scale works: use bf16, or bring the loss's own factor down.",
    "scaler_misuse": "Follow the order: backward, unscale_, clip, scaler.step, update.",
    "stale_casts": "Enter autocast anew for each forward.",
    "grad_underflow": "Scale the loss (GradScaler), or use bf16.",
    "optimizer_precision": "Keep optimizer state and updates in fp32 (master weights), or raise epsilon above the "
    "format's tiny; clip gradients whose squares overflow.",
}
OPERAND_HELP: Mapping[str, str] = {
    "unwritten": "Write the whole of it, or make it with torch.zeros; torch.use_deterministic_algorithms(True) fills "
    "what torch.empty gives with NaN, and so shows what is left of it.",
    "added_up": "Leave what is masked out of the sum (label smoothing gives every class a share, masked ones too), or "
    "mask with a finite number.",
    "masked_target": "Check the labels against the mask: it forbids the class that this batch asks for.",
    "infinity": "Mask after this op, or write a finite number (torch.finfo(x.dtype).min) in place of the infinity.",
}
"""What helps against an operand, by `Operand.made_by`, where that is more than to guard it."""
FUSED: Mapping[tuple[str, str], str] = {
    ("aten.log", "aten.softmax"): "torch.nn.functional.log_softmax (or cross_entropy)",
    ("aten.log", "aten.sigmoid"): "torch.nn.functional.logsigmoid (or binary_cross_entropy_with_logits)",
    ("aten.log", "aten.exp"): "torch.logsumexp (or softplus)",
}
"""One function in place of an op and of the one that made its operand, which rounds nothing to 0 or 1 between them."""
MISUSE_ADVICE: Mapping[str, str] = {
    "optimizer.step": "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
    "clip_grad_norm_": "call scaler.unscale_(optimizer) before the gradients are clipped or changed",
    "gradient clipping": "call scaler.unscale_(optimizer) before the gradients are clipped or changed",
    "unscale": "divide the gradients once: leave it to scaler.unscale_ or scaler.step",
    "scaler.unscale_": "call scaler.unscale_(optimizer) once a step, after the last backward",
    "backward": "scale every loss: scaler.scale(loss).backward() for each, with the same scaler",
    "GradScaler.scale": "scale each loss once: add its parts up first, scaler.scale(loss + penalty).backward()",
    "optimizer.zero_grad": "call zero_grad() on each optimizer before the backward of its own loss: another loss's "
    "leaves gradients there",
    "Tensor.grad": "divide gradients by scaler.get_scale() where you use them before scaler.unscale_, or in a hook",
    "scaler.step": "call scaler.update() once, after the step, and step each optimizer with the scaler that scaled its "
    "loss",
    "autograd.grad": "divide what torch.autograd.grad gives for a scaled loss by scaler.get_scale() before you use it",
    "zero_grad": "clear the gradients in every step, also after one that the scaler skipped",
    "optimizer.step again": "remove the second call: scaler.step(optimizer) makes the update, or leaves it out where "
    "gradients overflowed; one update for each backward",
}
"""The change that the user has to write, by the `Where.op` of a finding of AMP407."""


def cause_of(birth: Birth) -> Cause:
    """The first row of the table that holds for a birth.

    Args:
        birth: With its recomputation in float64 where there is one.

    Returns:
        The cause; whether a backward overflow is the loss scale's doing is for a replay at a lower scale to show.
    """
    if birth.origin in STATE:
        return "bad_checkpoint"
    if birth.origin == "grad":
        return "scaler_misuse"
    if birth.origin == "constant":
        return "invalid_op"  # written down as it is: nothing overflowed
    if birth.origin == "data" or _casts_the_batch(birth):
        return "bad_data"
    if birth.where.phase == "optimizer" and any(t.dtype.startswith(_LOW_PRECISION) for t in birth.inputs):
        return "optimizer_precision"
    return _cause_of_numbers(birth)


def _cause_of_numbers(birth: Birth) -> Cause:
    """The rows for what an op computed of finite inputs, or of infinities that were meant."""
    overflow = _OVERFLOWS.get(birth.where.phase, "forward_overflow")
    verdict = birth.recomputed
    made_by = None if birth.operand is None else birth.operand.made_by
    if made_by in ("unwritten", "unseen", "any") or (verdict is not None and verdict.returns is False):
        return "kernel_defect"
    if verdict is None:
        return "invalid_op" if birth.where.nonfinite == "nan" else overflow
    beyond = verdict.finite and verdict.amax > verdict.limit
    if beyond or verdict.overflow:  # inside the op, or beyond float64
        return overflow
    if not verdict.finite or made_by in LOST:
        return "invalid_op"
    # finite and in range in float64: where nothing that was lost is found, and no partial result is too large
    return overflow if verdict.overflow is None and birth.where.nonfinite == "inf" else "kernel_defect"


def _casts_the_batch(birth: Birth) -> bool:
    """The batch itself does not fit the compute format: it is cast straight from the loader and overflows."""
    return (
        birth.kernel == "aten._to_copy"
        and birth.where.phase in ("forward", "loss")
        and any((t.name or "").startswith("batch") for t in birth.inputs)
    )


def help_for(birth: Birth, cause: Cause) -> str:
    """Returns what to do about a birth: for its operand if that is known, else for its cause."""
    operand = birth.operand
    if birth.origin == "constant" and birth.where.nonfinite == "nan" and birth.where.op == "aten.lift_fresh":
        return "Write a finite number there, or find out why the code marks these elements with NaN."
    if operand is None or cause not in ("invalid_op", "kernel_defect", "bad_data"):
        return HELP[cause]
    fused = FUSED.get((birth.where.op or "", operand.op or ""))
    if fused is not None and birth.where.phase in ("forward", "loss"):
        return f"Use {fused} in place of the two ops. {HELP[cause]}"
    return OPERAND_HELP.get(operand.made_by, HELP[cause])


def batch_may_be_at_fault(birth: Birth) -> bool:
    """The operand may come from the batch: no update's op reads that; neither state nor a format's loss is of it.

    Nor does what the code writes down: an infinite mask is there for every batch, whichever of them shows its harm.
    """
    operand = birth.operand
    if birth.where.phase not in ("forward", "loss", "backward") or birth.origin == "constant":
        return False
    if operand is not None and operand.made_by in ("infinity", "added_up"):
        return False
    return operand is None or (operand.made_by not in LOST and operand.made_by.partition(":")[0] not in STATE)


def batch_is_at_fault(birth: Birth) -> bool:
    """The operand is the batch's own, or none is known; one that the formula makes of sound data is the formula's."""
    operand = birth.operand
    made_by = "data" if operand is None else operand.made_by.partition(":")[0]
    return batch_may_be_at_fault(birth) and made_by in ("data", "masked_target", "empty_input")


def culprits(trace: Trace) -> tuple[Birth, ...]:
    """The births behind a step's harm, worst first: the first element is the one to name.

    An infinity that the user wrote down (a mask) is a culprit only where nothing else is: it may lie on the path of
    another birth's values, and a fully masked row shows as an op of its own.
    """
    harmful = [birth for birth in trace.births if birth.harms]
    computed = [birth for birth in harmful if birth.origin != "constant"]
    return tuple(sorted(computed or harmful, key=_how_bad))


def _how_bad(birth: Birth) -> tuple[bool, int]:
    """Loss or state harmed before gradients alone; then the earliest."""
    return all(sink.startswith("grad:") for sink in birth.harms), birth.order


def independent(births: Sequence[Birth]) -> tuple[Birth, ...]:
    """One birth for each place in the code: calls and micro-batches of the same line are one culprit.

    Args:
        births: Worst first; so is the result.
    """
    places: dict[tuple[object, ...], Birth] = {}
    for birth in births:
        where = birth.where
        place: tuple[object, ...] = (
            (where.phase, where.module, where.op, where.tensor, where.source, where.forward_source)
            if where.phase != "optimizer"
            else (where.phase, where.op, where.source)  # an update treats all tensors alike
        )
        places.setdefault(
            ("grad",) if birth.origin == "grad" else place, birth
        )  # what is not cleared, is not as a whole
    return tuple(places.values())


def excess_binades(birth: Birth) -> float | None:
    """By how many binades a birth's value is beyond its format; None where that is not what happened."""
    verdict = birth.recomputed
    if verdict is None or not verdict.finite or verdict.limit <= 0 or verdict.amax <= verdict.limit:
        return None
    return math.log2(verdict.amax / verdict.limit)


def fitting_scale(births: Sequence[Birth], scale: float) -> float:
    """The loss scale, in whole halvings, at which what overflowed in a backward fits its format.

    Args:
        births: The overflows.
        scale: The loss scale at which they overflowed.
    """
    excess = max((excess_binades(birth) or 0.0 for birth in births), default=0.0)
    return math.ldexp(abs(scale), -math.ceil(excess))


def derivative_beyond(birth: Birth) -> bool:
    """The derivative itself, and not what it is multiplied with, is beyond the format: 1/x of a tiny x.

    The result in float64 is larger than any input by more than the format's largest number.
    """
    verdict = birth.recomputed
    largest = max((stats.amax for stats in birth.inputs), default=0.0)
    return verdict is not None and verdict.finite and verdict.amax > verdict.limit * largest > 0


def scale_may_cure(births: tuple[Birth, ...], sightings: Sightings) -> bool:
    """Only gradients are harmed, and each birth is a backward value beyond its format.

    A gradient penalty runs a backward inside its loss, which then overflows with it; what the run's code copies of
    its gradients does as well.
    """
    if any(not sink.startswith(("grad:", "beside:")) and sink != "loss" for sink in sightings.sinks):
        return False
    return all(cause_of(b) == "backward_overflow" and _overflows(b) for b in births)


def _overflows(birth: Birth) -> bool:
    """Beyond its format by some binades, or inside the op: smaller inputs would fit."""
    verdict = birth.recomputed
    return excess_binades(birth) is not None or (verdict is not None and bool(verdict.overflow))


def past_the_scaler(outcome: StepOutcome) -> bool:
    """An optimizer stepped, and the scaler's own `step` was not asked."""
    return outcome.optimizer_steps > 0 and not any(event.kind == "step" for event in outcome.events)
