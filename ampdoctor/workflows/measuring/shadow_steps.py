"""Shadow steps: half-precision steps with the weights, batch and random state of fp32 ones, to check the predictions.

They show what histograms cannot: weight gradients that are made of flushed activation gradients, the rounding of the
forward, sums in half.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.of_runs.ranges import GRADIENTS, Place
from ampdoctor.probes.measures.ranges import RangeProbe
from ampdoctor.probes.measures.zeroed import ReferenceGradients, ZeroedProbe
from ampdoctor.ranges.profile import RangeProfile, Shadow
from ampdoctor.workflows.proving.hand_scale import rescaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.measuring.measure import Measurement
    from ampdoctor.workflows.opening.request import Progress


def shadowed(
    session: Session,
    start: Snapshot,
    taken: Measurement,
    scales: Sequence[float],
    progress: Progress | None = None,
) -> RangeProfile:
    """Returns the profile with a shadow for each scale, of the first and the last measured step.

    The session is back at `start` afterwards. If it is unknown which tensors are half, nothing can be compared, and the
    profile is returned unchanged. A scale at which the user's code raises has no shadow.

    Args:
        session: The run.
        start: Its state at step 0.
        taken: The measurement.
        scales: Loss scales, without duplicates.
        progress: Called after each step.
    """
    ranges = taken.ranges
    if taken.plan is None or ranges.run.precision == "bf16":
        return ranges
    moments = [(0, start), *([taken.late] if taken.late is not None else [])]
    shadows = {scale: _Tally(ranges, scale) for scale in scales}
    for done, (step, state) in enumerate(moments):
        try:
            _shadow_step(session, state, step, taken, shadows)
        except AmpdoctorError:
            continue  # the user's own asserts, in fp32 already
        finally:
            state.restore()
        if progress is not None:
            progress("shadow steps in fp16", done + 1, len(moments))
    start.restore()
    return replace(ranges, shadows=tuple(t.shadow() for t in shadows.values() if t.steps))


def _shadow_step(
    session: Session, state: Snapshot, step: int, taken: Measurement, shadows: dict[float, _Tally]
) -> None:
    ranges = taken.ranges
    reference, probe = ReferenceGradients(taken.plan), RangeProbe(taken.plan)
    state.restore()
    with session.reference(), session.watched(reference, probe):
        session.step(step)
    alone = probe.profile(ranges.run)
    half = nullcontext() if ranges.run.precision == "fp16" else session.computing_in("fp16")
    with half:
        for scale, tally in shadows.items():
            state.restore()
            factor = scale / ranges.run.loss_scale
            zeroed = ZeroedProbe(reference, factor=factor)
            # the probe first: it sees a half parameter's gradient before the factor is divided out in half
            other = nullcontext() if factor == 1.0 else rescaled(factor)(session)
            with _usable_scale(session), session.watched(zeroed), other:
                try:
                    session.step(step)
                except AmpdoctorError:
                    continue  # the user's own asserts, at this scale
            tally.add(step, alone, zeroed)


def _usable_scale(session: Session) -> AbstractContextManager[None]:
    """Make the scale 1 if it is 0, negative or not finite: it counts as 1 in a profile."""
    scale = session.events.scale()
    if scale is None or 0.0 < scale < math.inf:
        return nullcontext()
    return session.scaling_with(torch.amp.GradScaler(session.device.type, init_scale=1.0))


class _Tally:
    def __init__(self, ranges: RangeProfile, scale: float) -> None:
        self._ranges = ranges
        self._scale = scale
        self._measured: Counter[Place] = Counter()
        self._nonzero: Counter[Place] = Counter()
        self._predicted: Counter[Place] = Counter()
        self._errors: list[float] = []
        self._expected: list[float] = []
        self.steps: list[int] = []

    def add(self, step: int, alone: RangeProfile, zeroed: ZeroedProbe) -> None:
        """Add a step: the prediction from its own fp32 histograms, and what was measured."""
        self.steps.append(step)
        for place, present in zeroed.nonzero.items():
            self._nonzero[place] += present
            self._measured[place] += zeroed.flushed[place]
        for site, histogram in zip(alone.sites, alone.histograms, strict=True):
            if site.kind in GRADIENTS and site.half:
                share = histogram.flushed("fp16", alone.factor(site.kind, self._scale))
                self._predicted[site.place] += share * int(histogram.counts.sum())  # type: ignore[assignment]  # a weight
        if zeroed.relative_error is not None:
            self._errors.append(zeroed.relative_error if math.isfinite(zeroed.relative_error) else math.inf)
        weights = alone.merged("weight_grad")
        self._expected.append(weights.relative_error("fp16", alone.factor("weight_grad", self._scale)))

    def shadow(self) -> Shadow:
        """Returns all steps together."""
        places = [site.place for site in self._ranges.sites if site.kind in GRADIENTS]
        return Shadow(
            scale=self._scale,
            steps=tuple(self.steps),
            nonzero=np.array([self._nonzero[place] for place in places], dtype=np.int64),
            flushed=np.array([self._measured[place] for place in places], dtype=np.int64),
            predicted=np.array([self._predicted[place] for place in places], dtype=np.float64),
            relative_error=statistics.median(self._errors) if self._errors else None,
            predicted_error=statistics.median(self._expected) if self._expected else None,
        )
