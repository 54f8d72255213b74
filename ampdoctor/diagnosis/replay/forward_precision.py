"""AMP208: a finite value of the forward is wrong, because one op makes a large error of another's rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds
from ampdoctor.evidence.trace import Amplified, Comparison, ParameterBeside

DEPARTS = Threshold(
    code="AMP208",
    name="departs",
    default=0.125,
    unit="relative L2 error",
    why="Error of an op's result against the forward in fp32 that is wrong, where its inputs have at most an eighth of "
    "it: 0.3 to 1.3 where positions, timesteps, ids or sums do not fit the format; in three steps of 21 architectures "
    "in fp16, bf16 and pure bf16 no op comes above 0.03, and attention over loud logits to 0.09.",
)
ALONE = Threshold(
    code="AMP208",
    name="alone",
    default=0.1,
    unit="relative L2 error",
    why="Error of a single parameter's gradient from which a step is looked at closely (as AMP207.relative_error for "
    "all of them together).",
)
RULE = register(
    "AMP208",
    "forward-precision",
    "A finite value of the forward is far from what it is in fp32",
    worst="error",
    commands=REPLAYED,
    thresholds=(DEPARTS, ALONE),
)

SLIGHT = 1e-5
"""Share of the norm of all gradients below which a parameter's own is not looked at: of a gradient whose true value is
zero (the bias of a key projection) fp32 leaves 1e-7 and less, and its distance from fp32's says nothing."""
BETTER = 4.0
"""Factor by which a change has to bring the gradients that are far from fp32's nearer to it: it then explains fifteen
sixteenths of their squared error."""
NAMED = 16
"""Parameters that the evidence names."""
NOTHING: Mapping[str, float] = MappingProxyType({})


def far_alone(
    comparison: Comparison, thresholds: Thresholds, known: Mapping[str, float] = NOTHING
) -> tuple[ParameterBeside, ...]:
    """Returns the parameters whose own gradients are far from fp32's, the farthest first.

    Args:
        comparison: Of one step.
        thresholds: How far is far (AMP208).
        known: Errors that were looked at before, by name; a parameter that is not farther does not count.
    """
    least = SLIGHT * comparison.gradient_norm
    far = [p for p in comparison.parameters if p.expected > least and error_of(p) > thresholds[ALONE]]
    return tuple(sorted((p for p in far if error_of(p) > known.get(p.name, 0.0)), key=error_of, reverse=True))


def error_of(parameter: ParameterBeside) -> float:
    """Relative L2 error of a parameter's gradient; inf where fp32 has none."""
    return parameter.error / parameter.expected if parameter.expected else math.inf


def together(parameters: Sequence[ParameterBeside]) -> float:
    """Relative L2 error of several parameters' gradients together."""
    expected = math.hypot(*(p.expected for p in parameters))
    return math.hypot(*(p.error for p in parameters)) / expected if expected else math.inf


def departing_in_forward(amplified: Sequence[Amplified], thresholds: Thresholds) -> tuple[Amplified, ...]:
    """Returns the ops whose results are wrong, one for each op whose rounding is behind it, in the order of the ops.

    Args:
        amplified: What was seen of a step.
        thresholds: How far is far (AMP208).
    """
    first: dict[object, Amplified] = {}
    for one in amplified:
        if one.error > thresholds[DEPARTS]:
            first.setdefault((one.source.module, one.source.op, one.source.source), one)
    return tuple(first.values())


def forward_precision_finding(comparison: Comparison, one: Amplified, far: Sequence[ParameterBeside]) -> Finding:
    """The finding; its place is the op whose rounding is behind it.

    Args:
        comparison: The step beside fp32.
        one: The op whose result is wrong.
        far: The parameters whose gradients are far from fp32's for it.
    """
    names = [p.name for p in far]
    own = "the loss code" if one.source.phase == "loss" else "the model's own forward"
    module = f"module {one.source.module}" if one.source.module else own
    suffers = (
        f"{one.where.op}{f' in module {one.where.module}' if one.where.module not in ('', one.source.module) else ''}"
    )
    makes = f"{suffers} makes of it" if one.where != one.source else "makes"
    whose = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] if names else "no parameter"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="forward_precision",
        where=one.source,
        message=f"step {comparison.step}: {one.source.op} in {module} rounds to {one.dtype} (by {one.rounding:.1g}), "
        f"and {makes} a value that is {one.error:.0%} away from fp32's; the gradient of {whose} is off by "
        f"{together(far):.0%} (relative L2)",
        evidence={
            "departs": one.error,
            "inputs_depart": one.before,
            "at_op": one.where.op,
            "at_module": one.where.module,
            "rounding": one.rounding,
            "format": one.dtype,
            "parameters": names[:NAMED],
            "parameters_count": len(names),
            "gradients_depart": together(far),
            "gradient_error": comparison.gradient_error,
        },
        help=HELP["forward_precision"],
    )
