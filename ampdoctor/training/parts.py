"""The parts of a user's training that `apply` was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a user's training that `apply` was given.

    Attributes:
        model: The model.
        optimizers: Its optimizers; () where none was given.
        scaler: Its loss scaler, if one was given.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
