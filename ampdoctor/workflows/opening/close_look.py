"""The close look runs the step that fired once more: traced op by op, or searched by halving if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.replay.nondeterministic_replay import nondeterministic_finding
from ampdoctor.evidence.report import Skipped
from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe, Observation, first_difference
from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.workflows.opening.layer_search import LayerSearch, SearchLost

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StepOutcome, Trace
    from ampdoctor.evidence.report import Finding
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.opening.open_replay import OpenReplay


@dataclass(slots=True)
class CloseLook:
    """Runs a step again with every op watched, from its snapshot or, if that does not rewind, from a fresh run.

    Attributes:
        replay: Makes fresh sessions.
        session: The run under examination; once snapshots turn out not to rewind, another session from the factory.
        rewinds: Snapshots bring a step back bit by bit.
        deterministic: Every repeated step came back bit by bit, from a snapshot or from a fresh run.
        findings: Findings about the replay itself.
        partial_replays: Replays that a search ended before the end of the step.
        left_out: What the looks could not find out.
    """

    replay: OpenReplay
    session: Session = field(init=False)
    rewinds: bool = True
    deterministic: bool = True
    findings: list[Finding] = field(default_factory=list)
    partial_replays: int = 0
    left_out: list[Skipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.replay.session()

    def sentinel(self) -> NonFiniteProbe:
        """Returns the probe for pass 1; a search by halving, or of thousands of steps, need not know where harm is."""
        return NonFiniteProbe(locate=not self._bisects and not self.replay.request.until_sick)

    def described(self) -> dict[str, Any]:
        """Returns the part of the report's `run` section on the close look."""
        run: dict[str, Any] = {"deterministic": self.deterministic, "strategy": self.replay.request.strategy}
        return {**run, "partial_replays": self.partial_replays} if self._bisects else run

    @property
    def _bisects(self) -> bool:
        return self.replay.request.strategy == "bisect"

    def trace(self, snapshot: Snapshot, outcome: StepOutcome, sentinel: NonFiniteProbe) -> Trace | None:
        """Trace the same step again; None if not even a fresh run brings it back.

        Args:
            snapshot: The state before the step.
            outcome: How the step ended.
            sentinel: The probe that watched it; it watches the step again.
        """
        trace = self._trace(snapshot, outcome, sentinel)
        if trace is not None:
            self.left_out += [
                Skipped(
                    what=f"step {outcome.step}: {one.what}",
                    reason=f"looking at {one.op} failed ({one.reason}): a defect of ampdoctor's, please report it",
                )
                for one in trace.left_out
            ]
        return trace

    def _trace(self, snapshot: Snapshot, outcome: StepOutcome, sentinel: NonFiniteProbe) -> Trace | None:
        seen, step = sentinel.observed, outcome.step
        if not self.rewinds:
            return self._from_the_start(step, seen, go_on=False)
        if (
            self._bisects
            and outcome.raised is None
            and (found := self._searched(snapshot, outcome, sentinel)) is not None
        ):
            return found
        tracer = OpTraceProbe()
        snapshot.restore()
        with self.session.watched(sentinel, tracer):
            again = self.session.attempt(step)
        differs = first_difference(seen, sentinel.observed)
        if differs is None and (again.optimizer_steps, again.skipped) == (outcome.optimizer_steps, outcome.skipped):
            return tracer.trace
        self.rewinds = False
        fresh = self._from_the_start(step, seen, go_on=True)
        if fresh is not None or differs is None:
            return fresh
        self.deterministic = False
        self.findings.append(nondeterministic_finding(step, *differs))
        return tracer.trace

    @contextmanager
    def started_again(self, step: int) -> Iterator[Session]:
        """Yields a fresh run at the start of a step: the way back if snapshots do not rewind."""
        session = self.replay.session()
        try:
            for earlier in range(step):
                if session.has_step(earlier):
                    session.step(earlier)
                session.keep_steps(lambda later, now=earlier: later > now)  # type: ignore[misc]
            yield session
        finally:
            self.session.count_with(session)
            session.close()

    def _searched(self, snapshot: Snapshot, outcome: StepOutcome, sentinel: NonFiniteProbe) -> Trace | None:
        """Returns what halving finds; None if its premise does not hold and the whole step has to be traced."""
        search = LayerSearch(self.session, snapshot, outcome, sentinel)
        try:
            return search.trace()
        except SearchLost as lost:
            self.replay.notes.append(f"step {outcome.step}: traced instead of searched by halving: {lost}")
            return None
        finally:
            self.partial_replays += search.partial_replays

    def _from_the_start(self, step: int, seen: Sequence[Observation], *, go_on: bool) -> Trace | None:
        """A fresh factory call replayed from step 0: the reference where state hides from snapshots.

        With `go_on` the search continues in the fresh run: in the old one, state outside snapshots has moved on twice.
        """
        session = self.replay.session()
        sentinel, tracer = self.sentinel(), OpTraceProbe()
        try:
            for earlier in range(step):
                if not session.has_step(earlier):
                    return None
                session.step(earlier)
                session.keep_steps(lambda later, now=earlier: later > now)  # type: ignore[misc]
            if not session.has_step(step):
                return None
            with session.watched(sentinel, tracer):
                session.attempt(step)
            same = first_difference(seen, sentinel.observed) is None
            if same and go_on:
                self.session, session = session, self.session
        finally:
            self.session.count_with(session)
            session.close()
        return tracer.trace if same else None
