"""One cause, one finding: of harm that stayed finite first, and of step counters that a checkpoint brought along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.optimizer.step_counters import RULE as COUNTERS
from ampdoctor.diagnosis.replay.scaler_misuse import RULE as MISUSE
from ampdoctor.diagnosis.updates.stuck_state import RULE as STUCK
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


def unproved_while_misused(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings; none has a proved cure while a step's calls on its scaler are out of order.

    What a replay shows of such a loop holds up to the next step that the scaler skips, or scales otherwise.
    """
    broken = next((f for f in findings if f.code == MISUSE.code and _is_of_calls(f)), None)
    return [one if broken is None or _is_of_calls(one) else _unproved(one, broken) for one in findings]


def _is_of_calls(finding: Finding) -> bool:
    return finding.cause == "scaler_misuse" and finding.severity == "error" and finding.where.op != "scaler_state"


def _unproved(finding: Finding, broken: Finding) -> Finding:
    cure = finding.prescription
    if cure is None or not cure.verified:
        return finding
    reason = f"no proof as long as the order of the scaler's calls is broken ({broken.where.op}): mend that first"
    return replace(finding, prescription=replace(cure, status="not_run", reason=reason, proof=None))


def told_once(
    of_state: Sequence[Finding], beside: Sequence[Finding]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns both kinds of findings, with what they say of the same step counters said by one of them.

    The state before step 0 has the first word: it has the length of the updates. Only where a counter stopped in a
    later step, and the state's note says that it will, it is the steps that know.

    Args:
        of_state: What was found in the state before step 0.
        beside: What was found in the steps beside fp32.
    """
    counters = [finding for finding in of_state if finding.code == COUNTERS.code]
    named = {f"optimizer:{where.tensor}.step" for finding in counters for where in (finding.where, *finding.also)}
    same = [finding for finding in beside if finding.code == STUCK.code and _all_of(finding, named)]
    stopped = any(finding.severity != "note" for finding in same)
    untold = counters if stopped and all(finding.severity == "note" for finding in counters) else same
    return tuple(f for f in of_state if f not in untold), tuple(f for f in beside if f not in untold)


def _all_of(finding: Finding, named: set[str]) -> bool:
    """Does the finding speak of these tensors alone? It lists the first of many."""
    return named.issuperset(finding.evidence["tensors"]) and finding.evidence["tensors_count"] <= len(named)
