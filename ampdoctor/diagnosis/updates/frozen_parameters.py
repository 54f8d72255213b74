"""AMP506: parameters stand still over all compared steps, and in fp32 they move; the total does not show them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.starved_parameters import common_module
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.diagnosis.updates.course import NAMED, goes_one_way, lasting, named, within
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds
from ampdoctor.evidence.trace import Comparison, ParameterBeside

SHARE = Threshold(
    code="AMP506",
    name="share",
    default=0.1,
    unit="share",
    why="Share of the squared gradient that frozen tensors of several elements own, from which it is an error and no "
    "note: what standing still costs the loss at first order. 0.0001 to 0.035 for the norm gains of 20 architectures "
    "in pure bf16.",
)
RULE = register(
    "AMP506",
    "frozen-parameters",
    "Parameters stand still, and in fp32 they move",
    worst="error",
    commands=REPLAYED,
    thresholds=(SHARE,),
)

NOTED = 1e-3
"""Share of the squared gradient below which nothing is said of tensors of several elements."""
ALONE = 1e-6
"""The same of a tensor of one element, a temperature or a logit scale: no other moves in its place. A gradient of a
thousandth of the run's, as for a step that has converged."""


def frozen(compared: Sequence[Comparison]) -> tuple[ParameterBeside, ...]:
    """Returns the parameters that stand still in each of the steps, as they are in the first of them.

    They get a gradient, and fp32 moves them one way, by less than half a unit in the last place: more would be another
    cause. Those of several elements only where they are all worth a word.

    Args:
        compared: The steps.
    """
    since, runs = lasting([step.parameters for step in compared], _stands_still, goes_one_way)
    if since:
        return ()
    still = [run[0] for run in runs.values()]
    alone = [p for p in still if p.looked_at == 1 and share_of(compared, [p.name]) >= ALONE]
    several = [p for p in still if p.looked_at > 1]
    if share_of(compared, [p.name for p in several]) < NOTED:
        several = []
    return tuple(p for p in still if p in alone or p in several)


def severity_of(
    compared: Sequence[Comparison], parameters: Sequence[ParameterBeside], thresholds: Thresholds
) -> Severity:
    """Error where one is a number of its own or their share is large, else a note.

    Args:
        compared: The steps.
        parameters: Those that stand still.
        thresholds: Which share is large (AMP506).
    """
    own = any(p.looked_at == 1 for p in parameters)
    large = share_of(compared, [p.name for p in parameters]) >= thresholds[SHARE]
    return "error" if own or large else "note"


def share_of(compared: Sequence[Comparison], names: Sequence[str]) -> float:
    """Returns the share of the squared gradient in fp32, over all steps, that is of these parameters.

    Args:
        compared: The steps.
        names: Of the parameters.
    """
    own = set(names)
    whole = math.fsum(p.expected**2 for step in compared for p in step.parameters)
    return math.fsum(p.expected**2 for step in compared for p in step.parameters if p.name in own) / (whole or 1.0)


def frozen_finding(
    compared: Sequence[Comparison], parameters: Sequence[ParameterBeside], severity: Severity, op: str
) -> Finding:
    """The finding for parameters that stand still: one, as they share a cause.

    Args:
        compared: The steps that it rests on.
        parameters: As they are in the first of them.
        severity: How bad it is.
        op: What writes them.
    """
    names = [p.name for p in parameters]
    module = common_module(names)
    stand = "stands" if len(names) == 1 else "stand"
    share = share_of(compared, names)
    far = max(abs(half_units) for p in parameters for half_units in p.course)
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=severity,
        cause="optimizer_precision",
        where=Where(
            step=compared[0].step,
            phase="optimizer",
            module=module,
            op=op,
            tensor=names[0] if len(names) == 1 else None,
        ),
        message=f"step {compared[0].step}: {named(names, module)} {stand} still {within(compared, 0)}, and in fp32 "
        f"{'it moves' if len(names) == 1 else 'they move'}: each update is below half a unit in the last place "
        f"({far:.2g} of it at most), with {share:.2g} of the squared gradient",
        evidence={
            "parameters": names[:NAMED],
            "parameters_count": len(names),
            "steps": [step.step for step in compared],
            "share_of_squared_gradient": share,
            "largest_update_in_half_units": far,
        },
        help=HELP["optimizer_precision"],
    )


def _stands_still(p: ParameterBeside) -> bool:
    """A gradient arrives, fp32 moves the parameter, nothing moves here; the move rounds away."""
    return p.gradient > 0 and p.meant_to_move > 0 and not p.moved and 2 * p.beneath > p.meant_to_move
