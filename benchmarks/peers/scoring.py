"""Holds a tool's answer against a label of the corpus: the same measure for every tool.

A module is right where it is one that the label accepts. An op is right under any of its spellings: with or without
namespace, in place or not, as Python's operator, as an autograd node, as a module's class. Step, module, op and cause
are each judged alone: who blames the right module a step late has the module right and the step wrong.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.answer import Answer

_SAME = {
    "truediv": "div",
    "rtruediv": "div",
    **{f"{side}{name}": name for side in "ri" for name in ("add", "sub", "mul", "pow", "matmul")},
    **dict.fromkeys(("to", "half", "bfloat16", "float", "type", "typeas"), "tocopy"),
    "crossentropy": "crossentropyloss",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case under one tool.

    Attributes:
        case: Id in the corpus.
        answer: What the tool said; None where it said nothing or failed.
        seconds: From the built tool to its answer, model and batches included; elapsed time.
        failure: Why there is no answer: the tool raised, or ran out of time.
    """

    case: str
    answer: Answer | None
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Which parts of an answer are right."""

    step: bool
    module: bool
    op: bool
    cause: bool

    @property
    def place(self) -> bool:
        """Step, module and op."""
        return self.step and self.module and self.op


@dataclass(frozen=True, slots=True)
class Score:
    """A tool's row: counts over the sick cases, and over the healthy ones.

    Attributes:
        sick: Number of sick cases.
        healthy: Number of healthy cases.
        step: Right step.
        module: Right module.
        op: Right op.
        place: All three.
        cause: Right cause.
        silent: Sick cases without a word.
        false_alarms: Healthy cases with an alarm.
        failures: Cases, sick or healthy, in which the tool failed.
        seconds: Median of a case.
    """

    sick: int
    healthy: int
    step: int
    module: int
    op: int
    place: int
    cause: int
    silent: int
    false_alarms: int
    failures: int
    seconds: float


def spelled(op: str) -> str:
    """Return the op's name without what spellings differ in: "aten.mul_.Tensor", "__imul__", "MulBackward0": "mul"."""
    if op.startswith(("state:", "optimizer_state:")):
        return op
    name = re.sub(r"^(aten|torch|prim)[.:]+", "", op)
    name = name.split(".")[0]
    name = re.sub(r"Backward\d*$|_backward(_data)?$", "", name)
    name = name.lower().replace("_", "")
    name = re.sub(r"^(native|foreach|cudnn|mkldnn)", "", name).removesuffix("forward")
    return _SAME.get(name, name)


def mark(label: Mapping[str, Any], answer: Answer | None) -> Mark:
    """Judge one answer to a sick case."""
    if answer is None:
        return Mark(step=False, module=False, op=False, cause=False)
    also = label.get("also_culprits") or []
    modules = {label["culprit_module"], *(label.get("culprit_modules_ok") or []), *(other["module"] for other in also)}
    ops = {label["culprit_op"], *label["culprit_op_aliases"], *(other["op"] for other in also)}
    named = answer.module is not None
    return Mark(
        step=answer.step == label["step"],
        module=named and (answer.module in modules or bool(label.get("any_module"))),
        op=answer.op is not None and spelled(answer.op) in {spelled(op) for op in ops},
        cause=not {label["kind"], *label["kinds_ok"]}.isdisjoint(answer.causes),
    )


def score(labels: Mapping[str, Mapping[str, Any]], outcomes: Sequence[Outcome]) -> Score:
    """Sum up a tool's outcomes; every label must have one.

    Raises:
        ValueError: A case has no outcome, or more than one.
    """
    if sorted(labels) != sorted(outcome.case for outcome in outcomes):
        raise ValueError("a case without an outcome, or with two")
    sick = [outcome for outcome in outcomes if labels[outcome.case]["kind"] != "healthy"]
    marks = [mark(labels[outcome.case], outcome.answer) for outcome in sick]
    healthy = [outcome for outcome in outcomes if labels[outcome.case]["kind"] == "healthy"]
    return Score(
        sick=len(sick),
        healthy=len(healthy),
        step=sum(one.step for one in marks),
        module=sum(one.module for one in marks),
        op=sum(one.op for one in marks),
        place=sum(one.place for one in marks),
        cause=sum(one.cause for one in marks),
        silent=sum(outcome.answer is None and outcome.failure is None for outcome in sick),
        false_alarms=sum(outcome.answer is not None for outcome in healthy),
        failures=sum(outcome.failure is not None for outcome in outcomes),
        seconds=statistics.median(outcome.seconds for outcome in outcomes),
    )
