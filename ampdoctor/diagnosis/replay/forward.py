"""Rules on a half-precision forward compared with fp32: operations, gradients, stale copies of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ampdoctor.diagnosis.catalogue import RECOMMENDED, REPLAYED, rule, short
from ampdoctor.diagnosis.replay.gradients import listing
from ampdoctor.diagnosis.replay.nonfinite import HELP, at_step
from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_WARNING, Thresholds
from ampdoctor.evidence.trace import Amplified, Comparison, ParameterVsFp32, StepEvent

FORWARD_PRECISION = rule("AMP208", REPLAYED)

SLIGHT = 1e-5
"""Share of the norm of all gradients below which a parameter's own is not judged: where the true gradient is zero (the
bias of a key projection), fp32 computes 1e-7 or less, and the distance from that means nothing."""
CLEARLY_NEARER = 4.0
"""Factor by which a change must reduce the error of the gradients that are far from fp32's: it then explains fifteen
sixteenths of their squared error."""
NOTHING: Mapping[str, float] = MappingProxyType({})


def far_alone(
    comparison: Comparison, thresholds: Thresholds, known: Mapping[str, float] = NOTHING
) -> tuple[ParameterVsFp32, ...]:
    """Returns the parameters with gradients far from fp32's, and farther than `known` by name, the farthest first."""
    least = SLIGHT * comparison.gradient_norm
    far = [
        p for p in comparison.parameters if p.expected > least and error_of(p) > thresholds[FORWARD_PRECISION["alone"]]
    ]
    return tuple(sorted((p for p in far if error_of(p) > known.get(p.name, 0.0)), key=error_of, reverse=True))


def error_of(parameter: ParameterVsFp32) -> float:
    """Returns the relative L2 error of a parameter's gradient; inf where fp32 has none."""
    return parameter.error / parameter.expected if parameter.expected else math.inf


def together(parameters: Sequence[ParameterVsFp32]) -> float:
    """Returns the relative L2 error of several parameters' gradients together."""
    expected = math.hypot(*(p.expected for p in parameters))
    return math.hypot(*(p.error for p in parameters)) / expected if expected else math.inf


def departing_in_forward(amplified: Sequence[Amplified], thresholds: Thresholds) -> tuple[Amplified, ...]:
    """Returns the ops whose results are wrong, in order, one for each op whose rounding causes them."""
    first: dict[object, Amplified] = {}
    for one in amplified:
        if one.error > thresholds[FORWARD_PRECISION["departs"]]:
            first.setdefault((one.source.module, one.source.op, one.source.source), one)
    return tuple(first.values())


def forward_precision_finding(comparison: Comparison, one: Amplified, far: Sequence[ParameterVsFp32]) -> Finding:
    """Makes the finding at the op whose rounding is the cause; `far` are the parameters with wrong gradients."""
    names = [p.name for p in far]
    elsewhere = one.where.module and one.where.module != one.source.module
    ops = one.source.op if one.where == one.source else f"{one.source.op}, seen at {one.where.op}"
    ops = f"{ops} in {one.where.module}" if elsewhere else ops
    whose = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0] if names else "no parameter"
    return FORWARD_PRECISION.finding(
        "error",
        f"{at_step(one.source)}rounding to {short(one.dtype)} (by {one.rounding:.1g}) changes a value by "
        f"{one.error:.0%}. "
        f"The gradient of {whose} is off by {together(far):.0%} (relative L2; {ops}).",
        where=one.source,
        cause="forward_precision",
        evidence={
            "departs": one.error,
            "inputs_depart": one.before,
            "at_op": one.where.op,
            "at_module": one.where.module,
            "rounding": one.rounding,
            "format": one.dtype,
            **listing(names),
            "gradients_depart": together(far),
            "gradient_error": comparison.gradient_error,
        },
        advice=HELP["forward_precision"],
    )


DEPARTS_IN_HALF = rule("AMP207", RECOMMENDED)
GRADIENTS_DEPART = DEPARTS_IN_HALF["relative_error"]


def unexplained(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """Makes a finding for gradients far from fp32's for no known reason: a warning, because chaos looks the same."""
    if comparison.gradient_error <= thresholds[GRADIENTS_DEPART]:
        return None
    return DEPARTS_IN_HALF.finding(
        "error" if comparison.gradient_error > thresholds[DEPARTS_IN_HALF["wrong"]] else "warning",
        f"step {comparison.step}: the gradients are {comparison.gradient_error:.2g} away from fp32's (relative L2); "
        "no known reason explains it",
        where=Where(step=comparison.step, phase="backward"),
        evidence={
            "gradient_error": comparison.gradient_error,
            "gradient_ratio": comparison.gradient_ratio,
            "loss": comparison.loss,
            "reference_loss": comparison.reference_loss,
        },
        advice="Part of the gradient is lost or belongs to another state: check cancellation (a difference of large "
        "numbers), accumulation, and random draws or counters that the replay cannot rewind.",
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
    """Makes the finding of AMP207: `harm` is a clause, `nonfinite` and `step` None where gradients are only far."""
    advice = "the scaler may only not have found its level" if settled else "no loss scale helps"
    phases: dict[str, Phase] = {"loss": "forward", "grad": "backward"}
    phase = phases.get((nonfinite or "grad").partition(":")[0], "optimizer")
    return DEPARTS_IN_HALF.finding(
        "note" if settled else "error" if step is not None else "warning",
        f"in {precision} {harm}; in fp32 the run is fine, and no measured range explains it: {advice}",
        where=Where(step=step, phase=phase, nonfinite="none" if step is None else "nan"),
        evidence={"nonfinite": nonfinite, "relative_error": relative_error},
        prescription=prescription,
    )


STALE_CASTS = rule("AMP210", REPLAYED)
ADVICE = (
    "Enter torch.autocast anew for each forward, and leave it before the weights are written (optimizer.step(), a "
    "swap, an average, a clipping); or call torch.clear_autocast_cache() after each write, or give torch.autocast "
    "cache_enabled=False."
)


@dataclass(frozen=True, slots=True)
class OldCopies:
    """Half copies that a forward read after their weights were written."""

    where: Where  # the write, at the user's line
    writer: str  # what wrote the weights: subject and verb of a sentence
    weight: str  # name of the first weight
    weights: int  # number of weights
    used_at: str  # first forward that read an old copy: "FILE:LINE", else its module; "" if unknown


def may_be_stale(events: Sequence[StepEvent]) -> bool:
    """Returns whether an optimizer steps while autocast keeps its casts, and another update follows in the step."""
    steps = [event for event in events if event.kind == "optimizer_step"]
    return any(event.casts_kept for event in steps[:-1])


def stale_casts_finding(
    step: int,
    error: float,
    anew: float | None,
    old: OldCopies,
    prescription: Prescription | None = None,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Finding | None:
    """Makes the finding for gradients of old weights; `anew` is their error with new copies, None without fp32."""
    if not error > (thresholds[STALE_CASTS["better"]] * anew if anew is not None else 0.0):
        return None
    others = f" and {old.weights - 1} more" if old.weights > 1 else ""
    away = (
        f"{error:.2g} away from those with new copies (relative L2)"
        if anew is None
        else f"{error:.2g} away from fp32's (relative L2), and {anew:.2g} with new copies"
    )
    figures = {"gradient_error": error} | ({} if anew is None else {"gradient_error_with_new_casts": anew})
    return STALE_CASTS.finding(
        _severity(error, thresholds),
        f"step {step}: {old.writer} inside an autocast context ({old.weight}{others}). Later forwards in that "
        f"context use copies of the old weights: the gradients are {away}.",
        where=old.where,
        cause="stale_casts",
        evidence={**figures, "weights": old.weights, "used_at": old.used_at},
        advice=ADVICE,
        prescription=prescription,
    )


def _severity(error: float, thresholds: Thresholds) -> Severity:
    """Returns an error from where runs were seen to fail (AMP207), a warning from where AMP301 warns."""
    if error > thresholds[GRADIENTS_DEPART]:
        return "error"
    return "warning" if error > thresholds[ERROR_WARNING] else "note"
