"""A dynamic loss scaler's settings, in GradScaler's terms; additional settings of other frameworks are optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """A GradScaler at some moment; the defaults are torch's.

    Attributes:
        scale: Loss scale.
        growth_factor: Multiplier after `growth_interval` clean steps.
        backoff_factor: Multiplier after an overflow.
        growth_interval: Clean steps between two growths.
        growth_tracker: Clean steps since the last growth or backoff.
        min_scale: The floor below which backoff does not go; None if there is none, as in GradScaler.
        hysteresis: Number of overflows before a backoff (DeepSpeed, Megatron); 1 elsewhere.
        tolerance: Share of overflows among the steps since the scale changed that causes a backoff (fairseq).
        abort_scale: A backoff to this scale or below ends the run (fairseq); None if none does.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0
    min_scale: float | None = None
    hysteresis: int = 1
    tolerance: float = 0.0
    abort_scale: float | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> ScalerSettings:
        """Returns settings from `GradScaler.state_dict()`; missing ones are torch's defaults."""
        return cls(
            scale=float(state.get("scale", 65536.0)),
            growth_factor=float(state.get("growth_factor", 2.0)),
            backoff_factor=float(state.get("backoff_factor", 0.5)),
            growth_interval=int(state.get("growth_interval", 2000)),
            growth_tracker=int(state.get("_growth_tracker", 0)),
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of a GradScaler that starts like this."""
        return {
            "init_scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A setting, and what bounds it.

    Attributes:
        value: The setting.
        by: What bounds it, in words that complete "bound by ...".
    """

    value: float
    by: str
