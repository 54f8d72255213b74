"""What a user's training is made of, as far as `apply` was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Training:
    """What a user's training is made of, as far as `apply` was told.

    Attributes:
        model: The model.
        optimizers: Its optimizers; () where none was given.
        scaler: Its loss scaler, if one was given.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
