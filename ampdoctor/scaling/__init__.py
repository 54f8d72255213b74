"""Loss scaling without a training run: the scalers' exact rules, closed forms from a trace, and the choice."""

from __future__ import annotations

from ampdoctor.scaling.closed_forms import (
    LIM,
    equilibrium_skip_rate,
    highest_exponent,
    loss_scale_limit,
    lowest_exponent,
    upper_log2,
)
from ampdoctor.scaling.emit import emit
from ampdoctor.scaling.scalers import ScalerSettings, SimulatedStep, simulate

__all__ = [
    "LIM",
    "ScalerSettings",
    "SimulatedStep",
    "emit",
    "equilibrium_skip_rate",
    "highest_exponent",
    "loss_scale_limit",
    "lowest_exponent",
    "simulate",
    "upper_log2",
]
