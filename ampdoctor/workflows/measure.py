"""Measures a run's ranges: in an fp32 replay, and in single half-precision steps that check what follows from them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from ampdoctor.errors import AmpdoctorError, ReplayError
from ampdoctor.evidence.run_facts import GRADIENTS, Place
from ampdoctor.numerics import Histogram
from ampdoctor.probes.formats_seen import HalfProbe, ModuleFactsProbe
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.ranges import RangeProbe, ReferenceGradients, UpdateProbe, Zeroed, ZeroedProbe
from ampdoctor.ranges.profile import RangeProfile, RunFacts, Shadow
from ampdoctor.workflows.changes import rescaled
from ampdoctor.workflows.compare_fp32 import Seen
from ampdoctor.workflows.trials import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ampdoctor.evidence.trace import StepOutcome
    from ampdoctor.probes.modules import HalfPlan
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.requests import Progress


# Measures a run's ranges in an fp32 replay; one half-precision step tells which tensors are half.


DEFAULT_STEPS = 50
COMPARED = 4
"""Number of steps that are examined more closely (updates; comparison with fp32): each costs more than one step."""
SAME_FACTOR = 1e-3
"""Factors of all steps within this relative spread count as one hand-made loss scale; clipping varies by more."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A measured step beside which half-precision steps from the same state can be held.

    Attributes:
        step: Its number.
        state: The run's state before it.
        outcome: How it ended in fp32.
        sinks: What was not finite in it.
        gradients: Its gradients in fp32. The step is not run again for them.
        counted: Its histograms.
    """

    step: int
    state: Snapshot
    outcome: StepOutcome
    sinks: tuple[str, ...]
    gradients: ReferenceGradients
    counted: Mapping[Place, Histogram]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of measuring a run.

    Attributes:
        ranges: The profile.
        plan: Which tensors are half; None if no half-precision step could be run.
        first: How the run itself takes its first step; None where it is no half-precision run, or cannot.
        moments: The first and the last measured step, for shadow steps in fp16; () for a run in bf16, or where no
            half-precision step could be run. For a half model only the first: while its reference lasts, the model is
            another one, and a state that is taken then is not the run's.
        notes: For the report, in sentences.
    """

    ranges: RangeProfile
    plan: HalfPlan | None
    first: Seen | None = None
    moments: tuple[Moment, ...] = ()
    notes: list[str] = field(default_factory=list)


def measure(
    session: Session, start: Snapshot, steps: int | None, progress: Progress | None = None, *, factory: str = ""
) -> Measurement:
    """Replay up to `steps` steps in fp32 and measure every place; the session is back at `start` afterwards.

    Args:
        session: A run at its start.
        start: Its snapshot.
        steps: Maximum number of optimizer steps to replay; None for `DEFAULT_STEPS`, or as many as there are batches.
        progress: Called after each step.
        factory: Name of the factory that made the run, for the profile.

    Returns:
        The profile, and what else is worth knowing.

    Raises:
        ReplayError: There is no batch, or nothing needs a gradient.
        AmpdoctorError: The user's code raised.
    """
    wanted = steps or DEFAULT_STEPS
    if not session.has_step(0):
        raise ReplayError("the run has no batch: nothing can be measured")
    half, facts, first, notes = _half_step(session, start)
    plan = half.plan if half is not None else None
    probe, updates = RangeProbe(plan), UpdateProbe(spread(wanted))
    shadowed = plan is not None and session.precision.compute != "bf16"
    steps_taken = _Steps(session, start, wanted, probe, updates, progress, plan=plan if shadowed else None)
    try:
        steps_taken.run()
    finally:
        start.restore()
    by_hand = hand_scale(probe.hand_scales) if session.run.step is not None else 1.0
    if by_hand != 1.0:
        notes.append(f"the step multiplies its loss by {by_hand:g} itself: figures are relative to the unscaled loss")
    run = RunFacts(
        factory=factory,
        precision=session.precision.compute,
        autocast=session.precision.autocast,
        master_weights=session.precision.master_weights,
        scaler=_state(session),
        loss_scale=_usable((session.scaler_state or {}).get("scale")) * by_hand,
        base_scale=by_hand,
        accumulation=session.run.accumulation_steps,
        loss_divided=session.run.divide_loss,
        loss_in_half=half is not None and half.loss_in_half,
        loss_amax=max((x for x in steps_taken.losses if math.isfinite(x)), default=None),
    )
    ranges = probe.profile(
        run,
        nonfinite_steps=tuple(steps_taken.nonfinite),
        modules=facts.facts() if facts is not None else (),
        updates=updates.facts(),
    )
    if not ranges.gradients:
        raise ReplayError("no gradient was seen: no parameter of the model needs one, or the step runs no backward")
    return Measurement(ranges, plan, first, tuple(steps_taken.moments), notes)


class _Steps:
    """The reference steps. A snapshot before the last is taken outside the reference, which has no scaler."""

    def __init__(  # noqa: PLR0917 - what a run is, and what looks at it
        self,
        session: Session,
        start: Snapshot,
        wanted: int,
        ranges: RangeProbe,
        updates: UpdateProbe,
        progress: Progress | None,
        *,
        plan: HalfPlan | None,
    ) -> None:
        self._session = session
        self._start = start
        self._wanted = wanted
        self._ranges = ranges
        self._updates = updates
        self._progress = progress
        self._plan = plan
        self._done = 0
        self.losses: list[float] = []
        self.nonfinite: list[int] = []
        self.moments: list[Moment] = []

    def run(self) -> None:
        """Run all reference steps."""
        session = self._session
        self._run(self._start, before_last=self._plan is not None and session.precision.autocast)
        if self._is_there(self._done):
            self._run(session.snapshot(), before_last=False)

    def _run(self, state: Snapshot, *, before_last: bool) -> None:
        """Run steps, the first of them from a state that was kept."""
        sentinel, first = NonFiniteProbe(), self._done
        with self._session.reference(), self._session.watched(sentinel, self._ranges, self._updates):
            while self._is_there(self._done):
                if before_last and self._done and not self._is_there(self._done + 1):
                    return
                outcome = self._session.step(self._done) if self._done != first else self._kept(state, sentinel)
                if harms(sentinel.sightings.sinks):
                    self.nonfinite.append(self._done)
                self._done += 1
                if outcome.loss is not None:
                    self.losses.append(abs(outcome.loss))
                if self._progress is not None:
                    self._progress("measuring in fp32", self._done, self._wanted)

    def _kept(self, state: Snapshot, sentinel: NonFiniteProbe) -> StepOutcome:
        if self._plan is None:
            return self._session.step(self._done)
        gradients = ReferenceGradients(self._plan)
        with self._session.watched(gradients):
            outcome = self._session.step(self._done)
        sinks, counted = sentinel.sightings.sinks, self._ranges.counted
        self.moments.append(Moment(self._done, state, outcome, sinks, gradients, counted))
        return outcome

    def _is_there(self, step: int) -> bool:
        return step < self._wanted and self._session.has_step(step)


def spread(steps: int) -> frozenset[int]:
    """Returns up to `COMPARED` of the steps, including the first and the last."""
    if steps <= COMPARED:
        return frozenset(range(steps))
    return frozenset(round(i * (steps - 1) / (COMPARED - 1)) for i in range(COMPARED))


def harms(sinks: Sequence[str]) -> list[str]:
    """Returns the non-finite places that harm training, the loss first; a buffer may hold infinities on purpose."""
    return sorted((s for s in sinks if not s.startswith("buffer:")), key=lambda s: s != "loss")


def hand_scale(factors: Sequence[float | None]) -> float:
    """Returns the factor by which a step scales its loss by hand: the same in at least two steps, and not 1; else 1.0.

    Args:
        factors: For each step, the backward's largest gradient divided by the largest that the optimizer got.
    """
    known = [factor for factor in factors if factor is not None and factor > 0.0 and math.isfinite(factor)]
    if len(known) < 2 or len(known) < len(factors):
        return 1.0
    if max(known) / min(known) - 1.0 > SAME_FACTOR or abs(known[0] - 1.0) <= SAME_FACTOR:
        return 1.0
    exponent = round(math.log2(known[0]))
    return 2.0**exponent if abs(known[0] / 2.0**exponent - 1.0) <= SAME_FACTOR else known[0]


def _half_step(
    session: Session, start: Snapshot
) -> tuple[HalfProbe | None, ModuleFactsProbe | None, Seen | None, list[str]]:
    """Run one fp16 step (bf16 for a bf16 run: the same cast lists hold), only to see dtypes, ops and logits."""
    probe, facts, sentinel, first = HalfProbe(), ModuleFactsProbe(), NonFiniteProbe(), None
    compute = session.precision.compute
    try:
        if compute in ("fp16", "bf16"):
            with session.watched(sentinel, probe, facts):
                session.step(0)
            first = Seen.of(session, sentinel)
        else:
            with session.computing_in("fp16"), session.watched(probe, facts):
                session.step(0)
    except AmpdoctorError as error:
        return None, None, None, [f"no half-precision step could be run ({error}): every tensor is counted as half"]
    finally:
        start.restore()
    return probe, facts, first, []


def _state(session: Session) -> dict[str, float | int] | None:
    state = session.scaler_state
    return None if state is None else {key: value for key, value in state.items() if isinstance(value, int | float)}


def _usable(scale: float | None) -> float:
    """Returns 1.0 for a dead scaler's scale, with which nothing can be measured; a finding of its own reports it."""
    return scale if scale is not None and 0.0 < scale < math.inf else 1.0


# Does a step come back that is far from fp32? Only then was it of the same data as its twin.
#
# A run may keep state that no snapshot holds: an environment, a replay buffer, a stream that is read. The step and its
# twin in fp32 then saw different data, and a distance between them says nothing of precision. Where both agree, the
# data were the same, and nothing is run again.


def is_far(found: Zeroed) -> bool:
    """Returns whether a step is so far from its twin that they may have been of different data."""
    return found.relative_error is not None and AGREEMENT < found.relative_error < math.inf


def comes_back(
    session: Session,
    before: Snapshot,
    step: int,
    reference: ReferenceGradients,
    *,
    found: Zeroed,
    again: Callable[[], Zeroed | None],
) -> bool:
    """Returns whether a step and its twin are the same when they are run once more.

    First the step, then the twin: of what is moved once, or to and fro, one of the two shows it. The session is left in
    any state.

    Args:
        session: The run.
        before: The state before the step.
        step: Its number.
        reference: The twin's gradients.
        found: The step's beside them.
        again: Runs the step once more, from the state before it.
    """
    twin = ReferenceGradients(reference.plan)
    try:
        before.restore()
        if again() != found:
            return False
        before.restore()
        with session.reference(), session.watched(twin):
            session.step(step)
    except AmpdoctorError:
        return False
    known = reference.weights
    return twin.weights.keys() == known.keys() and all(torch.equal(twin.weights[key], known[key]) for key in known)


def not_compared(step: int) -> str:
    """Returns the reason, as a clause, why nothing is compared in a run with a step that does not come back."""
    return f"run again from the same state, step {step} had other gradients: the run keeps state that no snapshot holds"


# Shadow steps: half-precision steps with the weights, batch and random state of fp32 ones, to check the predictions.
#
# They show what histograms cannot: weight gradients that are made of flushed activation gradients, the rounding of the
# forward, sums in half.


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
