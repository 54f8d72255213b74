"""A dynamic scaler's settings in closed form, from what a trace says; each with what binds it.

a = log2(growth_factor) and b = -log2(backoff_factor) throughout.
"""

from __future__ import annotations

import math

from ampdoctor.scaling.closed_forms import equilibrium_skip_rate
from ampdoctor.scaling.settings import Bound
from ampdoctor.scaling.spikes import Spikes

NOTHING = "nothing: the usual default"
USUAL_INTERVAL = 2000
"""torch's growth_interval."""
SHORTEST_INTERVAL = 200
"""Below it growth's skips are the larger harm: 0.35 % of the steps at ln 2 / 200."""
STRONGEST_BACKOFF = 0.125


def growth_interval(
    growth_factor: float,
    backoff_factor: float,
    *,
    skip_rate: float,
    drift: float = 0.0,
    steps_left: int | None = None,
    spikes: Spikes | None = None,
) -> Bound:
    """The usual 2000, or clamp(ln(1 + a/b) / rho, 200, the smallest upper bound) where 2000 is too short or too long.

    Upper bounds: a/|r|, for the scale to climb as fast as gradients fall; a tenth of the steps left, for it to grow at
    all; `Spikes.longest_interval`, for spikes not to ratchet it down. Where they contradict the lower ones they win.

    Args:
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        skip_rate: rho, the share of steps that a settled scaler may skip.
        drift: r, trend of log2 of the largest gradient, in binades per step; only a fall binds.
        steps_left: Of the run; None where it is not known.
        spikes: Of the trace, with what they cost at this backoff factor.
    """
    climb = math.log2(growth_factor)
    wanted = math.ceil(equilibrium_skip_rate(growth_factor, backoff_factor, 1) / skip_rate)
    upper = Bound(value=math.inf, by=NOTHING)
    if drift < 0.0:
        upper = Bound(value=climb / -drift, by="gradients that shrink")
    if steps_left is not None and steps_left / 10 < upper.value:
        upper = Bound(value=steps_left / 10, by="the steps that are left")
    ratchet = spikes.longest_interval(growth_factor, backoff_factor) if spikes is not None else math.inf
    if ratchet < upper.value:
        upper = Bound(value=ratchet, by="spikes that would ratchet the scale down")
    if upper.value >= USUAL_INTERVAL and wanted <= USUAL_INTERVAL:
        return Bound(value=USUAL_INTERVAL, by=NOTHING)
    lower = max(wanted, SHORTEST_INTERVAL)
    if upper.value < USUAL_INTERVAL or upper.value < lower:
        return Bound(value=max(1, math.floor(min(lower, upper.value))), by=upper.by)
    return Bound(value=lower, by="the skip rate aimed at")


def backoff_factor(spikes: Spikes, *, hysteresis_available: bool) -> Bound:
    """1/2 for isolated overflows; 2^-ceil(H/2) for bursts of H binades, at least 1/8; 3/4 against ratcheting.

    Each isolated overflow costs b binades whatever its size, which 3/4 makes 0.4; but it skips 1.8 times as often at
    the same interval, so it is for spikes that would push the interval below 200, without hysteresis.

    Args:
        spikes: Overflows of the trace at the scale that the usual steps allow.
        hysteresis_available: The framework can ignore a first overflow.
    """
    if spikes.isolated:
        ratchets = spikes.longest_interval(2.0, 0.5) < SHORTEST_INTERVAL
        if ratchets and not hysteresis_available:
            return Bound(value=0.75, by="spikes that would ratchet the scale down")
        return Bound(value=0.5, by="isolated spikes")
    halvings = math.ceil(min(spikes.height, 64.0) / 2.0)
    if halvings > 1:
        return Bound(value=max(2.0**-halvings, STRONGEST_BACKOFF), by="bursts of overflows")
    return Bound(value=0.5, by=NOTHING)


def growth_factor(drift: float, interval: float) -> Bound:
    """2; 4 where gradients shrink by more than a binade an interval, which doubling cannot follow.

    Args:
        drift: Binades per step, as in `growth_interval`.
        interval: Clean steps between two growths.
    """
    if -drift * interval > 1.0:
        return Bound(value=4.0, by="gradients that shrink")
    return Bound(value=2.0, by=NOTHING)


def hysteresis(spikes: Spikes) -> Bound:
    """2 where overflows are isolated spikes, for the first one to be ignored; else 1.

    Args:
        spikes: Overflows of the trace.
    """
    return Bound(value=2, by="isolated spikes") if spikes.isolated else Bound(value=1, by=NOTHING)


def alarm_scale(lowest: int) -> Bound:
    """The scale at which something is wrong: 2^max(lowest - 4, -10). An alarm or an abort, never a floor to train on.

    Args:
        lowest: Smallest exponent at which the gradients do not flush (`lowest_exponent`).
    """
    if lowest - 4 <= -10:
        return Bound(value=2.0**-10, by="2^-10, at which any run is in trouble")
    return Bound(value=2.0 ** (lowest - 4), by="gradients that flush, 4 binades further down")
