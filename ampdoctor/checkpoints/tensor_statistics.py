"""Streams a checkpoint's tensors through statistics, block by block, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ampdoctor.checkpoints.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.optimizer_state import optimizer_facts
from ampdoctor.checkpoints.stored_tensor import BLOCK_ELEMENTS, AnyBlock, ReadBuffer, StoredTensor, dtype_name
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import (
    ROLES,
    CastLoss,
    CheckpointSummary,
    IndexSummary,
    RoleSummary,
    TensorRole,
    TensorSummary,
)
from ampdoctor.numerics.counting import count, imap_on_workers
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.numerics.histogram import Histogram

# -- blocks of a tensor: extremes and non-finite values exactly, magnitudes from a sample --

FULLY_COUNTED = 1 << 20
"""Up to this many elements, each is sorted by magnitude. Beyond, a sample of at least about that many is sorted: a
share of 1 % then has a standard error of 0.01 % if the elements are independent, and the scan reads at memory speed."""
MOST_SPARSE = 16
"""At least one element in this many is counted, however large the tensor is."""
RUN = 64
"""Neighbours that are counted together: few enough to spread over a matrix, and enough to fill cache lines."""


@dataclass(slots=True)
class BlockFacts:
    """Facts about the blocks of one tensor so far; all but `histogram` are exact."""

    histogram: Histogram = field(default_factory=Histogram.empty)  # magnitudes of the counted elements
    low: float = math.inf  # smallest finite element
    high: float = -math.inf
    examined: int = 0  # number of all elements
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    negatives: int = 0  # elements below zero; 0 unless asked for
    at_max: int = 0  # elements of the format's largest magnitude

    @property
    def constant(self) -> float | None:
        """The value of every element; None if they differ, are not finite, or if there is only one."""
        whole = self.examined > 1 and not (self.nans or self.pos_infs or self.neg_infs)
        return self.low if whole and self.low == self.high else None

    def merge(self, other: BlockFacts) -> None:
        """Add the facts about another block."""
        self.histogram += other.histogram
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.examined += other.examined
        self.nans += other.nans
        self.pos_infs += other.pos_infs
        self.neg_infs += other.neg_infs
        self.negatives += other.negatives
        self.at_max += other.at_max

    def with_extremes(self, dtype: torch.dtype) -> Histogram:
        """Returns the histogram with the tensor's extremes: a sample may miss the one that overflows in a cast."""
        return self.histogram + self._extremes(dtype)

    def of_all(self, dtype: torch.dtype) -> Histogram:
        """Returns the histogram scaled up as if all elements had been counted."""
        counted = self.histogram.numel
        every = self.histogram.repeated(round(self.examined / counted)) if counted else self.histogram
        return every + self._extremes(dtype)

    def _extremes(self, dtype: torch.dtype) -> Histogram:
        if self.low > self.high or self.histogram.numel >= self.examined:
            return Histogram.empty()
        plain = torch.view_as_real(torch.empty((), dtype=dtype)).dtype if dtype.is_complex else dtype
        return count(torch.tensor([self.low, self.high], dtype=plain))


def one_in_of(elements: int) -> int:
    """Returns the n of "one in n elements is counted" for a tensor of this size."""
    return max(1, min(MOST_SPARSE, elements // FULLY_COUNTED))


def examine(
    blocks: Iterable[tuple[int, torch.Tensor]], one_in: int, tensor: int, *, never_negative: bool = False
) -> BlockFacts:
    """Examine numbered blocks of one tensor; one element in `one_in` is counted, those below 0 if `never_negative`."""
    facts = BlockFacts()
    sampled: list[torch.Tensor] = []
    for number, block in blocks:
        values = torch.view_as_real(block).flatten() if block.dtype.is_complex else block
        if not values.numel():
            continue
        few = values.dtype.itemsize == 1  # values that an 8-bit format has: all elements are counted
        counted = values if few else sample(values, one_in, (tensor, number))
        if counted is values:
            facts.histogram += count(values.cpu())
        else:
            sampled.append(counted.cpu())
        _examine_exactly(values, facts, torch.finfo(block.dtype).max, never_negative=never_negative)
    if sampled:  # counted together: a call takes longer than a block's share of a large tensor
        facts.histogram += count(torch.cat(sampled))
    return facts


def sample(values: torch.Tensor, one_in: int, place: tuple[int, int]) -> torch.Tensor:
    """Returns one of each `one_in` runs of neighbours, pseudo-random, so that no period of the structure matches it."""
    groups = values.numel() // (RUN * one_in)
    if one_in == 1 or groups == 0:
        return values
    seed = (place[0] * 0x9E3779B1 + place[1] * 0x85EBCA77) % (1 << 62)
    chosen = torch.randint(one_in, (groups,), generator=torch.Generator().manual_seed(seed))
    chosen += torch.arange(groups) * one_in
    return values[: groups * one_in * RUN].view(-1, RUN).index_select(0, chosen.to(values.device)).flatten()


def _examine_exactly(values: torch.Tensor, facts: BlockFacts, largest: float, *, never_negative: bool) -> None:
    """Add the exact facts about a block; `largest` is its format's largest number."""
    facts.examined += values.numel()
    if values.dtype.itemsize == 1:  # 8-bit formats lack reductions
        values = values.to(torch.float32)
    low, high = (float(v) for v in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        facts.nans += int(values.isnan().sum())
        facts.pos_infs += int((values == math.inf).sum())
        facts.neg_infs += int((values == -math.inf).sum())
        finite = values[values.isfinite()]
        low, high = (float(finite.amin()), float(finite.amax())) if finite.numel() else (math.inf, -math.inf)
    if largest in {high, -low}:
        facts.at_max += int((values.abs() == largest).sum())
    if never_negative and low < 0:
        facts.negatives += int(((values < 0) & (values > -math.inf)).sum())
    facts.low, facts.high = min(facts.low, low), max(facts.high, high)


# -- reading many tensors once, in bounded memory: one thread waits for bytes while another examines its own --

BATCH_ELEMENTS = 8 * BLOCK_ELEMENTS
"""Elements that a thread takes at a time: threads seldom wait for each other's Python, and all have work."""
BATCH_RUNS = 256
"""Maximum number of runs of small tensors in a batch: the result for each takes kilobytes until the batch is done."""

Key = TypeVar("Key")
Result = TypeVar("Result")
Numbered = Iterator[tuple[int, torch.Tensor]]
"""Blocks of one tensor, each with its number in it, as a 1-D tensor that the next one overwrites."""

_Blocks = list[tuple[int, AnyBlock]]
_Batch = list[tuple[Key, _Blocks]]


def stream(
    tensors: Iterable[tuple[Key, StoredTensor]], work: Callable[[Key, Numbered], Result], *, jobs: int
) -> Iterator[tuple[Key, Result, int]]:
    """Yields (key, `work`'s result, bytes) for each run of a tensor's blocks, in order, by `jobs` threads."""
    local = threading.local()

    def examine(batch: _Batch[Key]) -> list[tuple[Key, Result, int]]:
        if not hasattr(local, "buffer"):
            local.buffer = ReadBuffer()
        return [
            (
                key,
                work(key, ((number, block.read(local.buffer)) for number, block in run)),
                sum(block.nbytes for _, block in run),
            )
            for key, run in batch
        ]

    for results in imap_on_workers(examine, _batches(tensors), jobs):
        yield from results


def _batches(tensors: Iterable[tuple[Key, StoredTensor]]) -> Iterator[_Batch[Key]]:
    """Yields runs in groups of enough work for a thread: small tensors go together, large ones are divided."""
    batch: _Batch[Key] = []
    elements = 0
    for key, tensor in tensors:
        run: _Blocks = []
        for number, block in enumerate(tensor.blocks()):
            if not run:
                batch.append((key, run))
            run.append((number, block))
            elements += block.nbytes // tensor.dtype.itemsize
            if elements >= BATCH_ELEMENTS:
                yield batch
                batch, run, elements = [], [], 0
        if len(batch) >= BATCH_RUNS:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


# -- counters and tables of positions among the buffers: whole numbers, which a cast to half destroys --

MAX_INDICES = 1 << 20
"""Maximum number of elements of an examined table: the longest position tables have about as many."""

_TABLE = "position_ids"
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ENTRIES = frozenset({"num_batches_tracked", _TABLE})


def index_facts(checkpoint: Checkpoint) -> tuple[IndexSummary, ...]:
    """Returns every counter of batches and table of positions, in stored order."""
    known = (ref for ref in checkpoint if ref.entry in _ENTRIES and ref.role in {"buffer", "ema"})
    return tuple(_index(ref) for ref in known if 0 < ref.stored.numel <= MAX_INDICES and not ref.dtype.is_complex)


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
        dtype=dtype_name(ref.dtype),
        shape=ref.shape,
        lowest=float(values.amin()),
        displaced=displaced,
        rounded_as=next(rounded, ""),
    )


CAST_FORMATS = ("fp16", "bf16")
"""Formats that every weight and buffer is measured against."""

NEVER_NEGATIVE = frozenset(
    {"running_var", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "square_avg", "exp_inf", "step"}
)
"""Entries that are sums of squares, maxima of magnitudes or counts: never negative, or their root would be NaN."""

Observer = Callable[[str, int, int], None]
"""Called with (what is being read, bytes done, bytes in all)."""


NOTHING_TO_EXAMINE = "holds no floating-point tensor and no loss scaler: nothing to examine"


def summarize(
    checkpoint: Checkpoint, progress: Observer | None = None, *, jobs: int | None = None, exact: bool = False
) -> CheckpointSummary:
    """Read every floating-point tensor once and describe it.

    `progress` is called after each run of blocks, `jobs` are threads (None: torch's), `exact` sorts every element.
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
    lost = checkpoint.lost or (checkpoint.loss is not None and not math.isfinite(checkpoint.loss))
    examined = any(tensor.examined for tensor in tensors) or checkpoint.scalers or lost
    if not examined:
        raise CheckpointError(f"{checkpoint.path} {NOTHING_TO_EXAMINE}.")
    return CheckpointSummary(
        format=checkpoint.format,
        tensors=tuple(tensors),
        roles=tuple(_role(role, tensors, merged[role]) for role in ROLES if role in merged),
        scalers=checkpoint.scalers,
        global_step=checkpoint.global_step,
        steps=checkpoint.steps,
        loss=checkpoint.loss,
        optimizers=optimizers,
        indices=indices,
        unsafe_globals=checkpoint.unsafe_globals,
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
            identity = ref.stored.identity if ref.stored.numel else object()  # an empty tensor is tied to nothing
            if identity in seen:
                continue
            seen.add(identity)
        refs.append(ref)
    return refs


def _describe(ref: TensorRef, facts: BlockFacts) -> TensorSummary:
    histogram = facts.with_extremes(ref.dtype)
    signed = ref.entry in NEVER_NEGATIVE and not ref.dtype.is_complex
    castable = CAST_FORMATS if ref.role in {"weight", "buffer", "ema"} else ()
    return TensorSummary(
        name=ref.name,
        role=ref.role,
        entry=ref.entry,
        module=ref.module,
        group=ref.group,
        file=ref.file,
        dtype=dtype_name(ref.dtype),
        shape=ref.shape,
        examined=facts.examined,
        counted=facts.histogram.numel,
        zeros=facts.histogram.zeros,
        nan=facts.nans,
        inf=facts.pos_infs + facts.neg_infs,
        neg_infs=facts.neg_infs,
        amax=histogram.amax,
        amin=histogram.amin,
        negatives=facts.negatives if signed else None,
        lowest=facts.low if signed and facts.negatives else None,
        at_max=facts.at_max,
        constant=facts.constant,
        **{loss.format: loss for loss in _casts(histogram, [f for f in castable if _leaves(histogram, f)])},
    )


def _role(role: TensorRole, all_tensors: Sequence[TensorSummary], histogram: Histogram) -> RoleSummary:
    tensors = [tensor for tensor in all_tensors if tensor.role == role]
    return RoleSummary(
        role=role,
        tensors=len(tensors),
        elements=sum(t.examined for t in tensors),
        amax=max((t.amax for t in tensors if t.amax is not None), default=None),
        amin=histogram.amin,
        casts=_casts(histogram, CAST_FORMATS),
    )


def _leaves(histogram: Histogram, name: str) -> bool:
    """Whether values lie outside a format's normal range. Inside it, a cast only rounds."""
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
