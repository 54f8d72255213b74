"""One cause, one finding: harm that stayed finite first, and was not finite some steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.workflows.proving.trials import SHOWN

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding

LEADS_ON = ("scaler_misuse", "forward_overflow", "forward_precision")
"""Causes of harm that stays finite for some steps, and is then not; weights that stand still make no NaN."""


def led_on(earlier: Sequence[Finding], later: Sequence[Finding]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns the earlier findings that may be why, and the later ones that they do not account for.

    Where one change was shown to cure both, they have one cause: the earlier finding tells of the later step.

    Args:
        earlier: What was found in finite steps.
        later: What was found in a step after them.
    """
    first = [finding for finding in earlier if finding.cause in LEADS_ON]
    left = list(later)
    told: list[Finding] = []
    for finding in first:
        same = [one for one in left if _one_cure(finding, one)]
        left = [one for one in left if one not in same]
        then = [{"step": f.where.step, "op": f.where.op, "nonfinite": f.where.nonfinite} for f in same]
        told.append(replace(finding, evidence={**finding.evidence, "then": then}) if then else finding)
    return tuple(told), tuple(left)


def _one_cure(first: Finding, later: Finding) -> bool:
    one, other = first.prescription, later.prescription
    if one is None or other is None or (one.kind, one.value) != (other.kind, other.value):
        return False
    return one.status == other.status and one.status in SHOWN
