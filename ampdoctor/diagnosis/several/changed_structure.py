"""AMP714: the two checkpoints do not hold the same tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, TensorChange
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP714", "changed-structure", "The two checkpoints do not hold the same tensors", worst="note", commands=SCANNED
)


@RULE.judges(CheckpointChange)
def _changed_structure(change: CheckpointChange, _: Thresholds) -> Iterator[Finding]:
    retyped = {t.address: (t.old_dtype, t.dtype) for t in change.tensors if t.dtype != t.old_dtype and _named(t)}
    parts = [
        (("is", "are"), "gone", change.vanished),
        (("is", "are"), "new", change.appeared),
        (("has", "have"), "another shape", tuple(change.reshaped)),
        (("has", "have"), "another dtype", tuple(retyped)),
    ]
    said = [
        f"{len(names)} {verbs[len(names) > 1]} {what} ({names[0]}{' first' if len(names) > 1 else ''})"
        for verbs, what, names in parts
        if names
    ]
    if not said:
        return
    first, *others = (name for _, _, names in parts for name in names)
    yield Finding(
        code=RULE.code,
        name=RULE.name,
        severity="note",
        message=f"Of the weights and buffers, {'; '.join(said)}, compared with {change.old}.",
        where=Where(phase="checkpoint", global_step=change.new_step, tensor=first),
        also=tuple(Where(phase="checkpoint", tensor=name) for name in others),
        evidence={
            "vanished": change.vanished[:MAX_LISTED],
            "appeared": change.appeared[:MAX_LISTED],
            "reshaped": {name: list(map(list, shapes)) for name, shapes in list(change.reshaped.items())[:MAX_LISTED]},
            "retyped": dict(list(retyped.items())[:MAX_LISTED]),
        },
        help=RULE.page.action,
    )


def _named(tensor: TensorChange) -> bool:
    return tensor.role in {"weight", "buffer", "ema"}
