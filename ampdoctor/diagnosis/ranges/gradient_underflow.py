"""AMP301: gradients are lost below fp16's range; from a replay, from histograms, or beside fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampdoctor.diagnosis.catalogue.rule import MEASURED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import RangeFigures
from ampdoctor.evidence.thresholds import (
    DEFAULT_THRESHOLDS,
    ERROR_BAD,
    ERROR_NOTE,
    ERROR_WARNING,
    FLUSHED,
    Threshold,
    Thresholds,
)
from ampdoctor.evidence.trace import Comparison, Flush

ZEROED_SHARE = Threshold(
    code="AMP301",
    name="zeroed_share",
    default=0.5,
    unit="share",
    why="Share of the squared error that flushed elements make up, where it is underflow: most of it; rounding makes "
    "up the rest. Of bisect-nan.",
)
ZEROED = Threshold(
    code="AMP301",
    name="zeroed",
    default=0.1,
    unit="share",
    why="Or the share of elements that are flushed: what is left of the others is then subnormal and as far off "
    "(0.93 in a collapsed run, below 1e-3 in healthy ones). Of bisect-nan.",
)
SHARE_WARNING = Threshold(
    code="AMP301",
    name="share_warning",
    default=0.3,
    unit="share",
    why="Share of flushed activation gradients with which 12-block transformers trained a little worse (30 to 45 %; "
    "with 19 % as well as in fp32). Of profile, where no step in fp16 measured the error.",
)
SHARE_BAD = Threshold(
    code="AMP301",
    name="share_bad",
    default=0.7,
    unit="share",
    why="And with which they did not learn (70 to 84 %).",
    above=SHARE_WARNING,
)
CLEARLY_BETTER = Threshold(
    code="AMP301",
    name="better",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which another loss scale must lower the error before the present one is blamed. Of recommend.",
)
RULE = register(
    "AMP301",
    "gradient-underflow",
    "Gradients are lost below fp16's range",
    worst="error",
    commands=MEASURED,
    thresholds=(
        FLUSHED,
        ERROR_NOTE,
        ERROR_WARNING,
        ERROR_BAD,
        ZEROED_SHARE,
        ZEROED,
        SHARE_WARNING,
        SHARE_BAD,
        CLEARLY_BETTER,
    ),
)

LOSSY = 1e-2
"""Share of flushed activation gradients from which weight gradients lose more than their own histogram shows."""


LEAST_SHARE = 1e-2
"""Share of the squared error below which flushed elements explain nothing, however many they are. Where underflow is
behind an error, what flushes and what survives beside it as a subnormal are off by as much, at most 2^-25: the flushed
make up about as much of the error as of the elements. That is a tenth of `ZEROED`, for values that spread over many
binades; a half ResNet with branches that are almost switched off had 0.35 of its elements and 1.6e-7 of its error."""


def severity_of_error(relative_error: float, thresholds: Thresholds) -> Severity | None:
    """How bad a relative L2 error of the weight gradients is; None where it is as good as bf16's."""
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
    """AMP301 from a replay.

    Args:
        now: `relative_error`, `activation_grad`, `weight_grad` (flushed shares) as replayed with the run's own scaling.
        then: The same with the recommended one; None where that was not replayed.
        scale: The run's loss scale.
        prescription: The change.
        thresholds: What counts as lost, and as harmful.
    """
    error = now["relative_error"]
    severity = severity_of_error(error, thresholds)
    if severity is None or (then is not None and error < thresholds[CLEARLY_BETTER] * then["relative_error"]):
        return None
    if max(now["activation_grad"], now["weight_grad"]) <= thresholds[FLUSHED]:
        return None  # an error without lost elements is rounding, which no scale changes
    return range_finding(
        RULE,
        severity,
        f"at a loss scale of {scale:g}, {now['activation_grad']:.2%} of the activation gradients and "
        f"{now['weight_grad']:.2%} of the weight gradients that are not zero become zero; the weight gradients are "
        f"{error:.2g} away from fp32's (relative L2)",
        cause="grad_underflow",
        evidence={"loss_scale": scale, "now": dict(now), "with_the_change": None if then is None else dict(then)},
        prescription=prescription,
    )


def _severity_of_share(flushed: float, thresholds: Thresholds) -> Severity | None:
    """Of flushed activation gradients, where their effect was not measured."""
    if flushed > thresholds[SHARE_BAD]:
        return "error"
    return "warning" if flushed > thresholds[SHARE_WARNING] else None


def _worse(first: Severity | None, second: Severity | None) -> Severity | None:
    order = ("error", "warning", "note")
    return next((severity for severity in order if severity in (first, second)), None)


def underflow_expected(
    activation: RangeFigures,
    weight: RangeFigures,
    scale: float,
    bf16: RangeFigures,
    thresholds: Thresholds,
    *,
    measured: float | None = None,
) -> Finding | None:
    """AMP301 from histograms, and from shadow steps where there are any: the error of histograms is a lower bound.

    Args:
        activation: Activation gradients in fp16 at the run's loss scale.
        weight: Weight gradients likewise.
        scale: That scale.
        bf16: Activation gradients in bf16.
        thresholds: What counts as lost, and as harmful.
        measured: Relative error of the weight gradients in the shadow steps at this scale; None without any.
    """
    # a normal number is rounded by 2^-11 at most: an error above the note's is that of zeros and of subnormals
    harmful = not weight.overflowed and weight.relative_error > thresholds[ERROR_NOTE]
    if activation.flushed <= thresholds[FLUSHED] and not harmful:
        return None
    if measured is not None and (harmful or activation.flushed > LOSSY):
        severity = severity_of_error(measured, thresholds)
    else:
        known = severity_of_error(weight.relative_error, thresholds) if harmful else None
        severity = _worse(known, _severity_of_share(activation.flushed, thresholds) if measured is None else None)
    return range_finding(
        RULE,
        severity or "note",
        f"in fp16 at a loss scale of {scale:g}, {activation.flushed:.2%} of the activation gradients and "
        f"{weight.flushed:.2%} of the weight gradients that are not zero would become zero "
        f"(bf16: {bf16.flushed:.2%}){_kept_in_part(weight) if harmful else ''}",
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


def _kept_in_part(weight: RangeFigures) -> str:
    return (
        f"; {weight.subnormal:.2%} of the weight gradients keep fewer bits, and rounding leaves these gradients "
        f"{weight.relative_error:.2g} away from what they are (relative L2)"
    )


def underflow(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Severity | None:
    """Gradients are flushed to zero that are not zero in fp32, and it matters; how much, or None.

    Args:
        comparison: Of one step.
        thresholds: What matters (AMP301).
    """
    if comparison.gradient_error <= thresholds[ERROR_WARNING]:
        return None
    many = comparison.zeroed >= thresholds[ZEROED] and comparison.zeroed_share >= LEAST_SHARE
    if comparison.zeroed_share < thresholds[ZEROED_SHARE] and not many:
        return None
    return "error" if comparison.gradient_error > thresholds[ERROR_BAD] else "warning"


def deserves_a_look(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> bool:
    """The gradients depart from fp32 by more than rounding does, or by what is asked for.

    Args:
        comparison: Of one step.
        thresholds: Of underflow (AMP301), whose op the look is to find.
    """
    return not comparison.gradient_error <= min(ERROR_WARNING.default, thresholds[ERROR_WARNING])


def underflow_finding(comparison: Comparison, where: Where, severity: Severity, flushed: float | None) -> Finding:
    """The finding for gradients that underflow.

    Args:
        comparison: Of the step.
        where: The op that flushes, where one was seen.
        severity: From `underflow`.
        flushed: Share of its result that it flushes.
    """
    scale = next((event.scale for event in comparison.events if event.scale is not None), None)
    scaled = "without a loss scale" if scale is None else f"at loss scale {scale:g}"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=severity,
        cause="grad_underflow",
        where=where,
        message=f"step {comparison.step}: {comparison.zeroed:.1%} of the gradient elements that are nonzero in fp32 "
        f"are "
        f"zero here, {scaled}; the gradient is {comparison.gradient_error:.2g} away from fp32's (relative L2)",
        evidence={
            "zeroed_grad_fraction": comparison.zeroed,
            "gradient_error": comparison.gradient_error,
            "zeroed_share_of_error": comparison.zeroed_share,
            "scale": scale,
            "flushed_at_op": flushed,
        },
        help=HELP["grad_underflow"],
    )


def underflow_at(comparison: Comparison, flushes: Sequence[Flush], severity: Severity) -> Finding:
    """At the first op of the backward that flushes most of its result, else at the one that flushes the most."""
    first = next((f for f in flushes if f.fraction > 0.5), None) or max(flushes, key=lambda f: f.fraction)
    return underflow_finding(comparison, first.where, severity, first.fraction)
