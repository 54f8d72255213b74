"""Facts in an optimizer's saved state besides the values of moments: settings, step counters, lost moments."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.contents.scalers import number
from ampdoctor.checkpoints.measures.difference import side_by_side
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import OptimizerGroup, OptimizerSummary, StarvedMoment, TensorSummary

SECOND_MOMENTS = {"exp_avg_sq": "exp_avg"}
"""Second moment -> the first moment that its root divides. AMSGrad divides by a maximum, whose lower bound it is."""

_FLUSHING = frozenset(
    {torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""Formats in which the square of an ordinary gradient becomes zero. bf16 and wider flush squares of gradients below
2^-62, too small for any epsilon to notice: larger ones are zero there only after a conversion."""


def optimizer_facts(checkpoint: Checkpoint, tensors: Sequence[TensorSummary]) -> tuple[OptimizerSummary, ...]:
    """Returns every optimizer of a checkpoint in numbers, in stored order.

    Second moments in a 16- or 8-bit format with too few exponents are read, and the first moments beside them; in a
    wider format only those that hold zeros, in an optimizer that keeps nothing but these two for each element.
    Otherwise only single numbers are read.

    Args:
        checkpoint: An open checkpoint.
        tensors: Its tensors in numbers.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    zeros = {(t.file, t.group, t.name, t.entry) for t in tensors if t.role == "moment" and t.zeros}
    starved = tuple(_starved(checkpoint, zeros))
    found = [_summary(path, state) for path, state in checkpoint.optimizers().items()]
    if len(found) == 1:
        return (dataclasses.replace(found[0], starved=starved),)
    return tuple(
        dataclasses.replace(one, starved=tuple(m for m in starved if one.path in {m.group, f"{m.file}:{m.group}"}))
        for one in found
    )


def _summary(path: str, optimizer: Mapping[str, Any]) -> OptimizerSummary:
    groups = [group for group in optimizer["param_groups"] if isinstance(group, Mapping)]
    counters = [
        state["step"] for state in optimizer["state"].values() if isinstance(state, Mapping) and "step" in state
    ]
    counters += [group["step"] for group in groups if "step" in group]
    steps = [step for counter in counters if (step := number(counter)) is not None and math.isfinite(step)]
    dtypes = {_dtype(counter) for counter in counters if isinstance(counter, StoredTensor)}
    return OptimizerSummary(
        path=path,
        groups=tuple(_group(group) for group in groups),
        steps=tuple(sorted(Counter(steps).items())),
        step_dtypes=tuple(sorted(dtypes)),
    )


def _group(group: Mapping[str, Any]) -> OptimizerGroup:
    betas, params = group.get("betas"), group.get("params")
    rates = [number(beta) for beta in betas] if isinstance(betas, list | tuple) else []
    return OptimizerGroup(
        learning_rate=number(group.get("lr")),
        betas=tuple(rate for rate in rates if rate is not None),
        epsilon=number(group.get("eps")),
        weight_decay=number(group.get("weight_decay")),
        fused=group.get("fused") is True,
        capturable=group.get("capturable") is True,
        parameters=len(params) if isinstance(params, list | tuple) else 0,
    )


def _starved(checkpoint: Checkpoint, zeros: Collection[tuple[str, str, str, str]]) -> Iterator[StarvedMoment]:
    moments = [ref for ref in checkpoint if ref.role == "moment"]
    firsts = {(ref.file, ref.group, ref.name, ref.entry): ref for ref in moments}
    kept = Counter((ref.file, ref.group, ref.name) for ref in moments)
    for second in moments:
        owner = second.file, second.group, second.name
        beside = firsts.get((*owner, SECOND_MOMENTS.get(second.entry, "")))
        if beside is None or beside.shape != second.shape:
            continue
        if second.dtype not in _FLUSHING:
            # a third state may be a maximum that divides in place of this, or say that this has another basis (SOAP)
            if kept[owner] > len((second, beside)):
                continue
            if (*owner, second.entry) not in zeros:
                yield _described(second, starved=0, examined=second.stored.numel, largest=0.0)
                continue
        with suppress(LimitExceededError):  # different orders, and too large to be loaded: not judged
            yield _compare(second, beside)


def _compare(second: TensorRef, first: TensorRef) -> StarvedMoment:
    """Returns counts over both, read side by side."""
    starved = examined = 0
    largest = 0.0
    for squares, means in side_by_side(second.stored, first.stored):
        values = means.to(torch.float32)
        wide = squares if squares.dtype == torch.float64 else squares.to(torch.float32)
        lost = values[(wide == 0) & (values != 0)].abs()
        examined += values.numel()
        starved += lost.numel()
        if lost.numel():
            largest = max(largest, float(lost.nan_to_num(0.0, 0.0, 0.0).amax()))
    return _described(second, starved=starved, examined=examined, largest=largest)


def _described(second: TensorRef, *, starved: int, examined: int, largest: float) -> StarvedMoment:
    return StarvedMoment(
        name=second.name,
        module=second.module,
        group=second.group,
        file=second.file,
        entry=second.entry,
        dtype=_dtype(second.stored),
        starved=starved,
        examined=examined,
        largest=largest,
    )


def _dtype(stored: StoredTensor) -> str:
    return str(stored.dtype).removeprefix("torch.")
