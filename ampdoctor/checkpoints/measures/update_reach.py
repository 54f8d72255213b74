"""Computes what an optimizer's next update does to a stored weight: has its format room for it?

A step is added to the weight and rounded to its format. A step of less than half the distance to the next number is
lost, and the next one again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.contents.scalers import number
from ampdoctor.checkpoints.contents.structure import tensors_in
from ampdoctor.checkpoints.measures.difference import side_by_side, widened
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import UpdateReach

_Update = Callable[..., torch.Tensor]
"""Maps chunks of the moments (float32) to the step that is subtracted from the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """An optimizer's state for one parameter, with the hyperparameters of its group.

    Attributes:
        state: Entries of the state ("exp_avg", "step").
        group: Hyperparameters ("lr", "betas").
    """

    state: Mapping[Any, Any]
    group: Mapping[Any, Any]

    @property
    def learning_rate(self) -> float | None:
        """Its group's learning rate, if stored."""
        return number(self.group.get("lr"))


def states_of(checkpoint: Checkpoint) -> dict[int, StoredState]:
    """Maps each stored moment, by the identity of its `StoredTensor`, to the state that it belongs to.

    A parameter counts in the first group that lists it; torch accepts none that two groups list.
    """
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
    """Returns what an update does to a weight's elements; None if the optimizer's rule is unknown.

    Args:
        weight: The weight; real.
        stored: Its optimizer state.
        learning_rate: The learning rate of the computation.
        steps: Number of updates that are added up.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    rule = _rule(stored, weight.shape)
    if rule is None or weight.dtype.is_complex or not weight.numel:
        return None
    update, moments = rule
    lands = adds_up = elements = 0
    squares = 0.0
    try:
        for chunk, *state in side_by_side(weight, *moments):
            values = widened(chunk)
            step = learning_rate * update(*(widened(moment) for moment in state))
            lands += int(torch.count_nonzero((values - step).to(weight.dtype) != chunk))
            adds_up += int(torch.count_nonzero((values - steps * step).to(weight.dtype) != chunk))
            squares += float(step.double().square().sum())
            elements += values.numel()
    except LimitExceededError:
        return None
    if not math.isfinite(squares) or not elements:
        return None
    return UpdateReach(
        learning_rate=learning_rate,
        lands=lands / elements,
        adds_up=adds_up / elements,
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
        return _plain, [momentum]
    if first is not None and set(state) <= {"exp_avg", "step"}:
        return torch.sign, [first]  # Lion
    return None


def _fitting(entry: Any, shape: tuple[int, ...]) -> StoredTensor | None:
    fits = isinstance(entry, StoredTensor) and entry.shape == shape and entry.dtype.is_floating_point
    return entry if fits else None


def _plain(momentum: torch.Tensor) -> torch.Tensor:
    return momentum


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
