"""AMP112: the model's weights are not in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import address, listed, state_place
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LEAST_ELEMENTS = Threshold(
    code="AMP112",
    name="elements",
    default=1024,
    unit="elements",
    lowest=1,
    highest=1_000_000_000,
    why="Elements below which a model of zeros is taken for somebody's example.",
)
RULE = register(
    "AMP112",
    "empty-model",
    "The model's weights are not in the file",
    worst="error",
    commands=SCANNED,
    thresholds=(LEAST_ELEMENTS,),
)

_ENGINE_FILE = re.compile(r"(^|/)(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")
"""DeepSpeed's own file of a rank: with ZeRO-3 its weights lie in pieces in the optimizer's files (AMP112)."""


@RULE.judges(CheckpointSummary)
def _empty_model(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    hollow = [t for t in weights if 0 in t.shape and not _ENGINE_FILE.search(t.file)]
    matrices = [t for t in weights if len(t.shape) >= 2 and t.examined]
    elements = sum(t.examined for t in matrices)
    if len(hollow) >= 2 and 2 * len(hollow) >= len(weights):
        message = (
            f"{len(hollow)} of {len(weights)} weights have no element, {address(hollow[0])} first: they were saved "
            "without having been gathered from the processes that hold them."
        )
        shown = hollow
    elif len(matrices) >= 2 and all(t.blank for t in matrices) and elements >= thresholds[LEAST_ELEMENTS]:
        message = f"All {len(matrices)} matrices of the model are exactly zero, {address(matrices[0])} first."
        shown = matrices
    else:
        return
    worst = shown[0]
    yield checkpoint_finding(
        summary,
        RULE,
        "error",
        message,
        evidence={"tensors": len(shown), "weights": len(weights), "listed": listed(shown)},
        module=worst.module,
        op=f"state:{worst.entry}",
        tensor=address(worst),
        file=worst.file,
        also=map(state_place, shown[1:]),
        cause="bad_checkpoint",
    )
