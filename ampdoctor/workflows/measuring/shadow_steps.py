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
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.of_runs.ranges import GRADIENTS, Place
from ampdoctor.numerics import Histogram
from ampdoctor.probes.measures.zeroed import Zeroed, ZeroedProbe
from ampdoctor.ranges.profile import RangeProfile, Shadow
from ampdoctor.workflows.measuring.coming_back import comes_back, is_far, not_compared
from ampdoctor.workflows.proving.hand_scale import rescaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.measuring.measure import Measurement, Moment
    from ampdoctor.workflows.opening.request import Progress

NONE_KNOWN: Mapping[float, Zeroed] = MappingProxyType({})


def shadowed(
    session: Session, taken: Measurement, scales: Sequence[float], progress: Progress | None = None
) -> RangeProfile:
    """Returns the profile with a shadow for each scale, of the first and the last measured step.

    The session is back at its start afterwards. If it is unknown which tensors are half, nothing can be compared, and
    the profile is returned unchanged. A scale at which the user's code raises has no shadow.

    Args:
        session: The run.
        taken: The measurement.
        scales: Loss scales, without duplicates.
        progress: Called after each step.
    """
    shadows = Shadows(taken.ranges, scales)
    for done, moment in enumerate(reversed(taken.moments)):  # the first last: the run is then back at its start
        shadows.take(session, moment)
        if progress is not None:
            progress("shadow steps in fp16", done + 1, len(taken.moments))
    if shadows.unlike is not None:
        taken.notes.append(f"what fp16 does to these gradients was not measured: {not_compared(shadows.unlike)}")
    return shadows.profile()


class Shadows:
    """Gathers the shadow steps of a measured run.

    Args:
        ranges: The profile.
        scales: Loss scales, without duplicates.

    Attributes:
        unlike: A step that does not come back: the measured one saw other data. Then there is no shadow.
    """

    def __init__(self, ranges: RangeProfile, scales: Sequence[float]) -> None:
        self._ranges = ranges
        self._tallies = {scale: _Tally(ranges, scale) for scale in scales}
        self.unlike: int | None = None

    def take(self, session: Session, moment: Moment, known: Mapping[float, Zeroed] = NONE_KNOWN) -> None:
        """Run a moment's step in fp16 at each scale, and come back to the state before it.

        Args:
            session: The run.
            moment: The measured step.
            known: Of the scales at which this step was run already, from the same state.
        """
        run = self._ranges.run
        half = nullcontext() if run.precision == "fp16" else session.computing_in("fp16")
        with half:
            for scale, tally in self._tallies.items() if self.unlike is None else ():
                shadow = partial(_zeroed, session, moment, scale / run.loss_scale)
                zeroed = known[scale] if scale in known else shadow()
                if zeroed is None:
                    continue
                there = session, moment.state, moment.step, moment.gradients
                if scale in known or not is_far(zeroed) or comes_back(*there, found=zeroed, again=shadow):
                    tally.add(moment, zeroed)
                else:
                    self.unlike = moment.step
        moment.state.restore()

    def profile(self) -> RangeProfile:
        """Returns the profile with what was gathered."""
        tallies = self._tallies.values() if self.unlike is None else ()
        return replace(self._ranges, shadows=tuple(tally.shadow() for tally in tallies if tally.steps))


def _zeroed(session: Session, moment: Moment, factor: float) -> Zeroed | None:
    """Run the step once, its loss scaled by `factor` beyond the run's own scale; None if the user's code raises."""
    moment.state.restore()
    probe = ZeroedProbe(moment.gradients, factor=factor)
    # the probe first: it sees a half parameter's gradient before the factor is divided out in half
    other = nullcontext() if factor == 1.0 else rescaled(factor)(session)
    try:
        with _usable_scale(session), session.watched(probe), other:
            session.step(moment.step)
    except AmpdoctorError:
        return None  # the user's own asserts, at this scale
    return probe.zeroed


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

    def add(self, moment: Moment, zeroed: Zeroed) -> None:
        """Add a step: the prediction from its own fp32 histograms, and what was measured."""
        self.steps.append(moment.step)
        self._nonzero += zeroed.nonzero
        self._measured += zeroed.flushed
        weights = Histogram.empty()
        for place, histogram in moment.counted.items():
            if place.kind not in GRADIENTS or not moment.gradients.holds(place):
                continue
            share = histogram.flushed("fp16", self._ranges.factor(place.kind, self._scale))
            self._predicted[place] += share * int(histogram.counts.sum())  # type: ignore[assignment]  # a weight
            if place.kind == "weight_grad":
                weights = weights + histogram
        if zeroed.relative_error is not None:
            self._errors.append(zeroed.relative_error if math.isfinite(zeroed.relative_error) else math.inf)
        self._expected.append(weights.relative_error("fp16", self._ranges.factor("weight_grad", self._scale)))

    def shadow(self) -> Shadow:
        """Returns all steps together."""
        places = [site.place for site in self._ranges.sites if site.kind in GRADIENTS]
        return Shadow(
            scale=self._scale,
            steps=tuple(sorted(self.steps)),
            nonzero=np.array([self._nonzero[place] for place in places], dtype=np.int64),
            flushed=np.array([self._measured[place] for place in places], dtype=np.int64),
            predicted=np.array([self._predicted[place] for place in places], dtype=np.float64),
            relative_error=statistics.median(self._errors) if self._errors else None,
            predicted_error=statistics.median(self._expected) if self._expected else None,
        )
