"""The settings, counters and moments of a checkpoint's optimizers, and the effect of their next update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.checkpoints.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.file_contents import tensors_in
from ampdoctor.checkpoints.scalers import number
from ampdoctor.checkpoints.stored_tensor import StoredTensor, dtype_name, side_by_side, widened
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import (
    OptimizerGroup,
    OptimizerSummary,
    TensorSummary,
    UpdateReach,
    ZeroSecondMoment,
)

SECOND_MOMENTS = {"exp_avg_sq": "exp_avg"}
"""Second moment -> the first moment that its root divides. AMSGrad divides by a maximum, whose lower bound it is."""

_FLUSHING = frozenset(
    {torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""Formats in which the square of an ordinary gradient becomes zero. bf16 and wider flush squares of gradients below
2^-62, too small for any epsilon to matter: larger ones are zero there only after a conversion."""


def optimizer_facts(checkpoint: Checkpoint, tensors: Sequence[TensorSummary]) -> tuple[OptimizerSummary, ...]:
    """Returns every optimizer in numbers, in stored order; only second moments that may be starved are read."""
    zeros = {(t.file, t.group, t.name, t.entry) for t in tensors if t.role == "moment" and t.zeros}
    starved = tuple(_starved(checkpoint, zeros))
    optimizers = checkpoint.optimizers()
    return tuple(
        _summary(
            path,
            optimizer,
            tuple(m for m in starved if len(optimizers) == 1 or path in {m.group, f"{m.file}:{m.group}"}),
        )
        for path, optimizer in optimizers.items()
    )


def _summary(path: str, optimizer: Mapping[str, Any], starved: tuple[ZeroSecondMoment, ...]) -> OptimizerSummary:
    groups = [group for group in optimizer["param_groups"] if isinstance(group, Mapping)]
    counters = [
        state["step"] for state in optimizer["state"].values() if isinstance(state, Mapping) and "step" in state
    ]
    counters += [group["step"] for group in groups if "step" in group]
    steps = [step for counter in counters if (step := number(counter)) is not None and math.isfinite(step)]
    dtypes = {dtype_name(counter.dtype) for counter in counters if isinstance(counter, StoredTensor)}
    return OptimizerSummary(
        path=path,
        groups=tuple(_group(group) for group in groups),
        steps=tuple(sorted(Counter(steps).items())),
        step_dtypes=tuple(sorted(dtypes)),
        starved=starved,
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
        parameters=len(params) if isinstance(params, list | tuple) else 0,
    )


def _starved(checkpoint: Checkpoint, zeros: Collection[tuple[str, str, str, str]]) -> Iterator[ZeroSecondMoment]:
    moments = [ref for ref in checkpoint if ref.role == "moment"]
    firsts = {(ref.file, ref.group, ref.name, ref.entry): ref for ref in moments}
    kept = Counter((ref.file, ref.group, ref.name) for ref in moments)
    for second in moments:
        owner = second.file, second.group, second.name
        beside = firsts.get((*owner, SECOND_MOMENTS.get(second.entry, "")))
        if beside is None or beside.shape != second.shape:
            continue
        if second.dtype not in _FLUSHING:
            # a third state may be a maximum that divides in place of this one, or mean that this one has another basis,
            # as in SOAP
            if kept[owner] > len((second, beside)):
                continue
            if (*owner, second.entry) not in zeros:
                yield _described(second, starved=0, examined=second.stored.numel, largest=0.0)
                continue
        with suppress(LimitExceededError):  # too large to load in different orders: not judged
            yield _compare(second, beside)


def _compare(second: TensorRef, first: TensorRef) -> ZeroSecondMoment:
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


def _described(second: TensorRef, *, starved: int, examined: int, largest: float) -> ZeroSecondMoment:
    return ZeroSecondMoment(
        name=second.name,
        module=second.module,
        group=second.group,
        file=second.file,
        entry=second.entry,
        dtype=dtype_name(second.stored.dtype),
        starved=starved,
        examined=examined,
        largest=largest,
    )


# -- does the next update change a stored weight, given its format? --

_Update = Callable[..., torch.Tensor]
"""Maps chunks of the moments (float32) to the step that is subtracted from the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """An optimizer's state for one parameter ("step"), with the hyperparameters of its group ("lr", "betas")."""

    state: Mapping[Any, Any]
    group: Mapping[Any, Any]

    @property
    def learning_rate(self) -> float | None:
        """Its group's learning rate, if stored."""
        return number(self.group.get("lr"))


def states_of(checkpoint: Checkpoint) -> dict[int, StoredState]:
    """Maps each stored moment, by the identity of its `StoredTensor`, to the state in the first group that lists it."""
    found: dict[int, StoredState] = {}
    for optimizer in checkpoint.optimizers().values():
        listed: set[int | str] = set()
        for group in optimizer["param_groups"]:
            params = group.get("params") if isinstance(group, Mapping) else None
            for pid in params if isinstance(params, list | tuple) else ():
                if not isinstance(pid, int | str) or pid in listed:
                    continue
                listed.add(pid)
                state = optimizer["state"].get(pid)
                if isinstance(state, Mapping):
                    known = StoredState(state=state, group=group)
                    found.update({id(tensor): known for _, tensor in tensors_in(state)})
    return found


def reach(weight: StoredTensor, stored: StoredState, learning_rate: float, steps: int) -> UpdateReach | None:
    """Returns what one update, and `steps` equal ones, do to a real weight; None if the optimizer's rule is unknown."""
    rule = _rule(stored, weight.shape)
    if rule is None or weight.dtype.is_complex or not weight.numel:
        return None
    update, moments = rule
    changed_by_one = changed_by_many = elements = 0
    squares = 0.0
    try:
        for chunk, *state in side_by_side(weight, *moments):
            values = widened(chunk)
            step = learning_rate * update(*(widened(moment) for moment in state))
            changed_by_one += int(torch.count_nonzero((values - step).to(weight.dtype) != chunk))
            changed_by_many += int(torch.count_nonzero((values - steps * step).to(weight.dtype) != chunk))
            squares += float(step.double().square().sum())
            elements += values.numel()
    except LimitExceededError:
        return None
    if not math.isfinite(squares) or not elements:
        return None
    return UpdateReach(
        learning_rate=learning_rate,
        changed_by_one=changed_by_one / elements,
        changed_by_many=changed_by_many / elements,
        steps=steps,
        rms=math.sqrt(squares / elements),
    )


def _rule(stored: StoredState, shape: tuple[int, ...]) -> tuple[_Update, list[StoredTensor]] | None:
    """Returns how an update follows from the moments, in units of the learning rate."""
    state = stored.state
    first, second, momentum = (_fitting(state.get(key), shape) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"))
    if first is not None and second is not None:
        return _adam(stored), [first, second]
    if momentum is not None:
        return lambda buffer: buffer, [momentum]
    if first is not None and set(state) <= {"exp_avg", "step"}:
        return torch.sign, [first]  # Lion
    return None


def _fitting(entry: Any, shape: tuple[int, ...]) -> StoredTensor | None:
    fits = isinstance(entry, StoredTensor) and entry.shape == shape and entry.dtype.is_floating_point
    return entry if fits else None


def _adam(stored: StoredState) -> _Update:
    """Adam's update (Kingma and Ba 2015, algorithm 1) without weight decay; missing settings are torch's defaults."""
    betas = stored.group.get("betas")
    pair = [number(beta) for beta in betas] if isinstance(betas, list | tuple) and len(betas) == 2 else [0.9, 0.999]
    step = number(stored.state.get("step"))
    corrections = [1.0, 1.0]
    if step is not None and step >= 1:
        corrections = [1 - beta**step if beta is not None and 0 <= beta < 1 else 1.0 for beta in pair]
    epsilon = number(stored.group.get("eps"))

    def update(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first / corrections[0]) / ((second / corrections[1]).sqrt() + (1e-8 if epsilon is None else epsilon))

    return update
