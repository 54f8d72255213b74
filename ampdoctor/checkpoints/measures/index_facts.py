"""Counters and tables of positions among a checkpoint's buffers: whole numbers, which a cast to half destroys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint, TensorRef
from ampdoctor.evidence.checkpoint_stats import IndexSummary

MAX_INDICES = 1 << 20
"""Maximum number of elements of an examined table: the longest position tables have about as many."""

_TABLE = "position_ids"
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ENTRIES = frozenset({"num_batches_tracked", _TABLE})


def index_facts(checkpoint: Checkpoint) -> tuple[IndexSummary, ...]:
    """Returns every counter of batches and table of positions, in stored order.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    return tuple(_facts(checkpoint))


def _facts(checkpoint: Checkpoint) -> Iterator[IndexSummary]:
    for ref in checkpoint:
        known = ref.entry in _ENTRIES and ref.role in {"buffer", "ema"}
        if known and 0 < ref.stored.numel <= MAX_INDICES and not ref.dtype.is_complex:
            yield _index(ref)


def _index(ref: TensorRef) -> IndexSummary:
    values = ref.stored.load().to(torch.float64)
    table = ref.entry == _TABLE and values.dim() > 0
    positions = torch.arange(values.shape[-1] if table else 1, dtype=torch.float64)
    displaced = int((values != positions).sum()) if table else 0
    rounded = (
        name for name, dtype in _HALVES.items() if displaced and bool((values == positions.to(dtype).double()).all())
    )
    return IndexSummary(
        name=ref.name,
        entry=ref.entry,
        module=ref.module,
        group=ref.group,
        file=ref.file,
        dtype=str(ref.dtype).removeprefix("torch."),
        shape=ref.shape,
        lowest=float(values.amin()),
        displaced=displaced,
        rounded_as=next(rounded, ""),
    )
