"""A value that becomes non-finite in a replay: its cause, the sentence about it, and the finding.

`cause_of` decides from the numbers at the value's origin (`NonFiniteOrigin`), never from the name of an op.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ampdoctor.diagnosis.catalogue import REPLAYED, figure, rule, rules, short
from ampdoctor.diagnosis.scan.tensors import BEYOND_FP16_SAID, FP16_OVERFLOW_AT
from ampdoctor.evidence.location import NonFinite, Where
from ampdoctor.evidence.report import Cause, Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.trace import LOST, NonFiniteOrigin, NonFiniteReport, Operand, StepOutcome, TensorStats, Trace

# -- the cause --


_LOW_PRECISION = ("float16", "bfloat16", "float8")
LITERAL = "aten.lift_fresh"  # torch's op for a number that is assigned (`x[0] = nan`)
STATE = ("param", "buffer", "optimizer_state")  # origins of a value that a checkpoint contained
_OVERFLOWS: Mapping[str, Cause] = {
    "backward": "backward_overflow",
    "scaler": "backward_overflow",
    "optimizer": "optimizer_precision",  # a gradient's square does not fit the moment's format
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
"""The rule that reports a cause; non-finite state has a rule for each kind (`STATE_CODES`)."""
STATE_CODES: Mapping[str, str] = {"param": "AMP101", "buffer": "AMP102", "optimizer_state": "AMP103"}
HELP: Mapping[Cause, str] = {
    "bad_checkpoint": "Go back to a checkpoint from before the value was saved, or repair that tensor.",
    "bad_data": "Check or drop this batch in the data pipeline; scale inputs down that do not fit the dtype.",
    "invalid_op": "Guard the operand: clamp it, or use an epsilon that is not zero in the dtype (fp16: at least 1e-7).",
    "kernel_defect": "Try another kernel: attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), "
    "torch.backends.cudnn.enabled = False, torch.backends.mkldnn.enabled = False (oneDNN), or the op written in "
    "torch's own; fp32 and another shape run another kernel too. Report it with the shapes and the dtype.",
    "forward_overflow": "Run this op in fp32 or bf16, or bring its inputs down before it; no loss scale helps a "
    "forward.",
    "forward_precision": "Compute this in fp32, and count (positions, ids, steps) in integers; no loss scale helps a "
    "forward.",
    "backward_overflow": "Run this op in fp32: its derivative does not fit the dtype.",
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
"""Help for an operand, by `Operand.made_by`, where it should not just be guarded."""
FUSED: Mapping[tuple[str, str], str] = {
    ("aten.log", "aten.softmax"): "torch.nn.functional.log_softmax (or cross_entropy)",
    ("aten.log", "aten.sigmoid"): "torch.nn.functional.logsigmoid (or binary_cross_entropy_with_logits)",
    ("aten.log", "aten.exp"): "torch.logsumexp (or softplus)",
}
"""One function instead of the op and the op that made its operand: it rounds nothing to 0 or 1 between them."""
MISUSE_ADVICE: Mapping[str, str] = {
    "optimizer.step": "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
    "clip_grad_norm_": "call scaler.unscale_(optimizer) before clipping optimizer's gradients",
    "gradient clipping": "call scaler.unscale_(optimizer) before clipping or changing optimizer's gradients",
    "unscale": "divide the gradients once: leave it to scaler.unscale_ or scaler.step",
    "scaler.unscale_": "call scaler.unscale_(optimizer) once, after the last micro-batch's backward",
    "scaler.unscale_ late": "call scaler.unscale_(optimizer) before scaler.step(optimizer), and scaler.update() after",
    "scaler.update": "call scaler.update() once, after scaler.step(optimizer)",
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
"""The change that the user has to make, by the `Where.op` of a finding of AMP407, or by what a scaler refuses."""
_REFUSED: Mapping[str, str] = {
    "step() has already been called": "scaler.update",
    "unscale_() has already been called": "scaler.unscale_",
    "unscale_() is being called after step()": "scaler.unscale_ late",
    "_scale is None": "backward",
}
"""What torch's GradScaler says as it refuses a call, and the key of `MISUSE_ADVICE`."""


def refusal_advice(raised: str) -> str:
    """Returns the change for a call that a GradScaler refuses: the missing call where its error tells that."""
    key = next((key for said, key in _REFUSED.items() if said in raised), "")
    return MISUSE_ADVICE.get(key, HELP["scaler_misuse"])


def for_optimizer(advice: str, variable: str) -> str:
    """Returns the advice with the user's own variable in place of `optimizer`, where it has a call on that."""
    return re.sub(r"\boptimizer\b", variable, advice) if variable and "(optimizer)" in advice else advice


def cause_of(origin: NonFiniteOrigin) -> Cause:
    """Returns the cause of a non-finite value; the first matching case decides."""
    if origin.came_from in STATE:
        return "bad_checkpoint"
    if origin.came_from == "grad":
        return "scaler_misuse"
    if origin.came_from == "constant":
        return "invalid_op"  # written as a literal: nothing overflowed
    if origin.came_from == "data" or _casts_the_batch(origin):
        return "bad_data"
    if origin.where.phase == "optimizer" and any(t.dtype.startswith(_LOW_PRECISION) for t in origin.inputs):
        return "optimizer_precision"
    return _cause_of_numbers(origin)


def _cause_of_numbers(origin: NonFiniteOrigin) -> Cause:
    overflow = _OVERFLOWS.get(origin.where.phase, "forward_overflow")
    verdict = origin.recomputed
    made_by = None if origin.operand is None else origin.operand.made_by
    if made_by in ("unwritten", "unseen", "any") or (verdict is not None and verdict.returns is False):
        return "kernel_defect"
    if verdict is None:
        return "invalid_op" if origin.where.nonfinite == "nan" else overflow
    beyond = verdict.finite and verdict.amax > verdict.limit
    if beyond or verdict.overflow:  # inside the op, or beyond float64
        return overflow
    if not verdict.finite or made_by in LOST:
        return "invalid_op"
    # finite and in range in float64, no lost operand was found, and no partial result is too large
    return overflow if verdict.overflow is None and origin.where.nonfinite == "inf" else "kernel_defect"


def _casts_the_batch(origin: NonFiniteOrigin) -> bool:
    """Whether the batch does not fit the compute format: it is cast straight from the loader and overflows."""
    return (
        origin.kernel == "aten._to_copy"
        and origin.where.phase in ("forward", "loss")
        and any((t.name or "").startswith("batch") for t in origin.inputs)
    )


def help_for(origin: NonFiniteOrigin, cause: Cause) -> str:
    """Returns what to do: about the operand if it is known, else about the cause."""
    operand = origin.operand
    if origin.came_from == "constant" and origin.where.nonfinite == "nan" and origin.where.op == LITERAL:
        return "Write a finite number there, or find out why the code marks these elements with NaN."
    if operand is None or cause not in ("invalid_op", "kernel_defect", "bad_data"):
        return HELP[cause]
    fused = FUSED.get((origin.where.op or "", operand.op or ""))
    if fused is not None and origin.where.phase in ("forward", "loss"):
        return f"Use {fused} in place of the two ops. {HELP[cause]}"
    return OPERAND_HELP.get(operand.made_by, HELP[cause])


def batch_may_be_at_fault(origin: NonFiniteOrigin) -> bool:
    """Whether the operand may come from the batch: not from an update, state, a lossy format or a literal."""
    operand = origin.operand
    if origin.where.phase not in ("forward", "loss", "backward") or origin.came_from == "constant":
        return False
    if operand is not None and operand.made_by in ("infinity", "added_up"):
        return False
    return operand is None or (operand.made_by not in LOST and operand.made_by.partition(":")[0] not in STATE)


def batch_is_at_fault(origin: NonFiniteOrigin) -> bool:
    """Whether the operand is the batch's own, or unknown; an operand that is computed from sound data is not."""
    operand = origin.operand
    made_by = "data" if operand is None else operand.made_by.partition(":")[0]
    return batch_may_be_at_fault(origin) and made_by in ("data", "masked_target", "empty_input")


def culprits(trace: Trace) -> tuple[NonFiniteOrigin, ...]:
    """Returns the origins behind a step's harm, worst first; a written infinity (a mask) only without another."""
    harmful = [origin for origin in trace.origins if origin.affected]
    computed = [origin for origin in harmful if origin.came_from != "constant"]
    # harm to the loss or state before harm to gradients alone, then by time
    return tuple(sorted(computed or harmful, key=lambda o: (all(t.startswith("grad:") for t in o.affected), o.order)))


def independent(origins: Sequence[NonFiniteOrigin]) -> tuple[NonFiniteOrigin, ...]:
    """Returns one origin per place in the code, worst first as given: calls and micro-batches of a line are one."""
    places: dict[tuple[object, ...], NonFiniteOrigin] = {}
    for origin in origins:
        where = origin.where
        place: tuple[object, ...] = (
            (where.phase, where.module, where.op, where.tensor, where.source, where.forward_source)
            if where.phase != "optimizer"
            else (where.phase, where.op, where.source)  # an update treats all tensors alike
        )
        # gradients that were not cleared are one place
        places.setdefault(("grad",) if origin.came_from == "grad" else place, origin)
    return tuple(places.values())


def log2_over_limit(origin: NonFiniteOrigin) -> float | None:
    """Returns the log2 of the value over its format's limit; None where it is not beyond it."""
    verdict = origin.recomputed
    if verdict is None or not verdict.finite or verdict.limit <= 0 or verdict.amax <= verdict.limit:
        return None
    return math.log2(verdict.amax / verdict.limit)


def derivative_beyond(origin: NonFiniteOrigin) -> bool:
    """Returns whether the derivative itself exceeds the format, not its product: 1/x of a tiny x."""
    verdict = origin.recomputed
    largest = max((stats.amax for stats in origin.inputs), default=0.0)
    return verdict is not None and verdict.finite and verdict.amax > verdict.limit * largest > 0


def scale_may_cure(origins: tuple[NonFiniteOrigin, ...], nonfinite: NonFiniteReport) -> bool:
    """Returns whether only gradients (or a penalty's loss) are harmed, each by a backward beyond its format."""
    if any(not target.startswith(("grad:", "beside:")) and target != "loss" for target in nonfinite.affected):
        return False
    return all(cause_of(b) == "backward_overflow" and _overflows(b) for b in origins)


def _overflows(origin: NonFiniteOrigin) -> bool:
    """Whether smaller inputs would fit: it exceeds its format by a known factor, or overflows inside the op."""
    verdict = origin.recomputed
    return log2_over_limit(origin) is not None or (verdict is not None and bool(verdict.overflow))


def past_the_scaler(outcome: StepOutcome) -> bool:
    """Returns whether an optimizer stepped without `scaler.step`."""
    return outcome.optimizer_steps > 0 and not any(event.kind == "step" for event in outcome.events)


# -- the sentence about an origin --


_MEANT = {
    "masked_row": "a whole row of its operand is masked",
    "infinity": "infinities that were meant as a mask meet in it",
    "added_up": "infinities that were meant as a mask are added up in it",
    "masked_target": "a class that is to be learned is masked",
    "empty_input": "an input is empty",
}  # what is wrong, by `Operand.made_by`, where the operand's value shows no more
_PARTS: Mapping[str, str] = {
    "forward": "the model's own forward",
    "loss": "the loss code",
    "optimizer": "the optimizer's step",
    "scaler": "the scaler",
}
_EQUAL = 0.01  # log2 of a factor that is left out, because it is shown as 1
_WHOSE = {
    "data": "the batch",
    "param": "the parameter",
    "buffer": "the buffer",
    "grad": "the gradient of",
    "gradient": "the backward",
}


def sentence_of(origin: NonFiniteOrigin, cause: Cause) -> str:
    """Formats what became non-finite and why, with the numbers that decide it; the ops stand in the last bracket."""
    what = {"nan": "NaN", "inf": "Inf", "none": "a wrong value"}[origin.where.nonfinite]
    before, operand = at_step(origin.where), origin.operand
    if origin.came_from != "op":
        return before + _uncomputed(origin, what)
    if operand is not None and operand.made_by == "unseen":
        wrote = "code outside torch (Triton, ctypes, NumPy) wrote it"
        return f"{before}the result was finite, and holds {what} at its next read: {wrote} ({_op(origin)})"
    verdict, over = origin.recomputed, log2_over_limit(origin)
    if cause == "kernel_defect":
        said = _defect(origin, what)
    elif verdict is not None and over is not None:
        whose = "a gradient of " if origin.where.phase == "backward" else ""
        times = f"{2.0**over:.3g} times; " if over > _EQUAL else ""
        wider = ", and does not fit fp32 either" if verdict.finite32 is False and _format(origin) != "fp32" else ""
        return f"{before}{whose}{figure(verdict.amax)} is above {_limit(origin)}{wider} ({times}{_op(origin)})"
    elif verdict is not None and verdict.overflow:
        said = "the result does not fit fp64 either"
        if verdict.finite:
            said = f"a partial result in the op is above {_limit(origin)}, and the whole is {figure(verdict.amax)}"
    else:
        said = f"{what} from {'infinite' if any(stats.infs for stats in origin.inputs) else 'finite'} inputs"
        said += _invalid(origin, cause)
    maker = _maker(operand) if operand is not None and (verdict is None or not verdict.finite) else ""
    return f"{before}{said} ({_op(origin)}{maker})"


def _invalid(origin: NonFiniteOrigin, cause: Cause) -> str:
    """Formats why an op is not finite for its inputs, to follow that it is not."""
    verdict, operand = origin.recomputed, origin.operand
    finite = verdict is not None and verdict.finite
    if operand is not None and finite and operand.made_by in LOST:
        return f", not in fp64: a constant of {operand.float64:.10g} inside the op becomes {operand.here:g}"
    if operand is not None and not finite:
        return f": {_operand(operand)}"
    if verdict is not None and not finite:
        return f", in fp64 as well: {_poison(origin)}"
    return ": the state's dtype loses what the update divides by" if cause == "optimizer_precision" else ""


def at_step(where: Where) -> str:
    """Formats the beginning of a message, which a report's outline has in the finding's first line already."""
    about = where.tensor or where.module
    return f"step {where.step}{about and f', {about}'}: "


def _defect(origin: NonFiniteOrigin, what: str) -> str:
    verdict = origin.recomputed
    if origin.operand is not None and origin.operand.made_by == "unwritten":
        return f"the result holds {what} in memory that no op has written"
    if verdict is not None and verdict.returns is False:
        return (
            f"{what} once, and a finite result again from the same inputs: the kernel reads unwritten memory, or races"
        )
    if verdict is not None and not verdict.finite:
        return f"this kernel returns {what} for every input that was tried, in fp64 as well"
    amax = "" if verdict is None else f": {figure(verdict.amax)} in fp64, below {_limit(origin)}"
    return f"this kernel returns {what} where the result is finite and in range{amax}"


def _uncomputed(origin: NonFiniteOrigin, what: str) -> str:
    if origin.came_from == "data":
        return f"the batch holds {what} before the forward{_first_of(origin)}"
    if origin.came_from in STATE:
        return f"the state before the step holds {what} ({origin.where.op})"
    if origin.came_from == "grad":
        return f"the gradient holds {what} of an earlier step: it was not cleared"
    if origin.kernel or origin.where.op == LITERAL:
        return f"the code writes {what} here ({_op(origin)})"
    return f"{what} was there before this op read it ({_op(origin)})"


def _operand(operand: Operand) -> str:
    here = "not finite" if operand.here is None else figure(operand.here)
    fmt = short(operand.dtype)
    if operand.float64 is not None and operand.made_by in ("flushed", "flushed_epsilon", "rounded_to_one"):
        lost = {
            "flushed_epsilon": f"{fmt} has flushed {figure(operand.amax)} to 0",
            "flushed": f"{fmt} has flushed up to {figure(operand.amax)} to 0",
            "rounded_to_one": f"{fmt} has rounded {operand.amax:.10g} to 1",
        }[operand.made_by]
        return f"its operand is {here}, and {operand.float64:.10g} in fp64, because {lost}"
    if operand.made_by in _MEANT:
        return _MEANT[operand.made_by]
    if operand.made_by == "number":
        return f"an argument is {here}, which Python code computed (a learning rate, a factor)"
    if operand.made_by == "computed":
        return f"its operand is {here}, in fp64 as well"
    if operand.made_by == "constant":
        return f"its operand is {here}, which the code writes"
    kind, _, name = operand.made_by.partition(":")
    return (
        f"its operand is {here}, which came from {_WHOSE.get(kind, 'the optimizer state')}{f' {name}' if name else ''}"
    )


def _maker(operand: Operand) -> str:
    """Formats the op that made the operand, for the end of the bracket."""
    source = operand.source
    parts = (operand.op, None if source is None else f"{source.file}:{source.line}")
    made = " at ".join(part for part in parts if part)
    return f"; operand: {made}" if made else ""


def _op(origin: NonFiniteOrigin) -> str:
    """Formats the op, and the part of the step where no module has it."""
    where = origin.where
    named = next((stats.name for stats in origin.inputs if stats.name), None)
    op = f"{'backward of ' if where.phase == 'backward' else ''}{where.op or origin.kernel}"
    if named is not None and origin.kernel == "aten._to_copy":
        op = f"cast of {named.replace(':', ' ')} to {_format(origin)}"
    if origin.after_backward:
        return f"{op} in the code after a backward"
    return op if where.module else f"{op} in {_PARTS.get(where.phase, 'the model or the loss code')}"


def _format(origin: NonFiniteOrigin) -> str:
    return short(origin.outputs[0].dtype) if origin.outputs else "its dtype"


def _limit(origin: NonFiniteOrigin) -> str:
    limit = 0.0 if origin.recomputed is None else origin.recomputed.limit
    return f"{_format(origin)}'s largest value, {figure(limit)}"


def _first_of(origin: NonFiniteOrigin) -> str:
    """Formats the place of a batch's first such value, and how many there are."""
    first = origin.outputs[0] if origin.outputs else None
    if first is None or not origin.index:
        return ""
    name = origin.where.tensor or "batch"
    at = f"{name if ' ' not in name else 'index '}[{', '.join(map(str, origin.index))}]"
    return f", first at {at} ({first.nans + first.infs:,} of {math.prod(first.shape):,} values)"


def _poison(origin: NonFiniteOrigin) -> str:
    if any(stats.infs for stats in origin.inputs):
        return "infinities that were meant as a mask meet (a row that is masked as a whole, or inf - inf)"
    if any(0 in stats.shape for stats in origin.inputs):
        return "an input is empty"
    if any(stats.zeros for stats in origin.inputs):
        return "an input holds zeros where the op or its derivative needs none"
    return "the inputs are outside the op's domain"


FORWARD_OVERFLOW = rule("AMP201", REPLAYED)
INVALID_OP = rule("AMP202", REPLAYED)
BACKWARD_OVERFLOW = rule("AMP203", REPLAYED)
BAD_DATA = rule("AMP204", REPLAYED)

_BEYOND_FLOAT32 = "It does not fit fp32 either: bring the op's inputs down, look at the learning rate and the data."


def origin_finding(
    origin: NonFiniteOrigin,
    *,
    cause: Cause | None = None,
    severity: Severity = "error",
    prescription: Prescription | None = None,
    others: Sequence[NonFiniteOrigin] = (),
) -> Finding:
    """Makes the finding for an origin; `others` are independent. `cause` is given where a replay showed more."""
    decided = cause or cause_of(origin)
    code = STATE_CODES.get(origin.came_from, CODES[decided]) if decided == "bad_checkpoint" else CODES[decided]
    return rules()[code].finding(
        severity,
        sentence_of(origin, decided),
        where=origin.where,
        cause=decided,
        evidence=origin_numbers(origin, others),
        advice=_help(origin, decided),
        prescription=prescription,
    )


def _help(origin: NonFiniteOrigin, cause: Cause) -> str:
    beyond = origin.recomputed is not None and origin.recomputed.finite32 is False
    return _BEYOND_FLOAT32 if beyond and cause in ("forward_overflow", "backward_overflow") else help_for(origin, cause)


def origin_numbers(origin: NonFiniteOrigin, others: Sequence[NonFiniteOrigin]) -> dict[str, Any]:
    """Returns the numbers behind an origin as evidence; `others` are reported with it."""
    verdict = origin.recomputed
    numbers: dict[str, Any] = ({"first_index": list(origin.index)} if origin.index else {}) | {
        "kernel": origin.kernel,
        "origin": origin.came_from,
        "inputs": [_shown(stats) for stats in origin.inputs],
        "outputs": [_shown(stats) for stats in origin.outputs],
        "harmed": list(origin.affected[:8]),
        "harmed_count": len(origin.affected),
    }
    if verdict is not None:
        numbers["float64"] = {"finite": verdict.finite, "amax": verdict.amax, "limit": verdict.limit}
        numbers["log2_over_limit"] = log2_over_limit(origin)
        if verdict.overflow is not None:
            numbers["overflows_inside"] = verdict.overflow
        if verdict.returns is False:
            numbers["comes_again"] = False
        if verdict.finite32 is not None:
            numbers["float32"] = {"finite": verdict.finite32, "amax": verdict.amax32}
    if origin.operand is not None:
        numbers["operand"] = _shown_operand(origin.operand)
    if origin.departs and not origin.affected:
        numbers["departs"] = origin.departs
    if others:
        numbers["also"] = [
            {name: getattr(b.where, name) for name in ("phase", "module", "op", "nonfinite")}
            | ({"tensor": b.where.tensor} if b.came_from == "data" and b.where.tensor else {})
            for b in others[:8]
        ]
        numbers["also_count"] = len(others)
    return numbers


def _shown_operand(operand: Operand) -> dict[str, Any]:
    source = operand.source
    return {**asdict(operand), "source": None if source is None else {"file": source.file, "line": source.line}}


def _shown(stats: TensorStats) -> dict[str, Any]:
    return {**asdict(stats), "shape": list(stats.shape)}


def is_absorbed(origin: NonFiniteOrigin) -> bool:
    """Returns whether a computed infinity vanishes before the loss, a gradient or the run's state."""
    return origin.came_from == "op" and origin.where.nonfinite == "inf" and not origin.affected


def departing(trace: Trace, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[NonFiniteOrigin, ...]:
    """Returns overflows that left a finite value behind, but one far from the correct one, both in float64."""
    most = thresholds[FORWARD_OVERFLOW["departure"]]
    return tuple(origin for origin in trace.origins if not origin.affected and origin.departs > most)


# -- values that are not finite before the first step, and copies beside the model that are not --

_BESIDE = "beside:"
_THROUGH_HALF = (
    "Copy it from the model, and validate a copy (copy.deepcopy(average).half()) or under autocast, which casts no "
    "weight in place."
)
_LOST = "Look at the code that writes to it, and copy it from the model: an average of Inf or NaN never recovers."
_SHOWN = 3


def state_finding(kind: str, where: Where, stats: TensorStats) -> Finding:
    """Makes the finding for a "param", "buffer" or "optimizer_state" that is non-finite before the first step."""
    count = stats.nans + stats.infs
    return rules()[STATE_CODES[kind]].finding(
        "error",
        f"{at_step(where)}{count:,} of {math.prod(stats.shape):,} values are not finite before the first step "
        f"({where.op})",
        where=where,
        cause="bad_checkpoint",
        evidence={**_numbers(stats), "finite_amax": stats.amax},
        advice=HELP["bad_checkpoint"],
        prescription=Prescription.untried(
            f"replace {where.tensor}",
            "only an earlier checkpoint has the lost values",
            "Resume from a checkpoint in which this tensor is finite.",
        ),
    )


def hand_update_finding(where: Where, number: float | None) -> Finding:
    """Makes the finding for a parameter that an update by hand ruined; `number` is a bad argument of its op."""
    why = "" if number is None else f", with {number} among its arguments"
    cause: Cause = "optimizer_precision" if number is None else "invalid_op"
    return rules()[CODES[cause]].finding(
        "error",
        f"{at_step(where)}not finite after the loop's own update from finite tensors{why} ({where.op})",
        where=where,
        cause=cause,
        evidence={"number": number},
        advice=HELP[cause],
    )


def harms_beside_alone(origin: NonFiniteOrigin) -> bool:
    """Returns whether no part of the model is harmed, and the op is a cast to half or code after the backward."""
    if not origin.affected or not all(harm.startswith(_BESIDE) for harm in origin.affected):
        return False
    return _casts_to_half(origin) or origin.after_backward


def beside_finding(origin: NonFiniteOrigin) -> Finding:
    """Makes the finding for an origin of `harms_beside_alone`."""
    names = [harm.removeprefix(_BESIDE) for harm in origin.affected]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    cast = _casts_to_half(origin)
    beside = replace(origin, where=replace(origin.where, tensor=names[0]))
    deed = ", which was cast to fp16 and back" if cast else ""
    message = f"{sentence_of(beside, 'forward_overflow')}. It stays in {shown}, beside the model{deed}."
    return _beside_finding(beside.where, message, origin_numbers(origin, ()), cast=cast)


def seen_beside(name: str, stats: TensorStats, since: int, step: int, twin: tuple[str, float] | None) -> Finding:
    """Makes the finding for a tensor beside the model, finite after step `since`; `twin` is the model's of its name."""
    cast = twin is not None and not stats.nans and twin[1] >= FP16_OVERFLOW_AT
    kind: NonFinite = "nan" if stats.nans else "inf"
    where = Where(step=step, phase="optimizer", module=name.rpartition(".")[0], tensor=name, nonfinite=kind)
    count = f"{stats.nans + stats.infs:,}"
    message = f"{at_step(where)}{count} values beside the model are not finite. After step {since} all were finite."
    if cast and twin is not None:
        message += f" {BEYOND_FP16_SAID.format(name=twin[0], amax=figure(twin[1]))}."
    evidence = {**_numbers(stats), "finite_after": since, "nonfinite_after": step}
    return _beside_finding(where, message, evidence, cast=cast)


def _beside_finding(where: Where, message: str, evidence: dict[str, Any], *, cast: bool) -> Finding:
    advice = _THROUGH_HALF if cast else _LOST
    change = "cast a copy, not the average itself" if cast else f"mend what writes to {where.tensor}"
    return rules()["AMP114" if cast else "AMP101"].finding(
        "error",
        message,
        where=where,
        evidence=evidence,
        advice=advice,
        prescription=Prescription.untried(change, "the change is in the run's own code", advice),
    )


def _numbers(stats: TensorStats) -> dict[str, Any]:
    return {"nans": stats.nans, "infs": stats.infs, "dtype": stats.dtype, "shape": list(stats.shape)}


def _casts_to_half(origin: NonFiniteOrigin) -> bool:
    return origin.kernel in ("aten._to_copy", "aten.copy_") and any(
        stats.dtype == "float16" for stats in origin.outputs
    )
