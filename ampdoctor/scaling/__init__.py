"""Loss scaling without a training run: the scalers' exact rules, closed forms from a trace, and the choice."""

from __future__ import annotations

from ampdoctor.scaling.closed_forms import (
    LIM,
    equilibrium_skip_rate,
    head_scale_limit,
    highest_exponent,
    loss_scale_limit,
    lowest_exponent,
    student_t_quantile,
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
    "head_scale_limit",
    "highest_exponent",
    "loss_scale_limit",
    "lowest_exponent",
    "simulate",
    "student_t_quantile",
    "upper_log2",
]
