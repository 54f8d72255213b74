"""Watches, while the run is replayed as it is, whether a search for causes other than the loss scale could find any.

`bisect-nan` would run the same steps again, each beside fp32. Where they come back bit by bit, stay finite, are taken,
and no rule sees anything in the comparison, it would find nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.starved_parameters import starved
from ampdoctor.probes.cheap.nonfinite import first_difference
from ampdoctor.replay.python_state import Beyond, has_moved
from ampdoctor.workflows.against_fp32.alongside import Alongside, DoesNotComeBackError, Seen, Twin
from ampdoctor.workflows.against_fp32.rewinding import is_calm
from ampdoctor.workflows.against_fp32.single_updates import is_quiet

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison, StepOutcome
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe
    from ampdoctor.replay.session import Session


@dataclass(slots=True)
class Calm:
    """Gathers what the first steps of a replay show.

    Args:
        first: The first step as it was seen before, from the same state; None if it was not.
        steps: Number of steps that a search would run.
        thresholds: What its rules go by.
    """

    first: Seen | None
    steps: int
    thresholds: Thresholds
    _alongside: Alongside = field(default_factory=Alongside)
    _own: Beyond = field(default_factory=dict)
    _quiet: int = 0
    _compared: list[Comparison] = field(default_factory=list)

    def wants(self, session: Session, step: int) -> bool:
        """Is a step to be held beside fp32? Not once one was seen in which something might be found.

        Args:
            session: The run, before the step.
            step: The step.
        """
        self._own = session.reached.beyond()
        here = self.first is not None and self._quiet == step < self.steps
        return here and self._alongside.wants(session, step)

    def note(self, session: Session, twin: Twin, outcome: StepOutcome, sentinel: NonFiniteProbe) -> None:
        """Look at a step that was held beside fp32.

        Args:
            session: The run, after the step.
            twin: The step in fp32.
            outcome: How the step ended.
            sentinel: The probe that watched it.
        """
        if outcome.skipped or sentinel.sightings.sinks or has_moved(self._own, session.reached.beyond()):
            return
        if outcome.step == 0 and not self._comes_back(Seen.of(session, sentinel)):
            return
        try:
            self._alongside.note(session, twin, outcome, sentinel)
        except DoesNotComeBackError:
            return
        beside = self._alongside.seen.get(outcome.step)
        if beside is not None and beside.comparison is not None:
            self._compared.append(beside.comparison)
            self._quiet += is_calm(beside.comparison, self.thresholds)

    @property
    def throughout(self) -> bool:
        """Would a search find nothing?"""
        hungry = starved(self._compared, self.thresholds)
        return self._quiet >= self.steps and not hungry and is_quiet(self._compared, self.thresholds)

    def _comes_back(self, again: Seen) -> bool:
        first = self.first
        if first is None or first.left != again.left:
            return False
        return first_difference(first.observed, again.observed) is None
