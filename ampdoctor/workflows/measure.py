"""Measures a run's ranges: in an fp32 replay, and in single half-precision steps that check what follows from them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ampdoctor.errors import AmpdoctorError, ReplayError
from ampdoctor.evidence.run_facts import GRADIENTS, Place
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.ranges import RangeProbe, ReferenceGradients, UpdateProbe, Zeroed, ZeroedProbe
from ampdoctor.ranges.profile import RangeProfile, RunFacts, Shadow
from ampdoctor.replay.python_state import has_moved
from ampdoctor.workflows.changes import rescaled
from ampdoctor.workflows.step_beside_fp32 import AS_FAR
from ampdoctor.workflows.trials import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ampdoctor.evidence.trace import StepOutcome
    from ampdoctor.probes.modules import LowPrecisionTensors
    from ampdoctor.replay.python_state import Beyond
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.requests import Progress


Again = Callable[[], Zeroed | None]
DEFAULT_STEPS = 50
COMPARED = 4
"""Number of steps that are examined more closely (updates; comparison with fp32): each costs more than one step."""
SAME_FACTOR = 1e-3
"""Factors of all steps within this relative spread count as one hand-made loss scale; clipping varies by more."""


# -- steps that are far from fp32: are they reproduced? --
# A run may keep state that no snapshot holds: an environment, a replay buffer, a stream. Then the step and its twin in
# fp32 saw different data, and their distance says nothing of precision. Where both agree, the data were the same, and
# nothing is run again.


@dataclass(slots=True)
class FarSteps:
    """Knows whether a session's far steps are reproduced: one that came back answers for those about as far."""

    _error: float = 0.0  # of the farthest one that came back
    _beyond: Beyond = field(default_factory=dict)  # what no snapshot restores, when it had

    def is_open(self, session: Session, found: Zeroed) -> bool:
        """Whether a step is so far from its twin that the two may have seen different data."""
        error = found.relative_error
        if error is None or not AGREEMENT < error < math.inf:
            return False
        return error > AS_FAR * self._error or has_moved(self._beyond, session.reached.beyond())

    def comes_back(  # noqa: PLR0917 - what a step is run again with
        self, session: Session, before: Snapshot, step: int, twin: ReferenceGradients, found: Zeroed, again: Again
    ) -> bool:
        """Whether a step and its twin give the same values when they are run once more, the step first.

        `twin` holds fp32's gradients, `found` the step's beside them, and `again` runs the step from the state before
        it. The session is left in any state.
        """
        anew, known = ReferenceGradients(twin.plan), twin.weights
        try:
            before.restore()
            if again() != found:
                return False
            before.restore()
            with session.reference(), session.watched(anew):
                session.step(step)
        except AmpdoctorError:
            return False
        if anew.weights.keys() != known.keys() or not all(torch.equal(anew.weights[key], known[key]) for key in known):
            return False
        self._error, self._beyond = max(self._error, found.relative_error or 0.0), session.reached.beyond()
        return True


def not_compared(step: int) -> str:
    """Returns the reason, as a clause, why nothing is compared in a run with a step that is not reproduced."""
    return f"run again from the same state, step {step} had other gradients: the run keeps state that no snapshot holds"


# -- the measured steps, in fp32 --


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step, beside which half-precision steps run from the same state."""

    step: int
    state: Snapshot  # before it
    gradients: ReferenceGradients  # in fp32; the step is not run again for them
    counted: Mapping[Place, Histogram]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of measuring a run.

    `moments` are the first and the last measured step, for shadow steps in fp16; () for a bf16 run, or where no
    half-precision step could run. For a half model it is only the first: during its fp32 reference the model is another
    one, and a state that is taken then is not the run's.
    """

    ranges: RangeProfile
    plan: LowPrecisionTensors | None  # which tensors are half; None if no half-precision step could run
    moments: tuple[MeasuredStep, ...] = ()
    notes: list[str] = field(default_factory=list)  # sentences for the report
    far: FarSteps = field(default_factory=FarSteps)


def measure(
    session: Session,
    start: Snapshot,
    steps: int | None,
    progress: Progress | None = None,
    *,
    factory: str = "",
    shadows: bool = True,
    half: FormatsProbe | None = None,
) -> Measurement:
    """Replay up to `steps` steps in fp32 and measure every place; the session is back at `start` afterwards.

    `steps` None means `DEFAULT_STEPS`, or as many as there are batches; without `shadows` no moments are kept. `half`
    has seen a half-precision step already. Raises ReplayError where there is no batch or nothing needs a gradient, and
    AmpdoctorError where the user's code raises.
    """
    wanted = steps or DEFAULT_STEPS
    if not session.has_step(0):
        raise ReplayError("the run has no batch: nothing can be measured")
    half, notes = _half_step(session, start) if half is None else (half, [])
    plan = half.plan if half is not None else None
    probe, updates = RangeProbe(plan), UpdateProbe(spread(wanted))
    in_fp16 = plan if shadows and session.precision.compute != "bf16" else None
    steps_taken = _Steps(session, start, wanted, probe, updates, progress, in_fp16)
    try:
        steps_taken.run()
    finally:
        start.restore()
    by_hand = manual_loss_scale(probe.hand_scales) if session.run.step is not None else 1.0
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
        loss_in_half=half is not None and half.loss_in_half,
        loss_amax=max((x for x in steps_taken.losses if math.isfinite(x)), default=None),
    )
    ranges = probe.profile(
        run,
        nonfinite_steps=tuple(steps_taken.nonfinite),
        modules=half.facts() if half is not None else (),
        updates=updates.facts(),
    )
    if not ranges.gradients:
        raise ReplayError("no gradient was seen: no parameter of the model needs one, or the step runs no backward")
    return Measurement(ranges, plan, tuple(steps_taken.moments), notes)


@dataclass(slots=True)
class _Steps:
    """The reference steps. A snapshot before the last is taken outside the reference, which has no scaler."""

    session: Session
    start: Snapshot
    wanted: int
    ranges: RangeProbe
    updates: UpdateProbe
    progress: Progress | None
    plan: LowPrecisionTensors | None
    done: int = 0
    losses: list[float] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    moments: list[MeasuredStep] = field(default_factory=list)

    def run(self) -> None:
        session = self.session
        self._run(self.start, before_last=self.plan is not None and session.precision.autocast)
        if self._is_there(self.done):
            self._run(session.snapshot(), before_last=False)

    def _run(self, state: Snapshot, *, before_last: bool) -> None:
        """Run steps, the first of them from a state that was kept."""
        nonfinite_probe, first = NonFiniteProbe(), self.done
        with self.session.reference(), self.session.watched(nonfinite_probe, self.ranges, self.updates):
            while self._is_there(self.done):
                if before_last and self.done and not self._is_there(self.done + 1):
                    return
                outcome = self.session.step(self.done) if self.done != first else self._kept(state)
                if harmful(nonfinite_probe.report.affected):
                    self.nonfinite.append(self.done)
                self.done += 1
                if outcome.loss is not None:
                    self.losses.append(abs(outcome.loss))
                if self.progress is not None:
                    self.progress("measuring in fp32", self.done, self.wanted)

    def _kept(self, state: Snapshot) -> StepOutcome:
        if self.plan is None:
            return self.session.step(self.done)
        gradients = ReferenceGradients(self.plan)
        with self.session.watched(gradients):
            outcome = self.session.step(self.done)
        self.moments.append(MeasuredStep(self.done, state, gradients, self.ranges.counted))
        return outcome

    def _is_there(self, step: int) -> bool:
        return step < self.wanted and self.session.has_step(step)


def spread(steps: int) -> frozenset[int]:
    """Returns up to `COMPARED` of the steps, including the first and the last."""
    if steps <= COMPARED:
        return frozenset(range(steps))
    return frozenset(round(i * (steps - 1) / (COMPARED - 1)) for i in range(COMPARED))


def harmful(affected: Sequence[str]) -> list[str]:
    """Returns the non-finite places that harm training, the loss first; a buffer may hold infinities on purpose."""
    return sorted((s for s in affected if not s.startswith("buffer:")), key=lambda s: s != "loss")


def manual_loss_scale(factors: Sequence[float | None]) -> float:
    """Returns the factor by which each step, of at least two, scales its loss by hand, or 1.0."""
    known = [factor for factor in factors if factor is not None and factor > 0.0 and math.isfinite(factor)]
    if len(known) < 2 or len(known) < len(factors):
        return 1.0
    if max(known) / min(known) - 1.0 > SAME_FACTOR or abs(known[0] - 1.0) <= SAME_FACTOR:
        return 1.0
    exponent = round(math.log2(known[0]))
    return 2.0**exponent if abs(known[0] / 2.0**exponent - 1.0) <= SAME_FACTOR else known[0]


def _half_step(session: Session, start: Snapshot) -> tuple[FormatsProbe | None, list[str]]:
    """Run one fp16 step (bf16 for a bf16 run: the same cast lists hold), only to see dtypes, ops and logits."""
    probe = FormatsProbe()
    own = session.precision.compute in ("fp16", "bf16")
    try:
        with nullcontext() if own else session.computing_in("fp16"), session.watched(probe):
            session.step(0)
    except AmpdoctorError as error:
        return None, [f"no half-precision step could be run ({error}): every tensor is counted as half"]
    finally:
        start.restore()
    return probe, []


def _state(session: Session) -> dict[str, float | int] | None:
    state = session.scaler_state
    return None if state is None else {key: value for key, value in state.items() if isinstance(value, int | float)}


def _usable(scale: float | None) -> float:
    """Returns 1.0 for a dead scaler's scale, with which nothing can be measured; a finding of its own reports it."""
    return scale if scale is not None and 0.0 < scale < math.inf else 1.0


# -- shadow steps: half-precision steps with the weights, batch and random state of fp32 ones --
# They check the predictions from histograms, and show what those cannot: weight gradients that are made of flushed
# activation gradients, the rounding of the forward, sums in half.


def shadowed(
    session: Session, taken: Measurement, scales: Sequence[float], progress: Progress | None = None
) -> tuple[RangeProfile, int | None]:
    """Returns the profile with a shadow for each scale, of the first and the last measured step.

    If a step is not reproduced, there is no shadow, and the second value is its number. A scale at which the user's
    code raises has no shadow. The session is back at its start afterwards.
    """
    run, tallies = taken.ranges.run, [_Tally(taken.ranges, scale) for scale in scales]
    unlike = None
    for done, moment in enumerate(reversed(taken.moments)):  # in reverse, so that the run ends at its start
        with nullcontext() if run.precision == "fp16" else session.computing_in("fp16"):
            for tally in tallies if unlike is None else ():
                again = partial(_zeroed, session, moment, tally.scale / run.loss_scale)
                zeroed = again()
                if zeroed is None:
                    continue
                there = session, moment.state, moment.step, moment.gradients
                if not taken.far.is_open(session, zeroed) or taken.far.comes_back(*there, zeroed, again):
                    tally.add(moment.step, zeroed, moment.counted)
                else:
                    unlike = moment.step
        moment.state.restore()
        if progress is not None:
            progress("shadow steps in fp16", done + 1, len(taken.moments))
    shadows = tuple(tally.shadow() for tally in tallies if tally.steps and unlike is None)
    return replace(taken.ranges, shadows=shadows), unlike


def with_replay(ranges: RangeProfile, steps: Sequence[int], found: Sequence[Zeroed]) -> RangeProfile:
    """Returns the profile with what a replay at the run's own scale flushed in some steps, beside what it predicts."""
    counted = {site.place: histogram for site, histogram in zip(ranges.sites, ranges.histograms, strict=True)}
    tally = _Tally(ranges, ranges.run.loss_scale)
    for step, zeroed in zip(steps, found, strict=True):
        tally.add(step, zeroed, counted)
    return replace(ranges, shadows=(tally.shadow(),)) if found else ranges


def _zeroed(session: Session, moment: MeasuredStep, factor: float) -> Zeroed | None:
    """Run the step once, its loss scaled by `factor` more; None if the run's scale is dead, or the code raises."""
    moment.state.restore()
    scale = session.events.scale()
    if scale is not None and not 0.0 < scale < math.inf:
        return None
    probe = ZeroedProbe(moment.gradients, factor=factor)
    # attach the probe first: it sees a half parameter's gradient before the factor is divided out in half
    other = nullcontext() if factor == 1.0 else rescaled(factor)(session)
    try:
        with session.watched(probe), other:
            session.step(moment.step)
    except AmpdoctorError:
        return None  # the user's own asserts fail at this scale
    return probe.zeroed


class _Tally:
    def __init__(self, ranges: RangeProfile, scale: float) -> None:
        self._ranges = ranges
        self.scale = scale
        self._measured: Counter[Place] = Counter()
        self._nonzero: Counter[Place] = Counter()
        self._predicted: Counter[Place] = Counter()
        self._errors: list[float] = []
        self._expected: list[float] = []
        self.steps: list[int] = []

    def add(self, step: int, zeroed: Zeroed, counted: Mapping[Place, Histogram]) -> None:
        """Add a step: the measured values, and what histograms in fp32 predict for as many elements."""
        self.steps.append(step)
        self._nonzero += zeroed.nonzero
        self._measured += zeroed.flushed
        weights = Histogram.empty()
        for place, histogram in ((place, counted[place]) for place in counted if place in zeroed.nonzero):
            share = histogram.flushed("fp16", self._ranges.factor(place.kind, self.scale))
            self._predicted[place] += share * zeroed.nonzero[place]  # type: ignore[assignment]  # a weight
            if place.kind == "weight_grad":
                weights = weights + histogram
        if zeroed.relative_error is not None:
            self._errors.append(zeroed.relative_error)
        self._expected.append(weights.relative_error("fp16", self._ranges.factor("weight_grad", self.scale)))

    def shadow(self) -> Shadow:
        places = [site.place for site in self._ranges.sites if site.kind in GRADIENTS]
        return Shadow(
            scale=self.scale,
            steps=tuple(sorted(self.steps)),
            nonzero=np.array([self._nonzero[place] for place in places], dtype=np.int64),
            flushed=np.array([self._measured[place] for place in places], dtype=np.int64),
            predicted=np.array([self._predicted[place] for place in places], dtype=np.float64),
            relative_error=statistics.median(self._errors) if self._errors else None,
            predicted_error=statistics.median(self._expected) if self._expected else None,
        )
