"""A finding about a checkpoint: its rule's name and help, and the checkpoint's step, filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.location import NonFinite, Phase, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity

NOT_REPLAYED = "A scan reads the file only; bisect-nan --checkpoint replays the run with the change."
"""Why a scan's prescription is not verified."""


def checkpoint_finding(
    summary: CheckpointSummary,
    rule: Rule,
    severity: Severity,
    message: str,
    *,
    evidence: Mapping[str, Any],
    phase: Phase = "checkpoint",
    module: str = "",
    op: str | None = None,
    born: NonFinite = "none",
    tensor: str | None = None,
    file: str | None = None,
    also: Iterable[Where] = (),
    global_step: int | None = None,
    cause: str | None = None,
    prescription: Prescription | None = None,
) -> Finding:
    """A finding of a rule.

    Args:
        summary: The checkpoint.
        rule: Whose finding it is.
        severity: How bad it is here.
        message: One sentence with the numbers that matter.
        evidence: The numbers behind it; JSON values.
        phase: As in `Where`.
        module: As in `Where`.
        op: As in `Where`.
        born: What is non-finite there.
        tensor: As in `Where`.
        file: As in `Where`; "" for none.
        also: As in `Finding`.
        global_step: Where it began in the run; None: the checkpoint's own step.
        cause: As in `Finding`.
        prescription: The change.
    """
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        where=Where(
            phase=phase,
            global_step=summary.global_step if global_step is None else global_step,
            module=module,
            op=op,
            nonfinite=born,
            tensor=tensor,
            file=file or None,
        ),
        also=tuple(also),
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
        prescription=prescription,
    )
