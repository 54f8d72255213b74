"""A dynamic scaler's settings in closed form, from a trace; each with what it is bound by.

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
"""With a shorter interval, the skips after growths do more harm: 0.35 % of the steps at ln 2 / 200."""
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
    """Returns the usual 2000, or clamp(ln(1 + a/b) / rho, 200, smallest upper bound) if 2000 is too short or too long.

    Upper bounds: a/|r|, so that the scale climbs as fast as gradients fall; a tenth of the steps left, so that it grows
    at all; `Spikes.longest_interval`, so that spikes do not ratchet it down. They win over the lower bounds.

    Args:
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        skip_rate: rho, the share of steps that a settled scaler may skip.
        drift: r, trend of log2 of the largest gradient, in binades per step; only a fall binds.
        steps_left: Number of the run's remaining steps; None if unknown.
        spikes: The trace's spikes; what they cost depends on this backoff factor.
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
    """Returns 1/2 for isolated overflows; 2^-ceil(H/2) for bursts of H binades, at least 1/8; 3/4 against ratcheting.

    Each isolated overflow costs b binades whatever its size, and 3/4 makes b 0.4. But 3/4 skips 1.8 times as often at
    the same interval, so it is only for spikes that would push the interval below 200, without hysteresis.

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
    """Returns 2; 4 if gradients shrink by more than a binade per interval, which doubling cannot follow.

    Args:
        drift: Binades per step, as in `growth_interval`.
        interval: Clean steps between two growths.
    """
    if -drift * interval > 1.0:
        return Bound(value=4.0, by="gradients that shrink")
    return Bound(value=2.0, by=NOTHING)


def hysteresis(spikes: Spikes) -> Bound:
    """Returns 2 if overflows are isolated spikes, so that the first one is ignored; else 1.

    Args:
        spikes: Overflows of the trace.
    """
    return Bound(value=2, by="isolated spikes") if spikes.isolated else Bound(value=1, by=NOTHING)


def alarm_scale(lowest: int) -> Bound:
    """Returns the scale at which something is wrong: 2^max(lowest - 4, -10). It is an alarm, never a floor to train on.

    Args:
        lowest: Smallest exponent at which the gradients do not flush (`lowest_exponent`).
    """
    if lowest - 4 <= -10:
        return Bound(value=2.0**-10, by="2^-10, at which any run is in trouble")
    return Bound(value=2.0 ** (lowest - 4), by="gradients that flush, 4 binades further down")
