"""AMP507: the update of single tensors is far from fp32's, though their gradients are right."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.starved_parameters import common_module
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.diagnosis.replay.optimizer_precision import rounded_away
from ampdoctor.diagnosis.updates.course import NAMED, SHOWN, lasting, named, within
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds
from ampdoctor.evidence.trace import Comparison, ParameterBeside

RATIO = Threshold(
    code="AMP507",
    name="ratio",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which the norm of a tensor's update is longer or shorter than fp32's, in each step: rounding of a "
    "gradient that is right to a half cannot do it.",
)
RULE = register(
    "AMP507",
    "wrong-step",
    "An optimizer's step is far too long or too short, and its gradient is right",
    worst="error",
    commands=REPLAYED,
    thresholds=(RATIO,),
)

ROUNDED = 4.0
"""Norms that differ by less than this many roundings of the weight are the weight's own rounding."""
RIGHT = 0.5
"""Relative error of a gradient up to which it is not the cause."""

Far = tuple[ParameterBeside, ...]


def far_from(compared: Sequence[Comparison], thresholds: Thresholds) -> tuple[int, tuple[Far, ...]]:
    """Returns since which of the steps updates are wrong, as an index, and each parameter as it is in them.

    Args:
        compared: The steps.
        thresholds: How far is far (AMP507).
    """
    ratio = thresholds[RATIO]
    least = max(1, min(SHOWN, len(compared)))  # of a right gradient one wrong step is enough, if there is only one
    since, runs = lasting([step.parameters for step in compared], lambda p: is_far(p, ratio), least=least)
    return since, tuple(runs.values())


def is_far(parameter: ParameterBeside, ratio: float) -> bool:
    """Is an update of a right gradient too long or too short, above rounding?

    Args:
        parameter: It, in one step.
        ratio: By which factor.
    """
    p = parameter
    if not p.moved or not p.expected_update or p.error > RIGHT * p.expected:
        return False
    apart = abs(p.update - p.expected_update) > ROUNDED * p.rounding
    return apart and not 1 / ratio <= p.update / p.expected_update <= ratio


def made_zero(compared: Sequence[Comparison]) -> tuple[int, Far]:
    """Returns the first step in which parameters with a right gradient stand still, and not for rounding; and these.

    Args:
        compared: The steps.
    """
    for at, step in enumerate(compared):
        still = tuple(p for p in step.parameters if _is_zero(p))
        if still:
            return at, still
    return 0, ()


def _is_zero(p: ParameterBeside) -> bool:
    right = p.gradient > 0.0 and p.error <= RIGHT * p.expected
    return right and p.meant_to_move > 0 and not p.moved and not rounded_away([p])


def wrong_step_finding(compared: Sequence[Comparison], since: int, found: Sequence[Far], op: str) -> Finding:
    """The finding for updates that are wrong: one, as they share a cause.

    Args:
        compared: All compared steps.
        since: Index of the first in which they are.
        found: The parameters, each as it is in these steps.
        op: The first op of the optimizer that writes something else than in fp32.
    """
    names = [run[0].name for run in found]
    module = common_module(names)
    ratios = [p.update / p.expected_update for run in found for p in run]
    step = compared[since].step
    worst = max(found, key=lambda run: run[0].expected)
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="optimizer_precision",
        where=Where(
            step=step,
            phase="optimizer",
            module=module or worst[0].name.rpartition(".")[0],
            op=op,
            tensor=names[0] if len(names) == 1 else None,
        ),
        message=f"step {step}: the update of {named(names, module)} is {min(ratios):.2g} to {max(ratios):.2g} times as "
        f"long as in fp32 {within(compared, since)}, and the gradient is right",
        evidence={
            "parameters": names[:NAMED],
            "parameters_count": len(names),
            "steps": [step.step for step in compared[since:]],
            "smallest_ratio": min(ratios),
            "largest_ratio": max(ratios),
        },
        help=HELP["optimizer_precision"],
    )
