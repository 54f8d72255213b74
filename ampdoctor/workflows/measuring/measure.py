"""Measures a run's ranges in an fp32 replay; one half-precision step tells which tensors are half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdoctor.errors import AmpdoctorError, ReplayError
from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe
from ampdoctor.probes.measures.halves import HalfProbe
from ampdoctor.probes.measures.module_facts import ModuleFactsProbe
from ampdoctor.probes.measures.ranges import RangeProbe
from ampdoctor.probes.measures.updates import UpdateProbe
from ampdoctor.probes.measures.zeroed import ReferenceGradients
from ampdoctor.ranges.profile import RangeProfile, RunFacts
from ampdoctor.workflows.against_fp32.alongside import Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ampdoctor.evidence.of_runs.ranges import Place
    from ampdoctor.evidence.of_runs.trace import StepOutcome
    from ampdoctor.numerics import Histogram
    from ampdoctor.probes.measures.grad_sites import HalfPlan
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.opening.request import Progress

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
