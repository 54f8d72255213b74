"""A checkpoint in numbers: every floating-point tensor read once, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ampdoctor.checkpoints.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.stored import StoredTensor
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint import (
    ROLES,
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
"""Entries that are sums of squares, maxima of magnitudes or counts: below zero is impossible, and its root is NaN."""

_LARGEST_BY_DTYPE = {fmt.dtype: fmt.max for fmt in FORMATS.values() if fmt.dtype is not None}


Observer = Callable[[str, int, int], None]
"""Told (what comes next, bytes done, bytes in all)."""


def summarize(checkpoint: Checkpoint, progress: Observer | None = None) -> CheckpointSummary:
    """Read every floating-point tensor once and describe it.

    Args:
        checkpoint: An open checkpoint.
        progress: Told before each tensor and at the end.

    Raises:
        CheckpointError: Bytes cannot be read, a file changed meanwhile, or there is nothing in it to examine.
    """
    total, done = checkpoint.total_bytes, 0
    tensors: list[TensorSummary] = []
    merged: dict[TensorRole, Histogram] = {}
    counted: dict[TensorRole, int] = {}
    seen: set[object] = set()
    for ref in checkpoint:
        if progress is not None:
            progress(f"bytes up to {ref.name}", done, total)
        done += ref.nbytes
        tied = ref.role == "weight" and _identity(ref.stored) in seen
        if tied or not (ref.dtype.is_floating_point or ref.dtype.is_complex):
            continue
        seen.add(_identity(ref.stored))
        tensor, histogram = describe_tensor(ref)
        tensors.append(tensor)
        merged[ref.role] = merged.get(ref.role, Histogram.empty()) + histogram
        counted[ref.role] = counted.get(ref.role, 0) + 1
    checkpoint.require_unchanged()
    if progress is not None:
        progress("bytes", total, total)
    if not any(tensor.examined for tensor in tensors) and not checkpoint.scalers:
        raise CheckpointError(
            f"{checkpoint.path} holds no floating-point tensor and no loss scaler: nothing to examine."
        )
    return CheckpointSummary(
        format=checkpoint.format,
        tensors=tuple(tensors),
        roles=tuple(_role(role, counted[role], merged[role]) for role in ROLES if role in merged),
        scalers=checkpoint.scalers,
        global_step=checkpoint.global_step,
        log=checkpoint.log,
    )


def describe_tensor(ref: TensorRef) -> tuple[TensorSummary, Histogram]:
    """One tensor's numbers, and the histogram that they come from.

    Raises:
        CheckpointError: Its bytes cannot be read.
    """
    histogram = Histogram.empty()
    signed = ref.entry in NEVER_NEGATIVE and not ref.dtype.is_complex
    negatives, lowest = 0, math.inf
    for chunk in ref.stored.chunks():
        histogram += Histogram.of(chunk)
        if signed:
            count, least = _below_zero(chunk)
            negatives, lowest = negatives + count, min(lowest, least)
    name = str(ref.dtype).removeprefix("torch.")
    castable = ref.role in {"weight", "buffer", "ema"}
    summary = TensorSummary(
        name=ref.name,
        role=ref.role,
        entry=ref.entry,
        module=ref.module,
        group=ref.group,
        file=ref.file,
        dtype=name,
        shape=ref.shape,
        examined=histogram.numel,
        counted=histogram.numel,
        zeros=histogram.zeros,
        nans=histogram.nans,
        pos_infs=histogram.pos_infs,
        neg_infs=histogram.neg_infs,
        amax=histogram.amax,
        amin=histogram.amin,
        negatives=negatives if signed else None,
        lowest=lowest if negatives else None,
        at_max=_count_at(ref, _LARGEST_BY_DTYPE.get(name), histogram),
        casts=_casts(histogram, [f for f in CAST_FORMATS if _leaves(histogram, f)]) if castable else (),
    )
    return summary, histogram


def _identity(stored: StoredTensor) -> object:
    """Equal for tied weights; an empty tensor is tied to nothing."""
    return stored.identity if stored.numel else object()


def _role(role: TensorRole, tensors: int, histogram: Histogram) -> RoleSummary:
    return RoleSummary(
        role=role,
        tensors=tensors,
        elements=histogram.numel,
        amax=histogram.amax,
        amin=histogram.amin,
        casts=_casts(histogram, CAST_FORMATS),
    )


def _leaves(histogram: Histogram, name: str) -> bool:
    """Whether values lie outside a format's normal range; inside it a cast only rounds."""
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


def _below_zero(chunk: torch.Tensor) -> tuple[int, float]:
    """Number of negative elements and the least of them; one fast reduction where there are none."""
    values = chunk if chunk.dtype.itemsize > 1 else chunk.to(torch.float32)  # 8-bit formats have no reductions
    least = values.amin()
    if bool(least >= 0):  # False for NaN: then the negatives are counted apart
        return 0, math.inf
    negative = values[values < 0]
    return negative.numel(), float(negative.amin()) if negative.numel() else math.inf


def _count_at(ref: TensorRef, largest: float | None, histogram: Histogram) -> int:
    """Elements exactly at the dtype's largest magnitude; read again only where the extremes say that there is one."""
    if largest is None or histogram.amax != largest or ref.dtype.is_complex:
        return 0
    count = 0
    for chunk in ref.stored.chunks():
        values = chunk if chunk.dtype.itemsize > 1 else chunk.to(torch.float32)
        count += int((values.abs() == largest).sum())
    return count
