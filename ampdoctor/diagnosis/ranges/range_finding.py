"""A finding from ranges and loss scales: what these rules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.location import NonFinite, Phase, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity


def where_at(step: int | None, *, phase: Phase = "backward", module: str = "", nonfinite: NonFinite = "none") -> Where:
    """The address of a step or of a module."""
    return Where(step=step, phase=phase, module=module, nonfinite=nonfinite)


def range_finding(
    rule: Rule,
    severity: Severity,
    message: str,
    *,
    cause: str | None = None,
    where: Where | None = None,
    also: tuple[Where, ...] = (),
    evidence: Mapping[str, Any],
    prescription: Prescription | None = None,
) -> Finding:
    """A finding at step 0 where it is not said where."""
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        where=where or where_at(0),
        also=also,
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
        prescription=prescription,
    )
