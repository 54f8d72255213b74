"""`profile`: what half precision would lose, place by place, along an fp32 reference of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampdoctor.diagnosis.range_rules import nonfinite_in_fp32, underflow_expected
from ampdoctor.evidence.report import Check, Finding, Report, finding_order, verdict_of
from ampdoctor.scaling.measured import GRADIENTS, Measured, figures
from ampdoctor.workflows.measuring import measure
from ampdoctor.workflows.range_section import profile_section
from ampdoctor.workflows.replaying import open_replay

if TYPE_CHECKING:
    from ampdoctor.workflows.request import Progress, ReplayRequest


def profile(request: ReplayRequest, *, progress: Progress | None = None) -> Report:
    """Measure gradients, activations and weights over the steps of a run.

    Args:
        request: What to replay; `steps` defaults to 50, or as many as there are batches.
        progress: Told after each step.

    Returns:
        The report; its `profile` section is what `recommend` reads. Findings are notes and warnings, but for a run that
        is not finite in fp32.

    Raises:
        AmpdoctorError: The run cannot be replayed, in one sentence.
    """
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        try:
            taken = measure(session, start, request.steps, progress)
        finally:
            session.close()
        replay.notes.extend(taken.notes)
        run = replay.described(session, taken.ranges.steps)
        target = {"factory": replay.factory.name, "checkpoint": request.checkpoint}
    measured = Measured(taken.ranges)
    findings = tuple(sorted(range_findings(measured), key=finding_order))
    return Report(
        command="profile",
        target=target,
        run={**run, "notes": list(dict.fromkeys(replay.notes))},
        verdict=verdict_of(findings, expect_failure=request.expect_failure),
        findings=findings,
        checks=range_checks(measured),
        profile=profile_section(measured),
    )


def range_findings(measured: Measured) -> list[Finding]:
    """What the ranges alone say of an fp16 run; of a bf16 or fp32 run only whether it is finite."""
    ranges = measured.profile
    if ranges.nonfinite_steps:
        return [nonfinite_in_fp32(ranges.nonfinite_steps)]
    if ranges.precision != "fp16":
        return []
    activation, weight = (
        figures(measured.merged(kind), "fp16", measured.factor(kind, ranges.loss_scale)) for kind in GRADIENTS
    )
    bf16 = figures(measured.merged("activation_grad"), "bf16", measured.factor("activation_grad", 1.0))
    found = underflow_expected(activation, weight, ranges.loss_scale, bf16)
    return [] if found is None else [found]


def range_checks(measured: Measured) -> tuple[Check, ...]:
    """The headline: the share of gradients that flush in fp16, at the run's scale and without one, against bf16."""
    ranges = measured.profile
    checks = [
        Check(
            name="gradients finite in fp32",
            result="found" if ranges.nonfinite_steps else "ok",
            headroom={"steps": ranges.steps},
        )
    ]
    for kind in GRADIENTS:
        histogram = measured.merged(kind)
        numel = histogram.numel
        checks.append(
            Check(
                name=f"{kind.replace('_', ' ')} underflow, fp16 against bf16",
                result="measured" if numel else "no such gradient is half",
                headroom={
                    "fp16": histogram.flushed("fp16", measured.factor(kind, ranges.loss_scale)),
                    "fp16_unscaled": histogram.flushed("fp16", measured.factor(kind, 1.0)),
                    "bf16": histogram.flushed("bf16", measured.factor(kind, 1.0)),
                    "loss_scale": ranges.loss_scale,
                    "true_zeros": histogram.zeros / numel if numel else 0.0,
                },
            )
        )
    return tuple(checks)
