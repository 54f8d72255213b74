"""Replays the run under a change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.gradients import CLEARLY_BETTER
from ampdoctor.diagnosis.replay.scaler import times_begun_again
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import PrescriptionStatus
from ampdoctor.evidence.report_replay import Proof, ReplayedStep
from ampdoctor.probes.gradients import DistanceProbe, GradientProbe
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.ranges import ReferenceGradients, Zeroed, ZeroedProbe
from ampdoctor.workflows.changes import Change, no_change
from ampdoctor.workflows.measure import harmful, not_compared, spread
from ampdoctor.workflows.step_beside_fp32 import AS_FAR
from ampdoctor.workflows.trials import AGREEMENT, replayed

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import StepOutcome
    from ampdoctor.probes.gradients import Gradients
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.measure import Measurement
    from ampdoctor.workflows.step_beside_fp32 import StepComparison


FLUSH_THAT_PAYS = 1e-2
"""Share of the gradients' elements whose loss harmed no run that was seen."""
NOTHING_FAILS = (
    "nothing fails without the change either (gradients {:.2g} away from fp32's without it, {:.2g} with it), so "
    "nothing is shown to be cured"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The result of a replay; fractions refer to the elements that are not zero in fp32."""

    steps: int = 0  # replayed; fewer than asked for if one was harmed
    skipped: tuple[int, ...] = ()
    harmed: str | None = None  # "loss" or "grad:fc.weight", without a skip; a loss also before skips to the end
    harmed_at: int | None = None
    scales: tuple[float, ...] = ()  # of each step; empty without an enabled scaler
    scaled: bool = False  # the step used the scaler that it was given
    compared: tuple[int, ...] = ()  # with fp32; the scaler skipped none of these steps
    found: tuple[Zeroed, ...] = ()  # in the compared steps
    unlike: int | None = None  # a step that is not reproduced, so fp32 saw other data: nothing is compared
    activation_flushed: float | None = None  # a share; None if nothing was compared
    weight_flushed: float | None = None
    errors: tuple[float, ...] = ()  # relative L2 error of the weight gradients, by compared step
    failure: str | None = None  # why the replay could not run
    begun_again: int = 0  # how often the loss scale rose after a skip, because the scaler is made anew
    rows: tuple[ReplayedStep, ...] = ()
    references: tuple[ReplayedStep, ...] = ()  # the compared steps in fp32

    @property
    def settled(self) -> bool:
        """Whether the last step was taken, and nothing was harmed."""
        return self.harmed is None and self.failure is None and self.steps - 1 not in self.skipped

    @property
    def relative_error(self) -> float | None:
        """Median error of the compared steps (one step at a kink of the loss proves nothing); None without any."""
        return statistics.median(self.errors) if self.errors else None

    @property
    def skip_rate(self) -> float:
        """Share of the replayed steps that were skipped."""
        return len(self.skipped) / self.steps if self.steps else 0.0

    def proof(self, now: Observed | None) -> Proof:
        """Returns the proof of this replay of a change; `now` is the replay without the change."""
        return Proof(without=now.rows if now is not None else (), changed=self.rows, fp32=self.references)

    def shares(self) -> dict[str, float]:
        """Returns the shares that the rules read; 0.0 if nothing was compared."""
        return {
            "relative_error": self.relative_error or 0.0,
            "activation_grad": self.activation_flushed or 0.0,
            "weight_grad": self.weight_flushed or 0.0,
        }

    def status(self, *, skips: int = 0) -> tuple[PrescriptionStatus, str | None]:
        """Returns whether this replay proves a cure, and why not; a scaler that settles may skip `skips` steps."""
        if self.failure is not None:
            return "failed", f"the replay with the change fails: {self.failure}"
        if self.harmed is not None:
            return "failed", f"step {self.harmed_at} is still non-finite ({self.harmed})"
        if len(self.skipped) > skips or not self.settled:
            return "failed", f"the scaler still skips {len(self.skipped)} of {self.steps} steps"
        if not self.errors:
            none = "no step could be compared with fp32"
            return "not_run", none if self.unlike is None else not_compared(self.unlike)
        if not max(self.errors) <= AGREEMENT:
            return "failed", f"finite, but the gradients are {max(self.errors):.2g} away from fp32's (relative L2)"
        return "verified", None

    def cures(self, now: Observed | None, *, skips: int = 0) -> tuple[PrescriptionStatus, str | None]:
        """Returns whether this replay proves a cure: of a run that is well (`now`) only by being clearly better."""
        status, reason = self.status(skips=skips)
        if status != "verified" or now is None or self._betters(now):
            return status, reason
        if not (now.settled and now.errors and max(now.errors) <= AGREEMENT):  # not well without it
            return status, reason
        return "not_run", NOTHING_FAILS.format(now.relative_error, self.relative_error)

    def _betters(self, now: Observed) -> bool:
        mine, other = self.shares(), now.shares()
        closer = CLEARLY_BETTER.default * mine["relative_error"] < other["relative_error"]
        if closer or len(self.skipped) < len(now.skipped):
            return True
        return any(other[name] - mine[name] > FLUSH_THAT_PAYS for name in ("activation_grad", "weight_grad"))


Then = Callable[[], Observed | None]
"""Gives the replay with a recommended scaler; None if that is impossible."""


def observe(
    session: Session,
    start: Snapshot,
    steps: int,
    taken: Measurement,
    change: Change = no_change,
    *,
    unlike: int | None = None,
    enough: float = math.inf,
) -> Observed:
    """Replay under a change, up to a step farther from fp32 than `enough`; the session is back at `start`.

    `unlike` is a step that is known not to come back.
    """
    start.restore()
    watch = _Watch(session, taken, spread(steps), unlike=unlike, enough=enough)
    failure = None
    try:
        with change(session):
            watch.run(steps)
    except AmpdoctorError as error:
        failure = str(error)
    finally:
        start.restore()
    return watch.observed(failure)


def observed_alongside(compared: Sequence[StepComparison], steps: int) -> Observed | None:
    """Returns the replay with the run's own scaling from a search's steps; None where it does not show all of them.

    The search has run its first step again, which answers for those about as far from fp32.
    """
    whole = [(c.comparison, c.own, c.zeroed) for c in compared if c.comparison and c.own and c.zeroed]
    errors = tuple(z.relative_error for _, own, z in whole if own.finite and z.relative_error is not None)
    if not len(errors) == len(compared) == steps or max(errors) > max(AGREEMENT, AS_FAR * errors[0]):
        return None
    wide = [(own, c.reference_loss, c.gradient_norm) for c, own, _ in whole]
    return Observed(
        steps=steps,
        scales=tuple(own.scale for _, own, _ in whole if own.scale is not None),
        scaled=any(event.kind == "scale" for c, _, _ in whole for event in c.events),
        compared=tuple(range(steps)),
        found=tuple(z for _, _, z in whole),
        activation_flushed=_share([z for _, _, z in whole], "activation_grad"),
        weight_flushed=_share([z for _, _, z in whole], "weight_grad"),
        errors=errors,
        rows=tuple(own for _, own, _ in whole),
        references=tuple(replace(own, loss=loss, scale=None, gradient_norm=norm) for own, loss, norm in wide),
    )


def _share(found: Sequence[Zeroed], kind: str) -> float | None:
    nonzero, flushed = (
        sum(count for one in counted for place, count in one.items() if place.kind == kind)
        for counted in ([z.nonzero for z in found], [z.flushed for z in found])
    )
    return flushed / nonzero if nonzero else None


class _Watch:
    def __init__(
        self, session: Session, taken: Measurement, compare: frozenset[int], *, unlike: int | None, enough: float
    ) -> None:
        self._session = session
        self._enough = enough
        self._plan = taken.plan
        self._far = taken.far
        self._compare = compare if unlike is None else frozenset()
        run = session.run
        self._ours = run.step is None and run.max_grad_norm is None and not session.master_weights
        """The optimizer gets the backward's gradients unchanged: no clipping, and no step of the user's own."""
        self._times: Mapping[str, int] = {}
        self._nonfinite_probe = NonFiniteProbe()
        self._outcomes: list[StepOutcome] = []
        self._harmed: tuple[str, int] | None = None
        self._lost: int | None = None
        self._compared: list[int] = []
        self._unlike = unlike
        self._found: list[Zeroed] = []
        self._rows: list[ReplayedStep] = []
        self._references: list[ReplayedStep] = []

    def run(self, steps: int) -> None:
        """Run step by step, up to the first that is harmed or too far."""
        nonfinite_probe = self._nonfinite_probe
        with self._session.watched(nonfinite_probe):
            for step in range(steps):
                outcome, norm, affected = self._step(step)
                self._outcomes.append(outcome)
                self._rows.append(replace(replayed(outcome, affected), gradient_norm=norm))
                seen = harmful(affected)
                used = bool(outcome.optimizer_steps) or outcome.skipped or not self._session.optimizers
                nowhere = outcome.skipped or outcome.guarded or not used  # no optimizer got the gradients
                harm = [s for s in seen if not (nowhere and s.startswith("grad:"))]
                if harm == ["loss"] and outcome.loses_updates:
                    # from the forward, or the backward of a gradient penalty: a lower scale cures only the latter
                    self._lost = step if self._lost is None else self._lost
                elif harm:
                    self._harmed = harm[0], step
                if self._harmed or max(self._errors, default=0.0) > self._enough:
                    return

    def _step(self, step: int) -> tuple[StepOutcome, float | None, tuple[str, ...]]:
        session = self._session
        if step not in self._compare:
            return session.step(step), None, self._nonfinite_probe.report.affected
        before, reference, received = self._reference(step)
        zeroed, probe = ZeroedProbe(reference), DistanceProbe(received, self._times)
        with session.watched(zeroed, probe):
            outcome = session.step(step)
        affected = self._nonfinite_probe.report.affected
        self._compared_with(reference, step, before, zeroed.zeroed, outcome)
        handed = received and (outcome.optimizer_steps or not session.optimizers)
        return outcome, math.sqrt(probe.distance.norm) if handed else None, affected

    def _compared_with(
        self, reference: ReferenceGradients, step: int, before: Snapshot, found: Zeroed, outcome: StepOutcome
    ) -> None:
        session = self._session

        def again() -> Zeroed:
            probe = ZeroedProbe(reference)
            with session.watched(probe):
                session.step(step)
            return probe.zeroed

        if self._far.is_open(session, found):
            after = session.snapshot()
            back = self._far.comes_back(session, before, step, reference, found, again)
            after.restore()
            if not back:
                self._forget_compared(unlike=step)
                return
        if not outcome.loses_updates:
            self._compared.append(step)
            self._found.append(found)

    def _forget_compared(self, *, unlike: int) -> None:
        self._unlike, self._compare = unlike, frozenset()
        for gathered in (self._compared, self._found, self._references):
            gathered.clear()

    def _reference(self, step: int) -> tuple[Snapshot, ReferenceGradients, Gradients]:
        """Run the step in fp32, and restore; returns the state before it, and two views of its gradients."""
        session = self._session
        reference, gradients = ReferenceGradients(self._plan), GradientProbe()
        here = session.snapshot()
        with session.reference(), session.watched(reference, *(() if self._ours else (gradients,))):
            wide = session.step(step)
        here.restore()
        received = reference.received(session) if self._ours else gradients.gradients
        self._times = gradients.times
        self._references.append(replayed(wide, self._nonfinite_probe.report.affected, received))
        return here, reference, received

    @property
    def _errors(self) -> tuple[float, ...]:
        return tuple(one.relative_error for one in self._found if one.relative_error is not None)

    def observed(self, failure: str | None) -> Observed:
        outcomes = self._outcomes
        if self._lost is not None and self._harmed is None and outcomes[-1].loses_updates:
            self._harmed = "loss", self._lost
        harmed, at = self._harmed or (None, None)
        return Observed(
            steps=len(outcomes),
            skipped=tuple(o.step for o in outcomes if o.loses_updates),
            harmed=harmed,
            harmed_at=at,
            scales=tuple(o.scale_before for o in outcomes if o.scale_before is not None),
            scaled=any(event.kind == "scale" for o in outcomes for event in o.events),
            compared=tuple(self._compared),
            found=tuple(self._found),
            unlike=self._unlike,
            activation_flushed=_share(self._found, "activation_grad"),
            weight_flushed=_share(self._found, "weight_grad"),
            errors=self._errors,
            failure=failure,
            begun_again=times_begun_again(outcomes, ("", *self._session.optimizers)),
            rows=tuple(self._rows),
            references=tuple(self._references),
        )
