"""AMP304: parameters get no gradient, step after step, and in fp32 they do; the total does not show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.causes import HELP, Cause
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds
from ampdoctor.evidence.trace import Comparison, Flush, ParameterBeside

LOST = Threshold(
    code="AMP304",
    name="lost",
    default=0.95,
    unit="share",
    why="Share of the norm of a parameter's gradient in fp32 that lies in elements which are zero here, in every step: "
    "1 where it gets nothing at all.",
)
RULE = register(
    "AMP304",
    "starved-parameters",
    "Parameters get no gradient, and in fp32 they do",
    worst="error",
    commands=REPLAYED,
    thresholds=(LOST,),
)

NAMED = 16
"""Parameters that the evidence names."""


def starved(compared: Sequence[Comparison], thresholds: Thresholds) -> tuple[ParameterBeside, ...]:
    """Returns the parameters that get nothing in any of these steps, and would move in fp32; as in the first of them.

    The first steps in which fp32 gives a parameter nothing either do not count for it: behind a layer that begins at
    zero, nothing arrives before that layer has moved.

    Args:
        compared: The steps.
        thresholds: How much has to be lost (AMP304).
    """
    share = thresholds[LOST]
    first: dict[str, ParameterBeside] = {}
    fed: set[str] = set()
    for step in compared:
        for parameter in step.parameters:
            if _is_starved(parameter, share):
                first.setdefault(parameter.name, parameter)
            elif parameter.nonzero or parameter.name in first:
                fed.add(parameter.name)
    return tuple(parameter for name, parameter in first.items() if name not in fed)


def shown_in(compared: Sequence[Comparison], parameters: Sequence[ParameterBeside]) -> tuple[Comparison, ...]:
    """Returns the steps in which fp32 gives one of the parameters something.

    Args:
        compared: The steps.
        parameters: The parameters.
    """
    names = {parameter.name for parameter in parameters}
    return tuple(step for step in compared if any(p.nonzero and p.name in names for p in step.parameters))


def _is_starved(parameter: ParameterBeside, share: float) -> bool:
    lost = parameter.flushed > 0 and parameter.flushed_error >= share * parameter.expected
    return lost and parameter.meant_to_move > 0


def severity_of(names: Sequence[str], held: Mapping[str, Sequence[str]]) -> Severity:
    """Error where all that one module trains gets nothing, else a warning.

    Args:
        names: The starved parameters.
        held: The names of the parameters with a gradient in fp32, by the module that owns them.
    """
    whole = any(all(name in names for name in own) for own in held.values())
    return "error" if whole else "warning"


def owners(parameters: Sequence[ParameterBeside]) -> dict[str, list[str]]:
    """Returns the names of parameters by the module that owns them."""
    by_module: defaultdict[str, list[str]] = defaultdict(list)
    for parameter in parameters:
        by_module[parameter.name.rpartition(".")[0]].append(parameter.name)
    return dict(by_module)


def common_module(names: Sequence[str]) -> str:
    """Returns the innermost module that holds all of these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def starved_finding(
    compared: Sequence[Comparison],
    parameters: Sequence[ParameterBeside],
    flush: Flush | None,
    saturated: Where | None = None,
) -> Finding:
    """The finding for parameters that are starved: one, as they share a cause.

    Args:
        compared: The steps that it rests on.
        parameters: As they are in the first of them.
        flush: The op of the backward whose result is zero and should not be, if one was seen.
        saturated: The op whose derivative is zero for what the forward has rounded, and for no scale is another.
    """
    first, names = compared[0], [p.name for p in parameters]
    scale = next((event.scale for event in first.events if event.scale is not None), None)
    scaled = "without a loss scale" if scale is None else f"at loss scale {scale:g}"
    module = common_module(names)
    where = Where(step=first.step, phase="backward", module=module, tensor=names[0] if len(names) == 1 else None)
    cause: Cause = "grad_underflow" if saturated is None else "forward_precision"
    largest = max(parameters, key=lambda p: p.expected)
    who = names[0] if len(names) == 1 else f"{len(names)} parameters of {module or 'the model'}"
    several = len(names) > 1
    steps = f"in all {len(compared)} steps that were compared" if len(compared) > 1 else "in the step that was compared"
    said = f"{who} {'get' if several else 'gets'} no gradient {scaled}, {steps}, and in fp32 "
    much = f"{'they do' if several else 'it does'} (norm {largest.expected:.2g} of {first.gradient_norm:.2g})"
    if saturated is not None:
        much += f": {saturated.op} in {saturated.module or 'the loss code'} has rounded into saturation"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=severity_of(names, owners(first.parameters)),
        cause=cause,
        where=saturated or (where if flush is None else flush.where),
        message=f"step {first.step}: {said}{much}",
        evidence={
            "parameters": names[:NAMED],
            "parameters_count": len(names),
            "steps": [step.step for step in compared],
            "gradient_norm_in_fp32": largest.expected,
            "flushed": largest.flushed,
            "nonzero_in_fp32": largest.nonzero,
            "all_gradients_norm": first.gradient_norm,
            "scale": scale,
            "flushed_at_op": None if flush is None else flush.fraction,
        },
        help=HELP[cause],
    )
