"""Rules on ranges and the loss scale (AMP206, AMP3xx, AMP40x): findings from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.evidence.of_runs.ranges import RangeFigures
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.replay_thresholds import (
    CLEARLY_BETTER,
    ERROR_BAD,
    ERROR_NOTE,
    ERROR_WARNING,
    FLUSHED,
    FP32_SHARE,
    HEADROOM,
    SHARE_BAD,
    SHARE_WARNING,
)
from ampdoctor.evidence.where import NonFinite, Phase, Where

FP16_MAX = 65504.0
LOSSY = 1e-2
"""Share of flushed activation gradients from which weight gradients lose more than their own histogram shows."""


def near_limit(thresholds: Thresholds) -> float:
    """Magnitude from which activations are close to overflow in fp16 (AMP302)."""
    near: float = FP16_MAX / 2.0 ** thresholds[HEADROOM]
    return near


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
    return _finding(
        "AMP301",
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
    harmful = weight.flushed > thresholds[FLUSHED] and not weight.overflowed
    harmless = not harmful or weight.relative_error <= thresholds[ERROR_NOTE]  # a bias that cancels holds but noise
    if activation.flushed <= thresholds[FLUSHED] and harmless:
        return None
    if measured is not None and (harmful or activation.flushed > LOSSY):
        severity = severity_of_error(measured, thresholds)
    else:
        known = severity_of_error(weight.relative_error, thresholds) if harmful else None
        severity = _worse(known, _severity_of_share(activation.flushed, thresholds) if measured is None else None)
    return _finding(
        "AMP301",
        severity or "note",
        f"in fp16 at a loss scale of {scale:g}, {activation.flushed:.2%} of the activation gradients and "
        f"{weight.flushed:.2%} of the weight gradients that are not zero would become zero "
        f"(bf16: {bf16.flushed:.2%})",
        cause="grad_underflow",
        evidence={
            "loss_scale": scale,
            "activation_grad_flushed": activation.flushed,
            "weight_grad_flushed": weight.flushed,
            "weight_grad_relative_error": weight.relative_error,
            "weight_grad_relative_error_measured": measured,
            "bf16_activation_grad_flushed": bf16.flushed,
        },
    )


def forward_range(
    modules: Mapping[str, float], *, broken: str | None, step: int | None, prescription: Prescription | None
) -> Finding:
    """AMP302.

    Args:
        modules: Largest magnitude by module, of those near or beyond the limit.
        broken: What became non-finite in the fp16 replay; None where it stayed finite.
        step: The step where it did.
        prescription: The change.
    """
    worst = max(modules, key=lambda name: (modules[name], name), default="")
    size = f"activations of {worst or 'the model'} reach {modules[worst]:.4g}" if modules else "a value of the forward"
    tail = f", and in fp16 {broken} is not finite at step {step}" if broken is not None else ""
    beyond = " does not fit" if not modules else ""
    return _finding(
        "AMP302",
        "error" if broken is not None else "warning",
        f"{size}{beyond} (fp16 ends at 65504){tail}: no loss scale helps a forward",
        cause="forward_overflow",
        where=_where(step, phase="forward", module=worst, nonfinite="inf" if broken is not None else "none"),
        also=tuple(_where(None, phase="forward", module=name) for name in sorted(modules) if name != worst),
        evidence={"modules": dict(sorted(modules.items())), "limit": FP16_MAX, "nonfinite": broken},
        prescription=prescription,
    )


def departs(
    harm: str,
    *,
    nonfinite: str | None,
    step: int | None,
    relative_error: float | None,
    precision: str,
    prescription: Prescription | None,
    settled: bool = False,
) -> Finding:
    """AMP207.

    Args:
        harm: What is wrong, a clause.
        nonfinite: What is not finite; None where the gradients are only far from fp32's, or a step is skipped.
        step: Where; None for an error over all steps.
        relative_error: Of the weight gradients.
        precision: The run's own.
        prescription: The change.
        settled: Steps after the skipped one are taken: the scaler may only not have found its level.
    """
    advice = "the scaler may only not have found its level" if settled else "no loss scale helps"
    return _finding(
        "AMP207",
        "error" if step is not None and not settled else "warning",
        f"in {precision} {harm}, in fp32 the run is fine, and no measured range explains it: {advice}",
        where=_where(step, phase=_phase_of(nonfinite), nonfinite="none" if step is None else "nan"),
        evidence={"nonfinite": nonfinite, "relative_error": relative_error},
        prescription=prescription,
    )


def dead_scaler(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """AMP401: the scale before the first step, or one that the scaler reaches, has no finite inverse in fp32.

    Args:
        scale: Before the first step.
        prescription: The change.
        reached: That scale is sound; the scaler's settings take it to one that is not.
    """
    falls = f"from {scale:g} the scaler's settings take the loss scale to one that has no finite inverse in fp32"
    return _finding(
        "AMP401",
        "error",
        f"{falls if reached else f'the loss scale of {scale:g} has no finite inverse in fp32'}: a step that is not "
        "skipped writes infinities into the weights",
        cause="scaler_collapse" if reached else "bad_checkpoint",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        evidence={"scale": scale},
        prescription=prescription,
    )


def no_common_scale(
    modules: Sequence[str], share: float, scale: float, prescription: Prescription | None, thresholds: Thresholds
) -> Finding:
    """AMP303: the modules that the best scale misses, and their share of the parameters."""
    return _finding(
        "AMP303",
        "warning" if share > thresholds[FP32_SHARE] else "note",
        f"no single loss scale serves all modules: at {scale:g}, the best, the gradients of {len(modules)} of them "
        f"({share:.1%} of the parameters) lose more than bf16 would",
        where=_where(None, phase="backward", module=modules[0]),
        also=tuple(_where(None, phase="backward", module=name) for name in modules[1:]),
        evidence={"modules": list(modules), "share": share, "loss_scale": scale},
        prescription=prescription,
    )


def scale_too_high(
    scale: float, wanted: float, *, step: int, harmed: str | None, bound_by: str, prescription: Prescription | None
) -> Finding:
    """AMP405.

    Args:
        scale: The run's loss scale at that step.
        wanted: The recommended one.
        step: First step that is harmed, or the last that is skipped.
        harmed: What became non-finite; None where steps are skipped to the end.
        bound_by: The tensor that forbids more.
        prescription: The change.
    """
    what = "the scaler still skips the last step"
    if harmed is not None:
        what = f"{harmed} becomes non-finite, and nothing skips the step"
    return _finding(
        "AMP405",
        "warning" if harmed is None else "error",
        f"at a loss scale of {scale:g} scaled gradients overflow fp16: {what} (step {step}); "
        f"{bound_by} fits up to {wanted:g}",
        cause="grad_overflow",
        where=_where(step, phase="backward", nonfinite="inf"),
        evidence={"loss_scale": scale, "largest_that_fits": wanted, "bound_by": bound_by, "harmed": harmed},
        prescription=prescription,
    )


def no_valid_scale(
    fits: float, *, bound_by: str, stuck: bool, step: int | None, prescription: Prescription | None
) -> Finding:
    """AMP406.

    Args:
        fits: The largest scale without an expected overflow, below 1.
        bound_by: The tensor that forbids more.
        stuck: The replay with the run's own scaling takes no step at its end.
        step: The step that shows it.
        prescription: The change.
    """
    return _finding(
        "AMP406",
        "error" if stuck else "warning",
        f"unscaled gradients are beyond fp16: {bound_by} fits only with a loss scale of {fits:g}",
        cause="scaler_collapse",
        where=_where(step, phase="backward", nonfinite="inf" if stuck else "none"),
        evidence={"largest_that_fits": fits, "bound_by": bound_by},
        prescription=prescription,
    )


def nonfinite_in_fp32(steps: Sequence[int]) -> Finding:
    """AMP206: the fp32 reference itself is not finite at these steps."""
    rule = RULES["AMP206"]
    return _finding(
        "AMP206",
        "error",
        f"step {steps[0]} is not finite in fp32 either (loss, gradients or state): precision is not the cause",
        where=_where(steps[0], phase="backward", nonfinite="nan"),
        evidence={"steps": list(steps)},
        prescription=Prescription(
            kind="code",
            value=rule.page.action,
            status="not_run",
            detail=rule.page.action,
            reason="what to change depends on what makes the value",
        ),
    )


def _phase_of(nonfinite: str | None) -> Phase:
    kind = (nonfinite or "grad").partition(":")[0]
    return {"loss": "forward", "grad": "backward"}.get(kind, "optimizer")  # type: ignore[return-value]  # a dict of phases


def _where(step: int | None, *, phase: Phase = "backward", module: str = "", nonfinite: NonFinite = "none") -> Where:
    return Where(step=step, phase=phase, module=module, nonfinite=nonfinite)


def _finding(
    code: str,
    severity: Severity,
    message: str,
    *,
    cause: str | None = None,
    where: Where | None = None,
    also: tuple[Where, ...] = (),
    evidence: Mapping[str, Any],
    prescription: Prescription | None = None,
) -> Finding:
    rule = RULES[code]
    return Finding(
        code=code,
        name=rule.name,
        severity=severity,
        message=message,
        where=where or _where(0),
        also=also,
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
        prescription=prescription,
    )
