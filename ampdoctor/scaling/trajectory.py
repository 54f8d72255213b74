"""A simulated path of a loss scale that is typical of many and short enough to draw, and the recorded steps' limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.targets import Framework
from ampdoctor.scaling.bootstrap import find_drift, resample
from ampdoctor.scaling.closed_forms import highest_exponent
from ampdoctor.scaling.scoring import Expectation
from ampdoctor.scaling.simulate import Simulation, simulate_lanes
from ampdoctor.scaling.trace import StepTrace

MOST_POINTS = 2000
"""Maximum number of a line's points and of a path's skipped steps: a drawing has no more pixels to show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The loss scale of one replica, step by step.

    Attributes:
        points: (step, scale) from which on it has this scale. If there are more than `MOST_POINTS` changes, the lowest
            and the highest scale in each of half as many equal spans.
        changes: Number of points without that thinning.
        skips: Skipped steps; an even choice if there are more than `MOST_POINTS`.
        skipped: Number of all skipped steps.
        replica: Number of the replica.
    """

    points: list[list[float]]
    changes: int
    skips: list[int]
    skipped: int
    replica: int


def trajectory(expected: Expectation, trace: StepTrace, framework: Framework, horizon: int) -> Trajectory:
    """Returns the path of the replica that is typical of some settings: that with the median number of skipped steps.

    Args:
        expected: What the settings do over all replicas.
        trace: The trace of the replicas.
        framework: The framework whose scaler it is.
        horizon: Number of simulated steps.
    """
    replica = resample(trace, find_drift(trace.log2_amax), replicas=1, steps=horizon, first=expected.typical)
    return drawn(simulate_lanes([expected.settings], replica.maxima, framework), expected.typical)


def drawn(run: Simulation, replica: int = 0) -> Trajectory:
    """Returns the path of a simulation's first lane.

    Args:
        run: The simulation of one lane.
        replica: Number of the replica that it is of.
    """
    scale, over = run.scale[0, 0], run.skipped[0, 0] | run.ended[0, 0]
    starts = np.concatenate([[0], np.flatnonzero(scale[1:] != scale[:-1]) + 1])
    skips = np.flatnonzero(over)
    drawn = starts if len(starts) <= MOST_POINTS else _extremes(starts, scale[starts], len(scale))
    shown = skips if len(skips) <= MOST_POINTS else skips[np.linspace(0, len(skips) - 1, MOST_POINTS).astype(np.int64)]
    return Trajectory(
        points=[[int(at), float(scale[at])] for at in drawn],
        changes=len(starts),
        skips=shown.tolist(),
        skipped=len(skips),
        replica=replica,
    )


def largest_scales(trace: StepTrace) -> list[list[float]]:
    """Returns (step, largest power of two that does not overflow) of the recorded steps with a known largest gradient.

    If there are more than `MOST_POINTS` steps: the one with the lowest in each of that many equal spans.
    """
    known = np.flatnonzero(np.isfinite(trace.log2_amax))
    spans = np.array_split(known, min(MOST_POINTS, len(known))) if len(known) else []
    steps = [int(span[np.argmax(trace.log2_amax[span])]) for span in spans]
    return [[step, 2.0 ** highest_exponent(float(trace.log2_amax[step]))] for step in steps]


def _extremes(starts: NDArray[np.int64], scales: NDArray[np.float64], steps: int) -> list[int]:
    """Returns the points with the lowest and the highest scale of each span, in order."""
    span = starts * (MOST_POINTS // 2) // steps
    kept: set[int] = {0}
    for members in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(span)) + 1):
        kept |= {int(members[np.argmin(scales[members])]), int(members[np.argmax(scales[members])])}
    return [int(starts[index]) for index in sorted(kept)]
