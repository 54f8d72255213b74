"""A checkpoint in numbers: every floating-point tensor read once, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.measures.index_facts import index_facts
from ampdoctor.checkpoints.measures.optimizer_facts import optimizer_facts
from ampdoctor.checkpoints.measures.streaming import stream
from ampdoctor.checkpoints.storage.stored import StoredTensor
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

FULLY_COUNTED = 1 << 20
"""Elements up to which every one is sorted by magnitude. Beyond, an even sample of at least that many is: a share of
1 % then has a standard error of 0.01 %, and the scan reads at memory speed."""
LEAST_SHARE = 1 / 16
"""Share of a tensor that is counted at least, however large it is."""

BULK_QUANTILE = 0.01
"""What lies below may flush in a format with one scale a tensor (numerics: 1 % of the elements is the limit of
harmless underflow for activation gradients, and weights are no more sensitive)."""

Observer = Callable[[str, int, int], None]
"""Told (what is being read, bytes done, bytes in all)."""


@dataclass(slots=True)
class _Facts:
    """What is known of the blocks of one tensor so far."""

    histogram: Histogram
    low: float = math.inf
    high: float = -math.inf
    examined: int = 0
    negatives: int = 0
    at_max: int = 0

    def merge(self, other: _Facts) -> None:
        self.histogram += other.histogram
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.examined += other.examined
        self.negatives += other.negatives
        self.at_max += other.at_max


def summarize(
    checkpoint: Checkpoint, progress: Observer | None = None, *, jobs: int | None = None, exact: bool = False
) -> CheckpointSummary:
    """Read every floating-point tensor once and describe it.

    Args:
        checkpoint: An open checkpoint.
        progress: Told after each block.
        jobs: Threads; None: as many as torch uses.
        exact: Sort every element by magnitude, also of large tensors.

    Raises:
        CheckpointError: Bytes cannot be read, a file changed meanwhile, or there is nothing in it to examine.
    """
    refs = _to_examine(checkpoint)
    total, done = sum(ref.nbytes for ref in refs), 0
    merged: dict[TensorRole, Histogram] = {}
    counted: dict[TensorRole, int] = {}
    found: dict[int, _Facts] = {}  # of the tensors under way only: a histogram takes kilobytes
    tensors: list[TensorSummary] = []

    def finish(index: int) -> None:
        ref, facts = refs[index], found.pop(index, None) or _Facts(Histogram.empty())
        if facts.examined > facts.histogram.numel and facts.low <= facts.high:
            facts.histogram += Histogram.of(torch.tensor([facts.low, facts.high], dtype=_plain(ref.dtype)))
        tensors.append(_describe(ref, facts))
        merged[ref.role] = merged.get(ref.role, Histogram.empty()) + facts.histogram
        counted[ref.role] = counted.get(ref.role, 0) + 1

    def work(index: int, block: torch.Tensor) -> _Facts:
        ref = refs[index]
        return _examine(ref, block, 1.0 if exact else _share(ref.stored.numel))

    current = 0
    blocks = stream(((i, ref.stored) for i, ref in enumerate(refs)), work, jobs=jobs or torch.get_num_threads())
    for index, facts, size in blocks:
        while current < index:
            finish(current)
            current += 1
        found.setdefault(index, _Facts(Histogram.empty())).merge(facts)
        done += size
        if progress is not None:
            progress(refs[index].name, done, total)
    for index in range(current, len(refs)):
        finish(index)
    checkpoint.require_unchanged()
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
        optimizers=optimizer_facts(checkpoint),
        indices=index_facts(checkpoint),
        foreign=checkpoint.foreign,
    )


def _to_examine(checkpoint: Checkpoint) -> list[TensorRef]:
    """Tensors with floating-point elements; a weight that has several names once."""
    seen: set[object] = set()
    refs: list[TensorRef] = []
    for ref in checkpoint:
        if not (ref.dtype.is_floating_point or ref.dtype.is_complex):
            continue
        identity = _identity(ref.stored)
        if ref.role == "weight" and identity in seen:
            continue
        seen.add(identity)
        refs.append(ref)
    return refs


def _share(elements: int) -> float:
    return max(LEAST_SHARE, FULLY_COUNTED / elements) if elements > FULLY_COUNTED else 1.0


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the elements themselves: a complex one has two."""
    return torch.view_as_real(torch.empty((), dtype=dtype)).dtype if dtype.is_complex else dtype


def _examine(ref: TensorRef, block: torch.Tensor, share: float) -> _Facts:
    """What one block tells: its extremes exactly, and the magnitudes of its first elements, as many as `share` says."""
    values = torch.view_as_real(block).flatten() if block.dtype.is_complex else block
    if values.numel() == 0:
        return _Facts(Histogram.empty())
    if values.dtype.itemsize == 1:  # 8-bit formats have no reductions, and few enough values to count them all
        histogram = Histogram.of(values)
        values = values.to(torch.float32)
        low, high = _finite_extremes(values)
    else:
        low, high = (float(v) for v in torch.aminmax(values))
        if math.isfinite(low) and math.isfinite(high):
            histogram = Histogram.of(values[: math.ceil(values.numel() * share)])
        else:
            histogram = Histogram.of(values)
            low, high = _finite_extremes(values)
    largest = torch.finfo(block.dtype).max
    return _Facts(
        histogram=histogram,
        low=low,
        high=high,
        examined=values.numel(),
        negatives=int((values < 0).sum()) if ref.entry in NEVER_NEGATIVE and low < 0 else 0,
        at_max=int((values.abs() == largest).sum()) if largest in {high, -low} else 0,
    )


def _finite_extremes(values: torch.Tensor) -> tuple[float, float]:
    finite = values[values.isfinite()]
    return (float(finite.amin()), float(finite.amax())) if finite.numel() else (math.inf, -math.inf)


def _describe(ref: TensorRef, facts: _Facts) -> TensorSummary:
    histogram = facts.histogram
    signed = ref.entry in NEVER_NEGATIVE and not ref.dtype.is_complex
    castable = ref.role in {"weight", "buffer", "ema"}
    finite = histogram.nans == histogram.pos_infs == histogram.neg_infs == 0
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
        counted=min(histogram.numel, facts.examined),
        zeros=histogram.zeros,
        nans=histogram.nans,
        pos_infs=histogram.pos_infs,
        neg_infs=histogram.neg_infs,
        amax=histogram.amax,
        amin=histogram.amin,
        negatives=facts.negatives if signed else None,
        lowest=facts.low if signed and facts.negatives else None,
        at_max=facts.at_max,
        constant=facts.low if finite and facts.low == facts.high and facts.examined > 1 else None,
        binades=_binades(histogram),
        casts=_casts(histogram, [f for f in CAST_FORMATS if _leaves(histogram, f)]) if castable else (),
    )


def _binades(histogram: Histogram) -> float | None:
    low = histogram.quantile(BULK_QUANTILE)
    return math.log2(histogram.amax) - math.log2(low) if histogram.amax is not None and low is not None else None


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
