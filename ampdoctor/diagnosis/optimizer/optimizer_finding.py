"""A finding about an optimizer's saved state: what these rules share.

Values that are not finite are AMP103's affair, clamped ones AMP107's.
"""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, OptimizerSummary
from ampdoctor.evidence.report import Finding, Severity

DIVIDING_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "sum"})
"""Moments whose root divides the update: Adam's, RMSprop's and Adadelta's, Adagrad's."""


def optimizer_finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    optimizer: OptimizerSummary,
    rule: Rule,
    severity: Severity,
    message: str,
    evidence: dict[str, object],
    *,
    op: str = "optimizer_state:param_groups",
    cause: str | None = None,
) -> Finding:
    """A finding about an optimizer as a whole."""
    return checkpoint_finding(
        summary,
        rule,
        severity,
        message,
        evidence={"optimizer": optimizer.path, **evidence},
        phase="optimizer",
        op=op,
        cause=cause,
    )
