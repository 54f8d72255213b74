"""AMP207: in half precision the run departs from fp32, and no loss scale explains it."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import RECOMMENDED, register
from ampdoctor.diagnosis.ranges.range_finding import range_finding, where_at
from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Threshold, Thresholds
from ampdoctor.evidence.trace import Comparison

DEPARTS = Threshold(
    code="AMP207",
    name="relative_error",
    default=0.1,
    unit="relative L2 error",
    why="Error of the gradients that nothing explains: beyond it runs were seen to fail (as AMP301.error_bad).",
)
WRONG = Threshold(
    code="AMP207",
    name="wrong",
    default=0.5,
    unit="relative L2 error",
    why="And from which it is an error, where each step comes back as it was and rounding the weights moves the "
    "gradients less: half of what the optimizer gets is another gradient. Of bisect-nan.",
)
RULE = register(
    "AMP207",
    "departs-in-half",
    "In half precision the run departs from fp32, and no loss scale explains it",
    worst="error",
    commands=RECOMMENDED,
    thresholds=(DEPARTS, WRONG),
)


def unexplained(
    comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS, *, comes_back: bool = False
) -> Finding | None:
    """The gradients are far from fp32's, and no rule says why.

    A warning, as chaos and hidden state look the same; an error where neither is left.

    Args:
        comparison: Of one step.
        thresholds: How far is far (AMP207).
        comes_back: The step has no hidden state; whoever asks knows how far rounding alone goes.
    """
    if comparison.gradient_error <= thresholds[DEPARTS]:
        return None
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error" if comes_back and comparison.gradient_error > thresholds[WRONG] else "warning",
        where=Where(step=comparison.step, phase="backward"),
        message=f"step {comparison.step}: the gradients are {comparison.gradient_error:.2g} away from fp32's (relative "
        "L2), and nothing that was looked at explains it",
        evidence={
            "gradient_error": comparison.gradient_error,
            "gradient_ratio": comparison.gradient_ratio,
            "loss": comparison.loss,
            "reference_loss": comparison.reference_loss,
        },
        help="Part of the gradient is lost or belongs to another state: check cancellation (a difference of large "
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
    return range_finding(
        RULE,
        "note" if settled else "error" if step is not None else "warning",
        f"in {precision} {harm}, in fp32 the run is fine, and no measured range explains it: {advice}",
        where=where_at(step, phase=_phase_of(nonfinite), nonfinite="none" if step is None else "nan"),
        evidence={"nonfinite": nonfinite, "relative_error": relative_error},
        prescription=prescription,
    )


def _phase_of(nonfinite: str | None) -> Phase:
    kind = (nonfinite or "grad").partition(":")[0]
    return {"loss": "forward", "grad": "backward"}.get(kind, "optimizer")  # type: ignore[return-value]  # a dict of phases
