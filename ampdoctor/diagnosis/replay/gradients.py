"""Rules on gradients that underflow: in total (AMP301), and of single parameters (AMP304)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import MEASURED, REPLAYED, rule, scale_text
from ampdoctor.diagnosis.replay.nonfinite import HELP, at_step
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Cause, Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import RangeFigures
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_BAD, ERROR_NOTE, ERROR_WARNING, FLUSHED, Thresholds
from ampdoctor.evidence.trace import Comparison, Flush, ParameterVsFp32

GRADIENT_UNDERFLOW = rule("AMP301", MEASURED)
ZEROED_SHARE = GRADIENT_UNDERFLOW["zeroed_share"]
ZEROED = GRADIENT_UNDERFLOW["zeroed"]
CLEARLY_BETTER = GRADIENT_UNDERFLOW["better"]

LOSSY = 1e-2
"""Share of flushed activation gradients from which weight gradients lose more than their own histogram shows."""


LEAST_SHARE = 1e-2
"""Share of the squared error below which flushed elements explain nothing, however many they are. Where underflow
causes an error, flushed elements and subnormal ones are off by as much, at most 2^-25: the flushed share of the error
is about their share of the elements. The limit is a tenth of `ZEROED`, for values that spread over many powers of two.
In a half ResNet whose branches are almost switched off, 0.35 of the elements were flushed, with 1.6e-7 of the error."""


def severity_of_error(relative_error: float, thresholds: Thresholds) -> Severity | None:
    """Returns how bad a relative L2 error of the weight gradients is; None where it is as good as bf16's."""
    if relative_error > thresholds[ERROR_BAD]:
        return "error"
    if relative_error > thresholds[ERROR_WARNING]:
        return "warning"
    return "note" if relative_error > thresholds[ERROR_NOTE] else None


def underflow_seen(
    now: Mapping[str, float],
    then: Mapping[str, float] | None,
    scale: float,
    prescription: Prescription | None,
    thresholds: Thresholds,
) -> Finding | None:
    """Judges AMP301 from a replay's shares: `now` with the run's own scaling, `then` with the recommended."""
    error = now["relative_error"]
    severity = severity_of_error(error, thresholds)
    if severity is None or (then is not None and error < thresholds[CLEARLY_BETTER] * then["relative_error"]):
        return None
    if max(now["activation_grad"], now["weight_grad"]) <= thresholds[FLUSHED]:
        return None  # an error without lost elements is rounding, which no scale changes
    return GRADIENT_UNDERFLOW.finding(
        severity,
        f"at loss scale {scale_text(scale)}, {now['activation_grad']:.2%} of the nonzero activation gradients and "
        f"{now['weight_grad']:.2%} of the weight gradients become zero. "
        f"The weight gradients are {error:.2g} away from fp32's (relative L2).",
        where=Where(step=0, phase="backward"),
        cause="grad_underflow",
        evidence={"loss_scale": scale, "now": dict(now), "with_the_change": None if then is None else dict(then)},
        prescription=prescription,
    )


def _severity_of_share(flushed: float, thresholds: Thresholds) -> Severity | None:
    if flushed > thresholds[GRADIENT_UNDERFLOW["share_bad"]]:
        return "error"
    return "warning" if flushed > thresholds[GRADIENT_UNDERFLOW["share_warning"]] else None


def underflow_expected(
    activation: RangeFigures,
    weight: RangeFigures,
    scale: float,
    bf16: RangeFigures,
    thresholds: Thresholds,
    *,
    measured: float | None = None,
) -> Finding | None:
    """Judges AMP301 from histograms, and from the error that shadow steps `measured` at this scale."""
    # a normal number is rounded by 2^-11 at most: a larger error than the note's is of zeros and subnormals
    harmful = not weight.overflowed and weight.relative_error > thresholds[ERROR_NOTE]
    if activation.flushed <= thresholds[FLUSHED] and not harmful:
        return None
    if measured is not None and (harmful or activation.flushed > LOSSY):
        severity = severity_of_error(measured, thresholds)
    else:
        known: set[Severity | None] = {severity_of_error(weight.relative_error, thresholds)} if harmful else set()
        if measured is None:
            known.add(_severity_of_share(activation.flushed, thresholds))
        severity = "error" if "error" in known else "warning" if "warning" in known else None
    kept_in_part = (
        f". {weight.subnormal:.2%} of the weight gradients keep fewer bits: rounding changes them by "
        f"{weight.relative_error:.2g} (relative L2)."
    )
    return GRADIENT_UNDERFLOW.finding(
        severity or "note",
        f"in fp16 at loss scale {scale_text(scale)}, {activation.flushed:.2%} of the nonzero activation gradients and "
        f"{weight.flushed:.2%} of the weight gradients would become zero "
        f"(bf16: {bf16.flushed:.2%}){kept_in_part if harmful else ''}",
        where=Where(step=0, phase="backward"),
        cause="grad_underflow",
        evidence={
            "loss_scale": scale,
            "activation_grad_flushed": activation.flushed,
            "weight_grad_flushed": weight.flushed,
            "weight_grad_subnormal": weight.subnormal,
            "weight_grad_relative_error": weight.relative_error,
            "weight_grad_relative_error_measured": measured,
            "bf16_activation_grad_flushed": bf16.flushed,
        },
    )


def underflow(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Severity | None:
    """Returns how much gradients that are flushed to zero, but nonzero in fp32, matter in a step; None: not."""
    if comparison.gradient_error <= thresholds[ERROR_WARNING]:
        return None
    many = comparison.zeroed >= thresholds[ZEROED] and comparison.zeroed_share >= LEAST_SHARE
    if comparison.zeroed_share < thresholds[ZEROED_SHARE] and not many:
        return None
    return "error" if comparison.gradient_error > thresholds[ERROR_BAD] else "warning"


def deserves_a_look(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> bool:
    """Returns whether the gradients depart from fp32 by more than rounding, or by the user's threshold for AMP301."""
    return not comparison.gradient_error <= min(ERROR_WARNING.default, thresholds[ERROR_WARNING])


def underflow_at(comparison: Comparison, flushes: Sequence[Flush], severity: Severity) -> Finding:
    """Makes the finding at the backward's first op that flushes most of its result, else the op that flushes most."""
    first = next((f for f in flushes if f.fraction > 0.5), None) or max(flushes, key=lambda f: f.fraction)
    scale = next((event.scale for event in comparison.events if event.scale is not None), None)
    scaled = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    return GRADIENT_UNDERFLOW.finding(
        severity,
        f"{at_step(first.where)}{comparison.zeroed:.1%} of the gradient elements are zero here, {scaled}, and not in "
        f"fp32. The gradient is {comparison.gradient_error:.2g} away from fp32's (relative L2).",
        where=first.where,
        cause="grad_underflow",
        evidence={
            "zeroed_grad_fraction": comparison.zeroed,
            "gradient_error": comparison.gradient_error,
            "zeroed_share_of_error": comparison.zeroed_share,
            "scale": scale,
            "flushed_at_op": first.fraction,
        },
        advice=HELP["grad_underflow"],
    )


# AMP304: the model's total does not show these parameters.


STARVED_PARAMETERS = rule("AMP304", REPLAYED)


def listing(names: Sequence[str], what: str = "parameters") -> dict[str, Any]:
    """Returns the first names and their number, as evidence."""
    return {what: list(names[:16]), f"{what}_count": len(names)}


def starved(compared: Sequence[Comparison], thresholds: Thresholds) -> tuple[ParameterVsFp32, ...]:
    """Returns the parameters that get no gradient in any step since fp32 gives one, with their first values."""
    share = thresholds[STARVED_PARAMETERS["lost"]]
    first: dict[str, ParameterVsFp32] = {}
    fed: set[str] = set()
    for step in compared:
        for parameter in step.parameters:
            if _is_starved(parameter, share):
                first.setdefault(parameter.name, parameter)
            elif parameter.nonzero or parameter.name in first:
                fed.add(parameter.name)
    return tuple(parameter for name, parameter in first.items() if name not in fed)


def shown_in(compared: Sequence[Comparison], parameters: Sequence[ParameterVsFp32]) -> tuple[Comparison, ...]:
    """Returns the steps in which fp32 gives one of the parameters a gradient."""
    names = {parameter.name for parameter in parameters}
    return tuple(step for step in compared if any(p.nonzero and p.name in names for p in step.parameters))


def _is_starved(parameter: ParameterVsFp32, share: float) -> bool:
    lost = parameter.flushed > 0 and parameter.flushed_error >= share * parameter.expected
    return lost and parameter.meant_to_move > 0


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
    parameters: Sequence[ParameterVsFp32],
    flush: Flush | None,
    saturated: Where | None = None,
) -> Finding:
    """Makes one finding for starved parameters; `flush` or `saturated` is the op that loses their gradients."""
    first, names = compared[0], [p.name for p in parameters]
    scale = next((event.scale for event in first.events if event.scale is not None), None)
    scaled = "without a loss scale" if scale is None else f"at loss scale {scale_text(scale)}"
    module = common_module(names)
    where = Where(step=first.step, phase="backward", module=module, tensor=names[0] if len(names) == 1 else None)
    cause: Cause = "grad_underflow" if saturated is None else "forward_precision"
    largest = max(parameters, key=lambda p: p.expected)
    who = names[0] if len(names) == 1 else f"{len(names)} parameters of {module or 'the model'}"
    several = len(names) > 1
    steps = f"in all {len(compared)} steps that were compared" if len(compared) > 1 else "in the step that was compared"
    said = f"{who} {'get' if several else 'gets'} no gradient {scaled}, {steps}. In fp32 "
    fed = {p.name.rpartition(".")[0] for p in first.parameters if p.name not in names}
    whole_module = any(p.name.rpartition(".")[0] not in fed for p in first.parameters)
    much = f"{'they do' if several else 'it does'} (norm {largest.expected:.2g} of {first.gradient_norm:.2g})"
    if saturated is not None:
        much += f". An op in {saturated.module or 'the loss code'} is saturated by rounding ({saturated.op})."
    return STARVED_PARAMETERS.finding(
        "error" if whole_module else "warning",
        f"step {first.step}: {said}{much}",
        where=saturated or (where if flush is None else flush.where),
        cause=cause,
        evidence={
            **listing(names),
            "steps": [step.step for step in compared],
            "gradient_norm_in_fp32": largest.expected,
            "flushed": largest.flushed,
            "nonzero_in_fp32": largest.nonzero,
            "all_gradients_norm": first.gradient_norm,
            "scale": scale,
            "flushed_at_op": None if flush is None else flush.fraction,
        },
        advice=HELP[cause],
    )
