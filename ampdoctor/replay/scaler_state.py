"""A GradScaler's state at one moment, and copies that keep tensors plain."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ampdoctor.hooks.scaler_events import Listener


def clone(value: Any) -> Any:
    """Returns a deep copy; tensors become plain ones without autograd history, the rest is as in `copy.deepcopy`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(clone(item) for item in value)
    return copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class ScalerSnapshot:
    """A GradScaler's state at one moment; it does not keep the scaler alive."""

    values: dict[str, Any]
    states: Any
    """The scaler's own table of optimizers. It makes missing entries itself, so its type must stay."""
    stages: dict[int, Any] | None

    @classmethod
    def of(cls, scaler: Any) -> ScalerSnapshot:
        """Copy a scaler's state."""
        kept = {key: value for key, value in vars(scaler).items() if not callable(value)}
        states = kept.pop("_per_optimizer_states", None)
        return cls(clone(kept), states, None if states is None else clone(dict(states)))

    def restore(self, scaler: Any) -> None:
        """Put the state back into the same scaler."""
        for key, value in self.values.items():
            setattr(scaler, key, clone(value))
        if self.states is not None:
            scaler._per_optimizer_states = self.states
            self.states.clear()
            self.states.update(clone(self.stages))


class OtherScalers(Listener):
    """The scalers that a run's steps make or hold themselves.

    Args:
        own: The run's own scaler, which is none of them.

    Attributes:
        first: Each as it was when a step first called it.
        state: The `state_dict` that the first of them had then, if it was enabled: it may be gone by now.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self.state: dict[str, Any] | None = None
        self.first: WeakKeyDictionary[Any, ScalerSnapshot] = WeakKeyDictionary()

    def calls(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002 - the seam's signature
        """As in `Listener`."""
        if scaler is not self._own and scaler not in self.first:
            self.first[scaler] = ScalerSnapshot.of(scaler)
            if self.state is None and scaler.is_enabled():
                self.state = scaler.state_dict()
