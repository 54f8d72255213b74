"""The section `proof` of a report: the replayed steps without and with a change, beside fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.evidence.of_runs.proof import Proof, ReplayedStep
from ampdoctor.evidence.report.bisection import ProofSection, ProofStep, StepFigures
from ampdoctor.numerics.tensors import blocks, squares

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StepOutcome
    from ampdoctor.evidence.report import Finding, Prescription
    from ampdoctor.probes.cheap.gradients import Gradients

STEPS_BEFORE = 3
"""Number of steps without the change that are shown before the first with it: they show how the run failed."""
MOST_STEPS = 200
"""Maximum number of steps that are shown; of a longer replay, the first and the last half."""


_SETTINGS = ("init_scale", "scaler")
"""Changes of what the scaler goes on from: one step shows what the scale does to it, and not where the scale goes."""
_ONE_STEP = (
    "beyond this step, which is finite with it: where the scaler's growth and backoff take the scale from there is not "
    "known"
)


def replayed(outcome: StepOutcome, sinks: Sequence[str], gradients: Gradients | None = None) -> ReplayedStep:
    """Returns one step in the numbers that a proof shows.

    Args:
        outcome: The step's outcome.
        sinks: The step's non-finite values.
        gradients: The gradients that the optimizer got; None if they were not recorded.
    """
    return ReplayedStep(
        step=outcome.step,
        loss=outcome.loss,
        scale=outcome.scale_before,
        gradient_norm=_norm(gradients) if gradients else None,
        skipped=outcome.skipped,
        finite=not sinks,
    )


def as_far_as_replayed(finding: Finding) -> Finding:
    """Returns the finding; a scaler's setting with which nothing but one step was replayed is not verified."""
    change = finding.prescription
    if change is None or not change.verified or change.kind not in _SETTINGS or change.proof is None:
        return finding
    if len(change.proof.changed) > 1:
        return finding
    return replace(finding, prescription=replace(change, status="not_run", reason=_ONE_STEP))


def proof_of(findings: Sequence[Finding]) -> ProofSection | None:
    """Returns the section for the first finding whose change was replayed; None if there is no such finding."""
    for finding in findings:
        change = finding.prescription
        if change is not None and change.proof is not None and change.proof.changed:
            return proof_section(change, change.proof, finding.fingerprint)
    return None


def proof_section(change: Prescription, proof: Proof, fingerprint: str = "") -> ProofSection:
    """Returns the section for one change.

    Args:
        change: The change.
        proof: The result of its replay.
        fingerprint: Fingerprint of the finding that it cures; "" if there is none.
    """
    without, changed, fp32 = ({row.step: row for row in rows} for rows in (proof.without, proof.changed, proof.fp32))
    first, last = min(changed, default=0), max(changed, default=0)
    known = sorted(without.keys() | changed.keys() | fp32.keys())
    steps = [step for step in known if first - STEPS_BEFORE <= step <= last]
    half = MOST_STEPS // 2
    shown = [*steps[:half], *steps[-half:]] if len(steps) > MOST_STEPS else steps
    return ProofSection(
        fingerprint=fingerprint,
        kind=change.kind,
        value=change.value,
        status=change.status,
        steps=tuple(
            ProofStep(
                step=step,
                without=_numbers(without.get(step)),
                with_=_numbers(changed.get(step)),
                fp32=_numbers(fp32.get(step)),
            )
            for step in shown
        ),
        omitted=len(steps) - len(shown),
    )


def _numbers(row: ReplayedStep | None) -> StepFigures | None:
    if row is None:
        return None
    return StepFigures(
        loss=row.loss, scale=row.scale, gradient_norm=row.gradient_norm, skipped=row.skipped, finite=row.finite
    )


def _norm(gradients: Gradients) -> float:
    return math.sqrt(math.fsum(squares(block) for gradient in gradients.values() for block in blocks(gradient)))
