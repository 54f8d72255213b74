"""A finding about a checkpoint and an earlier one of the same training: what these rules share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, TensorChange
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity


def weights_of(change: CheckpointChange) -> list[TensorChange]:
    """The weights that have an element."""
    return [t for t in change.tensors if t.role == "weight" and t.elements]


def change_finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    rule: Rule,
    severity: Severity,
    tensor: TensorChange,
    message: str,
    evidence: dict[str, Any],
    change: CheckpointChange,
    among: Sequence[TensorChange],
    *,
    cause: str | None = None,
) -> Finding:
    """A finding about all of those `among` which `tensor` is the one to show."""
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        message=message,
        where=replace(_place(tensor), global_step=change.new_step),
        also=tuple(_place(other) for other in among if other is not tensor),
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
    )


def _place(tensor: TensorChange) -> Where:
    return Where(
        phase="checkpoint",
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=tensor.address,
        file=tensor.file,
    )


def row_of(tensor: TensorChange) -> dict[str, Any]:
    """What became of it, as JSON values."""
    row: dict[str, Any] = {
        "tensor": tensor.address,
        "dtype": tensor.dtype,
        "unchanged": tensor.unchanged / tensor.elements,
        "relative_change": tensor.relative_change,
    }
    if tensor.reach is not None:
        row |= {"update_rms": tensor.reach.rms, "lands": tensor.reach.lands, "adds_up": tensor.reach.adds_up}
    return row


def elements_of(tensors: Sequence[TensorChange]) -> int:
    """Of all together."""
    return sum(t.elements for t in tensors)
