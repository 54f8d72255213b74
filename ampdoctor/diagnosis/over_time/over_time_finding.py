"""A finding about a run over time: its rule's name and help filled in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.location import NonFinite, Phase, Where
from ampdoctor.evidence.report import Finding, Severity

First = Literal["data", "forward", "gradient", "optimizer", "scale", "logits", "weights", "hardware"]
"""What moved first."""
TENSOR = "{tensor}"
"""Stands in the message of a rule on tensors where the worst tensor's name belongs."""


def over_time_finding(
    rule: Rule,
    severity: Severity,
    message: str,
    *,
    step: int,
    first: str,
    evidence: Mapping[str, Any],
    phase: Phase = "optimizer",
    tensor: int | None = None,
    also: Iterable[int] = (),
    nonfinite: NonFinite = "none",
) -> Finding:
    """A finding of a rule on steps or tensors.

    Args:
        rule: Whose finding it is.
        severity: How bad it is here.
        message: One sentence with the numbers that matter.
        step: The attempted step at which it was seen.
        first: What moved first, as far as the log tells.
        evidence: The numbers behind it; JSON values.
        phase: As in `Where`.
        tensor: Index of the worst tensor's name; None for a finding about none.
        also: Of the others.
        nonfinite: As in `Where`.
    """

    def place(index: int | None) -> Where:
        return Where(step=step, phase=phase, nonfinite=nonfinite, tensor=None if index is None else str(index))

    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        where=place(tensor),
        also=tuple(place(index) for index in also),
        evidence={"first": first, **evidence},
        help=rule.page.action,
    )


def ahead(steps: float) -> str:
    """Returns a number of steps as a forecast has it: two digits."""
    if not math.isfinite(steps) or steps < 1:
        return "at once"
    digits = max(0, int(math.log10(steps)) - 1)
    return f"in about {int(round(steps, -digits)):,} steps"
