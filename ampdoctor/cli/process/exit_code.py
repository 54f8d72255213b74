"""What exit code a report means.

Decided from the report alone, before anything is rendered: the same for every format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdoctor.errors import EXIT_ERROR, EXIT_FINDINGS, EXIT_OK
from ampdoctor.evidence.report import SEVERITIES, Report


@dataclass(frozen=True, slots=True)
class Outcome:
    """An exit code, and a sentence for stderr where the code is not the report's findings."""

    code: int
    reason: str | None = None


def judge(
    report: Report,
    *,
    fail_on: Literal["error", "warning", "never"] = "error",
    exit_zero: bool = False,
    allow_partial: bool = False,
) -> Outcome:
    """Return the exit code of a report.

    The first that holds:

    1. incomplete, and not `allow_partial`: 2. What was not examined may be sick, so neither 0 nor 1 would be true. The
       sentence offers `allow_partial` only where it would give another code.
    2. findings at or above `fail_on`: 1, or 0 with `exit_zero`.
    3. verdict `not_reproduced` or `inconclusive`: 2. The question that was asked has no answer yet; 0 would read as
       "healthy" in a script. `exit_zero` does not lift this: it is about findings.
    4. otherwise 0.
    """
    if not report.complete and not allow_partial:
        parts = f"{len(report.errors)} part{'' if len(report.errors) == 1 else 's'}"
        accepted = _answer(report, fail_on=fail_on, exit_zero=exit_zero)
        offer = "" if accepted.code == EXIT_ERROR else "; --allow-partial accepts that"
        return Outcome(EXIT_ERROR, f"incomplete: {parts} could not be examined{offer}")
    return _answer(report, fail_on=fail_on, exit_zero=exit_zero)


def _answer(report: Report, *, fail_on: Literal["error", "warning", "never"], exit_zero: bool) -> Outcome:
    threshold = () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    if any(finding.severity in threshold for finding in report.findings):
        return Outcome(EXIT_OK if exit_zero else EXIT_FINDINGS)
    if report.verdict == "not_reproduced":
        from ampdoctor.diagnosis.replay.outcome import comparison_left_out

        cut = comparison_left_out(report)
        more = "--max-steps" if "--until-sick" in (report.target.get("options") or {}) else "--steps"
        further = f"more {more} may reach it" if cut is None else f"one that stays finite shows without {cut}"
        return Outcome(EXIT_ERROR, f"not reproduced: the failure did not come back; {further}")
    if report.verdict == "inconclusive":
        return Outcome(EXIT_ERROR, "inconclusive: what was examined does not settle whether the run is healthy")
    return Outcome(EXIT_OK)
