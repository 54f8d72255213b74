"""Causes other than the loss scale: `bisect-nan` finds them on the same run if ranges explain nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Finding, Report, Skipped, finding_order
from ampdoctor.workflows.bisect_nan import DEFAULT_STEPS, bisect_nan

if TYPE_CHECKING:
    from ampdoctor.workflows.opening.request import Progress, ReplayRequest, SetAside

SCALING = frozenset({"grad_underflow", "grad_overflow", "scaler_collapse"})
"""Causes that a recommendation derives from ranges and replays itself."""
UNEXPLAINED = frozenset({"AMP206", "AMP207"})
"""Codes of a recommendation's findings if ranges explain nothing."""
_SCALES = frozenset({"init_scale", "scaler"})
HARM = frozenset({"error", "warning"})


def classified(
    request: ReplayRequest, own: Sequence[Finding], steps: int, progress: Progress | None, set_aside: SetAside
) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    """Returns a recommendation's findings, with those of `bisect-nan` for causes other than the scale.

    If the recommendation's own replays were harmed, all of their steps are searched; else the usual few, to find what
    stays finite (lost updates) and a misused scaler.

    Args:
        request: What to replay.
        own: The recommendation's findings.
        steps: Number of steps that it replayed.
        progress: Called after each step.
        set_aside: As for `bisect_nan`.

    Returns:
        The findings, and why there was no search or no complete one.
    """
    wanted = replace(request, steps=steps if is_harmed(own) else searched_steps(steps))

    def decided(report: Report) -> Report:
        return set_aside(replace(report, command="recommend"))  # the user's decisions are per command

    try:
        search = bisect_nan(wanted, progress=progress, set_aside=decided)
    except AmpdoctorError as error:
        return tuple(own), (Skipped(what="search for other causes", reason=str(error)),)
    behind = tuple(one for one in search.skipped if one.kind == "not_replayed")
    return combined(own, search.findings), behind


def searched_steps(steps: int) -> int:
    """Returns how many of the replayed steps are searched where nothing was harmed."""
    return min(steps, DEFAULT_STEPS)


def is_harmed(own: Sequence[Finding]) -> bool:
    """Do a recommendation's findings name harm that is not the loss scale's?"""
    return any(finding.severity in HARM and finding.cause not in SCALING for finding in own)


def combined(own: Sequence[Finding], found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns one finding per cause: the recommendation's own for the scale, else the search's, which names the op.

    A cause in the scale whose change was not shown to cure gives way to another cause that was found. The search's
    finding that gradients depart without a cause (AMP207) is left out if the scale harms them.

    Args:
        own: The recommendation's findings.
        found: The search's findings.
    """
    named = any(finding.severity == "error" and finding.cause not in {None, *SCALING} for finding in found)
    own = [finding for finding in own if not (named and finding.cause in SCALING and not _is_proved(finding))]
    scaling = {finding.cause for finding in own if finding.cause in SCALING}
    harmful = any(finding.cause in SCALING and finding.severity in HARM for finding in own)
    codes = {finding.code for finding in own}
    added = [
        finding
        for finding in found
        if finding.cause not in scaling
        and not (finding.code in codes and finding.code.startswith("AMP4"))
        and not (harmful and finding.code == "AMP207")
        # in the few steps of the search the scaler is still coming down; in the recommendation's replay it has settled
        and not (finding.cause in SCALING and finding.severity != "error")
    ]
    explained = any(finding.severity in HARM for finding in added)
    causes = {finding.cause for finding in added}
    superseded = causes - SCALING
    kept = [f for f in own if f.cause not in superseded and not (explained and f.code in UNEXPLAINED)]
    return tuple(sorted([*kept, *added], key=finding_order))


def _is_proved(finding: Finding) -> bool:
    """Did another scale cure it? A cure by bf16 says nothing about the scale."""
    change = finding.prescription
    return change is not None and change.kind in _SCALES and change.status in ("verified", "intervention")
