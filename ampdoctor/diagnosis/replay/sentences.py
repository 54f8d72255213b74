"""A birth in one sentence: the place, the deed, and the numbers behind it."""

from __future__ import annotations

from ampdoctor.diagnosis.replay.causes import Cause, excess_binades
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.trace import LOST, Birth, Operand

_STATE = ("param", "buffer", "optimizer_state")
_MEANT = {
    "masked_row": "a whole row of its operand is masked",
    "infinity": "infinities meet in it that were meant",
    "added_up": "infinities that were meant to mask are added up in it",
    "masked_target": "a class that is to be learned is masked",
    "empty_input": "an input is empty",
}
"""What is wrong, by `Operand.made_by`, where the operand's value says nothing more."""
_HALVES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def place(where: Where) -> str:
    """The place in words: for messages."""
    if where.phase == "data":
        return f"batch {where.step}"
    if where.module:
        return f"module {where.module}"
    return {
        "forward": "the model's own forward",
        "loss": "the loss code",
        "optimizer": "the optimizer's step",
        "scaler": "the scaler",
    }.get(where.phase, "the model's own forward or the loss code")


def sentence_of(birth: Birth, cause: Cause) -> str:
    """What was born where, and why, with the numbers that decide it.

    Args:
        birth: The culprit.
        cause: As the finding names it.
    """
    where = birth.where
    what = {"nan": "NaN", "inf": "an infinity", "none": "a wrong value"}[where.nonfinite]
    if birth.origin != "op":
        return _uncomputed(birth, what)
    if birth.operand is not None and birth.operand.made_by == "unseen":
        return (
            f"step {where.step}, {where.phase}: what {_deed(birth)} in {_place(birth)} made was finite, and holds "
            f"{what} when it is next read: code that torch does not see (Triton, ctypes, NumPy) wrote it"
        )
    text = f"step {where.step}, {where.phase}: {_deed(birth)} in {_place(birth)} makes {what} from {_operands(birth)}"
    if cause == "kernel_defect":
        return f"{text}: {_defect(birth)}"
    over = excess_binades(birth)
    verdict = birth.recomputed
    if verdict is not None and over is not None:
        wider = ", and float32's" if verdict.finite32 is False and _format(birth) in _HALVES else ""
        return (
            f"{text}: {verdict.amax:.4g} in float64, {over:.2g} binades beyond {_format(birth)}'s "
            f"{verdict.limit:.5g}{wider}"
        )
    if verdict is not None and verdict.overflow:
        return f"{text}: " + (
            f"a partial result inside the op goes beyond {_format(birth)}, though the whole is {verdict.amax:.4g}"
            if verdict.finite
            else "the result is beyond float64 as well"
        )
    if birth.operand is not None and verdict is not None and verdict.finite and birth.operand.made_by in LOST:
        lost = f"{birth.operand.float64:.10g} is {birth.operand.here:g} in {_format(birth)}"
        return f"{text}, but not in float64: a constant inside the op is lost, {lost}"
    if birth.operand is not None and (verdict is None or not verdict.finite):
        return f"{text}: {_operand(birth.operand)}"
    if verdict is not None and not verdict.finite:
        return f"{text}, and in float64 as well: {_poison(birth)}"
    if cause == "optimizer_precision":
        return f"{text}: the state's format loses what the update divides by"
    return text


_LITERAL = "aten.lift_fresh"
"""What torch makes of a number that is assigned (`x[0] = nan`)."""


def _defect(birth: Birth) -> str:
    """What is wrong with a kernel."""
    verdict = birth.recomputed
    if birth.operand is not None and birth.operand.made_by == "unwritten":
        return "it shows memory that no op has written"
    if verdict is not None and verdict.returns is False:
        return "run again on the same inputs it is finite: the kernel shows memory that it has not written, or races"
    if verdict is not None and not verdict.finite:
        return "this kernel gives it for every input that was tried, in float64 as well"
    amax = "" if verdict is None else f" ({verdict.amax:.4g} in float64, of {_format(birth)}'s {verdict.limit:.5g})"
    return f"this kernel gives {_kind(birth)} where the arithmetic is finite and in range{amax}"


def _kind(birth: Birth) -> str:
    return "NaN" if birth.where.nonfinite == "nan" else "an infinity"


def _uncomputed(birth: Birth, what: str) -> str:
    """What the run brought along, or wrote down."""
    where = birth.where
    if birth.origin == "data":
        return f"step {where.step}: the batch itself holds {what}{f' (in {where.tensor})' if where.tensor else ''}"
    if birth.origin in _STATE:
        return f"step {where.step}: {where.tensor} holds {what} ({where.op})"
    if birth.origin == "grad":
        return f"step {where.step}: the gradient of {where.tensor} holds {what} of an earlier step: it was not cleared"
    text = f"step {where.step}, {where.phase}: {_deed(birth)} in {_place(birth)}"
    return (
        f"{text} writes {what} down"
        if birth.kernel or where.op == _LITERAL
        else f"{text} reads {what} that was there before"
    )


def _operand(operand: Operand) -> str:
    """What is wrong with the operand, and who made it so."""
    here = "not finite" if operand.here is None else f"{operand.here:.6g}"
    maker = "" if operand.op is None else operand.op
    if operand.source is not None:
        maker += f" at {operand.source.file}:{operand.source.line}"
    if operand.float64 is not None and operand.made_by in ("flushed", "flushed_epsilon", "rounded_to_one"):
        first = {
            "flushed_epsilon": f"flushed {operand.amax:.4g} to 0 in {operand.dtype}",
            "flushed": f"flushed up to {operand.amax:.4g} to 0 in {operand.dtype}",
            "rounded_to_one": f"rounded to 1 in {operand.dtype} what is {operand.amax:.10g} in float64",
        }[operand.made_by]
        return f"its operand is {here} (in float64 {operand.float64:.10g}), because {maker or 'an op'} {first}"
    meant = _MEANT.get(operand.made_by)
    if meant is not None:
        return f"{meant}{f' ({maker})' if maker else ''}"
    if operand.made_by == "number":
        return f"a number among its arguments is {here}, which Python code made (a learning rate, a factor)"
    if operand.made_by == "computed":
        return f"its operand is {here}, and {maker or 'the op'} makes that in float64 as well"
    if operand.made_by == "constant":
        return f"its operand is {here}, which the code writes{f' ({maker})' if maker else ''}"
    kind, _, name = operand.made_by.partition(":")
    whose = {"data": "the batch", "param": "the parameter", "buffer": "the buffer", "grad": "the gradient of"}
    whose["gradient"] = "the backward"
    return (
        f"its operand is {here}, which came from {whose.get(kind, 'the optimizer state')}{f' {name}' if name else ''}"
    )


def _place(birth: Birth) -> str:
    return "the code after the backward" if birth.after_backward else place(birth.where)


def _deed(birth: Birth) -> str:
    """The op; for a cast also what it casts, where that has a name."""
    named = next((stats.name for stats in birth.inputs if stats.name), None)
    if named is None or birth.kernel != "aten._to_copy":
        return birth.where.op or birth.kernel
    return f"{birth.where.op} (the cast of {named.replace(':', ' ')} to {_format(birth)})"


def _format(birth: Birth) -> str:
    return birth.outputs[0].dtype if birth.outputs else "the format"


def _operands(birth: Birth) -> str:
    return "infinite inputs" if any(stats.infs for stats in birth.inputs) else "finite inputs"


def _poison(birth: Birth) -> str:
    if any(stats.infs for stats in birth.inputs):
        return "infinities that were meant meet (a row that is masked as a whole, or inf - inf)"
    if any(0 in stats.shape for stats in birth.inputs):
        return "an input is empty"
    if any(stats.zeros for stats in birth.inputs):
        return "an input holds zeros where the op or its derivative needs none"
    return "the inputs are outside the op's domain"
