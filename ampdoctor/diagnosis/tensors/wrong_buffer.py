"""AMP110: a buffer holds finite values that it cannot have."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import address
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, IndexSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FEW_DISPLACED = Threshold(
    code="AMP110",
    name="displaced",
    default=0.25,
    unit="share",
    why="Share of a table of positions that may be out of place before it is taken for a table of another kind.",
)
RULE = register(
    "AMP110",
    "wrong-buffer",
    "A buffer holds finite values that it cannot have",
    worst="warning",
    commands=SCANNED,
    thresholds=(FEW_DISPLACED,),
    ruins_checkpoint=True,
)


@RULE.judges(CheckpointSummary)
def _wrong_buffer(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    gammas = {(t.file, t.group, t.module): t for t in summary.tensors if t.entry == "weight" and t.module}
    for tensor in summary.tensors:
        if tensor.role not in {"buffer", "ema"} or not tensor.blank or tensor.examined < 2:
            continue
        gamma = gammas.get((tensor.file, tensor.group, tensor.module))
        if tensor.entry == "running_var" and not (gamma is not None and gamma.blank):
            what = f"all {tensor.examined} running variances of {address(tensor)} are 0"
            harm = "in evaluation the layer divides by the root of its epsilon alone"
        elif tensor.entry == "inv_freq":
            what = f"all {tensor.examined} frequencies of {address(tensor)} are 0"
            harm = "every position is rotated by nothing"
        else:
            continue
        yield _buffer(summary, tensor, f"{what[0].upper()}{what[1:]}: {harm}.", {"elements": tensor.examined})
    for table in summary.indices:
        numel = math.prod(table.shape)
        if table.displaced and (table.rounded_as or table.displaced <= thresholds[FEW_DISPLACED] * numel):
            why = f", as a cast to {table.rounded_as} rounds them" if table.rounded_as else ""
            message = (
                f"{table.displaced} of the {numel} positions of {address(table)} are not the number of their place"
                f"{why}: tokens there are given another's position."
            )
            yield _buffer(summary, table, message, {"elements": numel, "displaced": table.displaced})


def _buffer(
    summary: CheckpointSummary, tensor: TensorSummary | IndexSummary, message: str, evidence: dict[str, int]
) -> Finding:
    return checkpoint_finding(
        summary,
        RULE,
        "warning",
        message,
        evidence={"dtype": tensor.dtype, "shape": list(tensor.shape), **evidence},
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=address(tensor),
        file=tensor.file,
        cause="bad_checkpoint",
    )
