"""Summarises a checkpoint in numbers: every floating-point tensor is read once, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.measures.block_facts import BlockFacts, examine, one_in_of
from ampdoctor.checkpoints.measures.index_facts import index_facts
from ampdoctor.checkpoints.measures.optimizer_facts import optimizer_facts
from ampdoctor.checkpoints.measures.streaming import Numbered, stream
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import (
    ROLES,
    RUN_LOG,
    CastLoss,
    CheckpointSummary,
    RoleSummary,
    TensorRole,
    TensorSummary,
)
from ampdoctor.numerics import FORMATS, Histogram

CAST_FORMATS = ("fp16", "bf16")
"""Formats that every weight and buffer is measured against."""

NEVER_NEGATIVE = frozenset(
    {"running_var", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "square_avg", "exp_inf", "step"}
)
"""Entries that are sums of squares, maxima of magnitudes or counts: never negative, or their root would be NaN."""

BULK_QUANTILE = 0.01
"""Values below this quantile may flush in a format with one scale per tensor (numerics: 1 % of the elements is the
limit of harmless underflow for activation gradients, and weights are no more sensitive)."""

Observer = Callable[[str, int, int], None]
"""Called with (what is being read, bytes done, bytes in all)."""


def summarize(
    checkpoint: Checkpoint, progress: Observer | None = None, *, jobs: int | None = None, exact: bool = False
) -> CheckpointSummary:
    """Read every floating-point tensor once and describe it.

    Args:
        checkpoint: An open checkpoint.
        progress: Called after each run of blocks.
        jobs: Number of threads; None: as many as torch uses.
        exact: Sort every element by magnitude, in large tensors too.

    Raises:
        CheckpointError: Bytes cannot be read, a file changed meanwhile, or it holds nothing to examine.
    """
    refs = _to_examine(checkpoint)
    total, done = sum(ref.nbytes for ref in refs), 0
    merged: dict[TensorRole, Histogram] = {}
    found: dict[int, BlockFacts] = {}  # only of unfinished tensors: a histogram takes kilobytes
    tensors: list[TensorSummary] = []

    def finish(index: int) -> None:
        ref, facts = refs[index], found.pop(index, None) or BlockFacts()
        tensors.append(_describe(ref, facts))
        merged[ref.role] = merged.get(ref.role, Histogram.empty()) + facts.of_all(ref.dtype)

    def work(index: int, blocks: Numbered) -> BlockFacts:
        ref = refs[index]
        one_in = 1 if exact else one_in_of(ref.stored.numel)
        return examine(blocks, one_in, index, never_negative=ref.entry in NEVER_NEGATIVE)

    current = 0
    runs = stream(((i, ref.stored) for i, ref in enumerate(refs)), work, jobs=jobs or torch.get_num_threads())
    for index, facts, size in runs:
        while current < index:
            finish(current)
            current += 1
        found.setdefault(index, BlockFacts()).merge(facts)
        done += size
        if progress is not None:
            progress(refs[index].name, done, total)
    for index in range(current, len(refs)):
        finish(index)
    optimizers, indices = optimizer_facts(checkpoint, tensors), index_facts(checkpoint)
    checkpoint.require_unchanged()
    lost = checkpoint.lost or any(e.loss is not None and not math.isfinite(e.loss) for e in checkpoint.log)
    examined = any(tensor.examined for tensor in tensors) or checkpoint.scalers or lost
    if not examined and not (checkpoint.format == RUN_LOG and checkpoint.log):
        raise CheckpointError(
            f"{checkpoint.path} holds no floating-point tensor and no loss scaler: nothing to examine."
        )
    return CheckpointSummary(
        format=checkpoint.format,
        tensors=tuple(tensors),
        roles=tuple(_role(role, tensors, merged[role]) for role in ROLES if role in merged),
        scalers=checkpoint.scalers,
        global_step=checkpoint.global_step,
        log=checkpoint.log,
        optimizers=optimizers,
        indices=indices,
        foreign=checkpoint.foreign,
        lost=checkpoint.lost,
    )


def _to_examine(checkpoint: Checkpoint) -> list[TensorRef]:
    """Returns tensors with floating-point elements; a weight with several names once."""
    seen: set[object] = set()
    refs: list[TensorRef] = []
    for ref in checkpoint:
        if not (ref.dtype.is_floating_point or ref.dtype.is_complex):
            continue
        if ref.role == "weight":
            identity = _identity(ref.stored)
            if identity in seen:
                continue
            seen.add(identity)
        refs.append(ref)
    return refs


def _describe(ref: TensorRef, facts: BlockFacts) -> TensorSummary:
    histogram = facts.with_extremes(ref.dtype)
    signed = ref.entry in NEVER_NEGATIVE and not ref.dtype.is_complex
    castable = ref.role in {"weight", "buffer", "ema"}
    return TensorSummary(
        name=ref.name,
        role=ref.role,
        entry=ref.entry,
        module=ref.module,
        group=ref.group,
        file=ref.file,
        dtype=str(ref.dtype).removeprefix("torch."),
        shape=ref.shape,
        examined=facts.examined,
        counted=facts.histogram.numel,
        zeros=facts.histogram.zeros,
        nans=facts.nans,
        pos_infs=facts.pos_infs,
        neg_infs=facts.neg_infs,
        amax=histogram.amax,
        amin=histogram.amin,
        negatives=facts.negatives if signed else None,
        lowest=facts.low if signed and facts.negatives else None,
        at_max=facts.at_max,
        constant=facts.constant,
        binades=_binades(histogram),
        casts=_casts(histogram, [f for f in CAST_FORMATS if _leaves(histogram, f)]) if castable else (),
    )


def _binades(histogram: Histogram) -> float | None:
    low = histogram.quantile(BULK_QUANTILE)
    return math.log2(histogram.amax) - math.log2(low) if histogram.amax is not None and low is not None else None


def _identity(stored: StoredTensor) -> object:
    """Returns a key that is equal for tied weights; an empty tensor is tied to nothing."""
    return stored.identity if stored.numel else object()


def _role(role: TensorRole, all_tensors: Sequence[TensorSummary], histogram: Histogram) -> RoleSummary:
    tensors = [tensor for tensor in all_tensors if tensor.role == role]
    amax = max((t.amax for t in tensors if t.amax is not None), default=None)
    return RoleSummary(
        role=role,
        tensors=len(tensors),
        elements=sum(t.examined for t in tensors),
        amax=amax,
        amin=histogram.amin,
        casts=_casts(histogram, CAST_FORMATS),
    )


def _leaves(histogram: Histogram, name: str) -> bool:
    """Do values lie outside a format's normal range? Inside it, a cast only rounds."""
    if histogram.amax is None or histogram.amin is None:
        return False
    return histogram.amin < FORMATS[name].min_normal or histogram.amax > FORMATS[name].max


def _casts(histogram: Histogram, formats: Sequence[str]) -> tuple[CastLoss, ...]:
    return tuple(
        CastLoss(
            format=name,
            flushed=histogram.flushed(name),
            subnormal=histogram.subnormal(name),
            overflowed=histogram.overflowed(name),
            relative_error=histogram.relative_error(name),
            headroom=None if histogram.amax is None else histogram.headroom(name),
        )
        for name in formats
    )
