"""Compares steps with fp32 while they are replayed: each step first in fp32, then back, then as the run takes it.

No step is run a second time for the comparison, and of the step itself no gradient is copied: it is held beside fp32's
where the optimizer gets it, and fp32's is let go. Whoever keeps state outside of snapshots is stepped twice a step by
this. So it is only for runs that are not seen to move any (`Reached.beyond`) and do nothing after a step (an average of
the weights would take fp32's for its own), and only once one step was seen to come back: `Alongside.proves`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdoctor.errors import AmpdoctorError
from ampdoctor.numerics import extremes
from ampdoctor.probes.cheap.gradients import DistanceProbe
from ampdoctor.probes.cheap.nonfinite import first_difference
from ampdoctor.replay.snapshot import tensors_of
from ampdoctor.workflows.against_fp32.moves import Kept, kept, moved
from ampdoctor.workflows.against_fp32.side_by_side import (
    Beside,
    Observed,
    all_finite,
    compared,
    overflowed,
    stepped,
)

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StepOutcome
    from ampdoctor.hooks.process_state import RandomState
    from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe
    from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import Snapshot


class DoesNotComeBackError(Exception):
    """A step that was put back and run again gave other values: the run holds state that no snapshot holds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What tells a step from another run of it.

    Attributes:
        observed: What the non-finite probe saw.
        left: The smallest and the largest element of each tensor that the model has after it, spelled out: an optimizer
            that counts by itself takes another step with the same gradients.
    """

    observed: Observed
    left: tuple[str, ...]

    @classmethod
    def of(cls, session: Session, sentinel: NonFiniteProbe) -> Seen:
        """Of the step that has just run."""
        pairs = (extremes(tensor) for _, tensor in tensors_of(session.model))
        return cls(sentinel.observed, tuple(repr(float(end)) for pair in pairs for end in pair))


@dataclass(slots=True)
class Twin:
    """A step in fp32, for the step that follows from the same state.

    Attributes:
        probe: Holds the step's gradients beside fp32's.
        before: What the run keeps, before the step.
        moved: How that moved in fp32.
        outcome: How the step ended in fp32.
        finite: fp32's gradients are.
    """

    probe: DistanceProbe
    before: Kept
    moved: Kept
    outcome: StepOutcome
    finite: bool


@dataclass(slots=True)
class Alongside:
    """Gathers what the steps of pass 1 show beside fp32.

    Attributes:
        steps: How many steps are compared at most; None for all.
        seen: By step. A step that is not in it has to be run again to be compared.
    """

    steps: int | None = None
    seen: dict[int, Beside] = field(default_factory=dict)
    _proved: bool = False
    _gone: bool = False

    def wants(self, session: Session, step: int) -> bool:
        """Is the step to be compared in passing?"""
        return session.run.after_step is None and not self._gone and (self.steps is None or step < self.steps)

    @property
    def proved(self) -> bool:
        """A step was seen to come back, after a step in fp32 as well."""
        return self._proved

    def gives_up(self) -> None:
        """The run keeps state of its own: no step is run before the step itself."""
        self._gone = True

    def twin(self, session: Session, step: int, snapshot: Snapshot, random_state: RandomState) -> Twin | None:
        """Run the step in fp32 and come back; None if it cannot be run so, and no further step is then tried.

        Args:
            session: The run, before the step, whose batch is drawn.
            step: The step.
            snapshot: The state before it.
            random_state: The generators' states before it.
        """
        before = kept(session)
        try:
            with session.reference():
                wide, outcome = stepped(session, step)
                there = moved(session, before)
        except AmpdoctorError:
            self._gone = True  # the comparison says why, when it comes to this step
            return None
        finally:
            snapshot.restore()
            random_state.restore()
        return Twin(DistanceProbe(wide.gradients, wide.times), before, there, outcome, all_finite(wide))

    def proves(self, step: int, first: Seen, again: Seen) -> None:
        """Is the step, run again after its twin, the same, and does it leave the same state?

        Args:
            step: The step.
            first: What was seen of it before.
            again: What was seen of it now.

        Raises:
            DoesNotComeBackError: It is not.
        """
        if first_difference(first.observed, again.observed) is not None or first.left != again.left:
            raise DoesNotComeBackError(f"step {step}")
        self._proved = True

    def note(self, session: Session, twin: Twin, outcome: StepOutcome, sentinel: NonFiniteProbe) -> None:
        """Keep what the step shows beside its twin, where it can be compared.

        Args:
            session: The run, after the step.
            twin: The step in fp32.
            outcome: How the step ended.
            sentinel: The probe that watched it.

        Raises:
            DoesNotComeBackError: fp32 is not finite where the step is.
        """
        step = outcome.step
        if outcome.loses_updates:
            self.seen[step] = Beside()
        elif overflowed(sentinel) and outcome.optimizer_steps < twin.outcome.optimizer_steps:
            self.seen[step] = Beside(held=True)
        elif not twin.finite and not sentinel.sightings.sinks:  # in half it is: it may count its calls
            raise DoesNotComeBackError(f"step {step}")
        elif outcome.optimizer_steps == twin.outcome.optimizer_steps:
            here = moved(session, twin.before)
            pair = outcome, twin.outcome
            self.seen[step] = Beside(
                compared(session, step, pair, twin.probe.distances, (twin.before, here, twin.moved))
            )
