"""What is not the loss scale's doing: `bisect-nan` on the same run finds it where ranges explain nothing."""

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
"""Causes that a recommendation derives from ranges, and replays itself."""
UNEXPLAINED = frozenset({"AMP206", "AMP207"})
"""What a recommendation says where ranges explain nothing."""
_SCALES = frozenset({"init_scale", "scaler"})
HARM = frozenset({"error", "warning"})


def classified(
    request: ReplayRequest, own: Sequence[Finding], steps: int, progress: Progress | None, set_aside: SetAside
) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    """The findings of a recommendation, with those of `bisect-nan` for what is no matter of scale.

    Where the recommendation's own replays were harmed, all of their steps are searched; else the usual few, for what
    stays finite (updates that are lost) and for a misused scaler.

    Args:
        request: What to replay.
        own: The recommendation's findings.
        steps: Steps that it replayed.
        progress: Told after each step.
        set_aside: As for `bisect_nan`.

    Returns:
        The findings, and why there was no search, or none to the end.
    """
    harmed = any(finding.severity in HARM and finding.cause not in SCALING for finding in own)
    wanted = replace(request, steps=steps if harmed else min(steps, DEFAULT_STEPS))

    def decided(report: Report) -> Report:
        return set_aside(replace(report, command="recommend"))  # what is decided holds for one command

    try:
        search = bisect_nan(wanted, progress=progress, set_aside=decided)
    except AmpdoctorError as error:
        return tuple(own), (Skipped(what="search for other causes", reason=str(error)),)
    behind = tuple(one for one in search.skipped if one.kind == "not_replayed")
    return combined(own, search.findings), behind


def combined(own: Sequence[Finding], found: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding a cause: a recommendation's own for what a scale does, else that of the search, which names the op.

    What a scale is said to do without a change that was shown to cure it gives way to a cause that was found. A search
    that finds no cause for gradients that depart (AMP207) is not asked where the scale harms them.

    Args:
        own: Of the recommendation.
        found: Of the search.
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
        # a scaler that is on its way down in the few steps of the search has arrived in the recommendation's replay
        and not (finding.cause in SCALING and finding.severity != "error")
    ]
    explained = any(finding.severity in HARM for finding in added)
    causes = {finding.cause for finding in added}
    superseded = causes - SCALING
    kept = [f for f in own if f.cause not in superseded and not (explained and f.code in UNEXPLAINED)]
    return tuple(sorted([*kept, *added], key=finding_order))


def _is_proved(finding: Finding) -> bool:
    """Did another scale cure it? That bf16 does says nothing of the scale."""
    change = finding.prescription
    return change is not None and change.kind in _SCALES and change.status in ("verified", "intervention")
