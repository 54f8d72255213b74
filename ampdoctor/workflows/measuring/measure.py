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
from ampdoctor.ranges.profile import RangeProfile, RunFacts

if TYPE_CHECKING:
    from ampdoctor.loop.probe import Probe
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
class Measurement:
    """The result of measuring a run.

    Attributes:
        ranges: The profile.
        plan: Which tensors are half; None if no half-precision step could be run.
        late: The last measured step and the run's state before it: a second start for a shadow step, beside step 0.
            None for a half model, whose reference is a different model while it lasts.
        notes: For the report, in sentences.
    """

    ranges: RangeProfile
    plan: HalfPlan | None
    late: tuple[int, Snapshot] | None = None
    notes: list[str] = field(default_factory=list)


def measure(
    session: Session, start: Snapshot, steps: int | None, progress: Progress | None = None, *, factory: str = ""
) -> Measurement:
    """Replay up to `steps` steps in fp32 and measure every place; the session is back at `start` afterwards.

    Args:
        session: A run at its start.
        start: Its snapshot.
        steps: Most optimizer steps to replay; None for `DEFAULT_STEPS`, or as many as there are batches.
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
    half, facts, notes = _half_step(session, start)
    probe, updates = RangeProbe(half.plan if half is not None else None), UpdateProbe(spread(wanted))
    steps_taken = _Steps(session, wanted, (probe, updates), progress)
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
        loss_scale=_usable(session.events.scale()) * by_hand,
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
    return Measurement(ranges, half.plan if half is not None else None, steps_taken.late, notes)


class _Steps:
    """The reference steps, with a snapshot before the last. It is taken outside the reference, which has no scaler."""

    def __init__(self, session: Session, wanted: int, probes: tuple[Probe, ...], progress: Progress | None) -> None:
        self._session = session
        self._wanted = wanted
        self._probes = probes
        self._progress = progress
        self._done = 0
        self.losses: list[float] = []
        self.nonfinite: list[int] = []
        self.late: tuple[int, Snapshot] | None = None

    def run(self) -> None:
        """Run all reference steps."""
        self._run(before_last=self._session.precision.autocast)
        if self._is_there(self._done):
            self.late = self._done, self._session.snapshot()
            self._run(before_last=False)

    def _run(self, *, before_last: bool) -> None:
        sentinel = NonFiniteProbe()
        with self._session.reference(), self._session.watched(sentinel, *self._probes):
            while self._is_there(self._done):
                if before_last and self._done and not self._is_there(self._done + 1):
                    return
                outcome = self._session.step(self._done)
                if harms(sentinel.sightings.sinks):
                    self.nonfinite.append(self._done)
                self._done += 1
                if outcome.loss is not None:
                    self.losses.append(abs(outcome.loss))
                if self._progress is not None:
                    self._progress("measuring in fp32", self._done, self._wanted)

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


def _half_step(session: Session, start: Snapshot) -> tuple[HalfProbe | None, ModuleFactsProbe | None, list[str]]:
    """Run one fp16 step (bf16 for a bf16 run: the same cast lists hold), only to see dtypes, ops and logits."""
    probe, facts = HalfProbe(), ModuleFactsProbe()
    compute = session.precision.compute
    try:
        if compute in ("fp16", "bf16"):
            with session.watched(probe, facts):
                session.step(0)
        else:
            with session.computing_in("fp16"), session.watched(probe, facts):
                session.step(0)
    except AmpdoctorError as error:
        return None, None, [f"no half-precision step could be run ({error}): every tensor is counted as half"]
    finally:
        start.restore()
    return probe, facts, []


def _state(session: Session) -> dict[str, float | int] | None:
    if not session.events.enabled:
        return None
    return {key: value for key, value in session.scaler.state_dict().items() if isinstance(value, int | float)}


def _usable(scale: float | None) -> float:
    """Returns 1.0 for a dead scaler's scale, with which nothing can be measured; a finding of its own reports it."""
    return scale if scale is not None and 0.0 < scale < math.inf else 1.0
