"""What is known of a checkpoint: plain data, filled while its tensors stream by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The state of a dynamic loss scaler (`torch.amp.GradScaler.state_dict()` or another framework's equal).

    Attributes:
        scale: Current loss scale.
        growth_factor: Multiplier after `growth_interval` clean steps.
        backoff_factor: Multiplier after an overflow.
        growth_interval: Clean steps between two growths.
        growth_tracker: Clean steps since the last growth or backoff.
        key: Where in the file it was found ("scaler").
    """

    scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0
    key: str = "scaler"
