"""Goes back to the step that fired and runs it once more, traced op by op."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.replay.outcome import nondeterministic_finding
from ampdoctor.evidence.report import Skipped
from ampdoctor.evidence.trace import StepOutcome, Trace
from ampdoctor.probes.nonfinite import NonFiniteProbe, Observation, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.snapshot import Snapshot
from ampdoctor.workflows.trials import AFTER

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.hooks.process_state import RandomState
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.open_replay import OpenReplay


# -- the step that fired, once more --


@dataclass(slots=True)
class StepTracer:
    """Runs a step again with every op watched, from its snapshot or, where that does not reproduce it, a fresh run."""

    replay: OpenReplay
    session: Session = field(init=False)  # replaced by a fresh one once snapshots do not reproduce a step
    rewinds: bool = True  # restoring a snapshot reproduces a step bit by bit
    deterministic: bool = True  # each repeated step was the same bit by bit, from a snapshot or a fresh run
    findings: list[Finding] = field(default_factory=list)  # about the replay itself
    left_out: list[Skipped] = field(default_factory=list)  # what could not be found out

    def __post_init__(self) -> None:
        self.session = self.replay.session()

    def nonfinite_probe(self) -> NonFiniteProbe:
        """Returns the probe for pass 1; a run of thousands of steps needs no location of the harm."""
        return NonFiniteProbe(locate=not self.replay.request.until_sick)

    def described(self) -> dict[str, Any]:
        """Returns this part of the report's `run` section."""
        return {"deterministic": self.deterministic}

    def trace(self, snapshot: Snapshot, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> Trace | None:
        """Trace the same step again with the same probe; None if not even a fresh run reproduces it."""
        trace = self._trace(snapshot, outcome, nonfinite_probe)
        if trace is not None:
            self.left_out += [
                Skipped(
                    what=f"step {outcome.step}: {one.what}",
                    reason=f"looking at {one.op} failed ({one.reason}): a defect of ampdoctor's, please report it",
                )
                for one in trace.left_out
            ]
        return trace

    def _trace(self, snapshot: Snapshot, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> Trace | None:
        seen, step = nonfinite_probe.observed, outcome.step
        if not self.rewinds:
            return self._from_the_start(step, seen, go_on=False)
        tracer = OpTraceProbe()
        snapshot.restore()
        with self.session.watched(nonfinite_probe, tracer):
            again = self.session.attempt(step)
        differs = first_difference(seen, nonfinite_probe.observed)
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
        """Yields a fresh run at the start of a step; the body may make it `self.session`, which is then kept."""
        before, session = self.session, self.replay.session()
        try:
            for earlier in range(step):
                if session.has_step(earlier):
                    session.step(earlier)
                session.keep_steps(lambda later, now=earlier: later > now)  # type: ignore[misc]
            yield session
        finally:
            unused = before if self.session is session else session
            self.session.count_with(unused)
            unused.close()

    def _from_the_start(self, step: int, seen: Sequence[Observation], *, go_on: bool) -> Trace | None:
        """Rebuild the run and replay from step 0; with `go_on` the rebuilt one is used from then on."""
        nonfinite_probe, tracer = self.nonfinite_probe(), OpTraceProbe()
        with self.started_again(step) as session:
            if not session.has_step(step):
                return None
            with session.watched(nonfinite_probe, tracer):
                session.attempt(step)
            same = first_difference(seen, nonfinite_probe.observed) is None
            if same and go_on:
                self.session = session
        return tracer.trace if same else None


# -- the way back to a step --
# A snapshot now and then, and the random state of each step since. A snapshot before each step would slow every step;
# without any, each return would replay from the start. The distance between snapshots depends on the number of steps
# and not on a clock, so that a report comes out the same twice.

TRIED = AFTER + 1
"""Steps after a bad one that a trial may replay: one more than `AFTER`, in case it leaves the bad one out."""


def stretch(steps: int) -> int:
    """Returns the number of steps (at least 1) from one snapshot to the next in a run of `steps`.

    A snapshot costs r steps, and a return replays half a stretch on average: steps * r / k + k / 2 is least at k =
    sqrt(2 r steps). Measured: r = 0.04 (46 million parameters with AdamW, 512 tokens a step, one CPU core), and more
    where a step is smaller. r = 1/8 gives sqrt(steps) / 2: each of the usual 8 steps, every 15th of 1,000, and at most
    1 / sqrt(steps) of the run's steps for a return.
    """
    return max(1, math.isqrt(steps) // 2)


@dataclass(slots=True)
class SnapshotRing:
    """Restores the start of the step that has just run, from the nearest of one or two snapshots before it."""

    steps: int  # of the whole run
    behind: int = 0
    _states: dict[int, RandomState] = field(default_factory=dict)
    _session: Session | None = None
    _ring: deque[tuple[int, Snapshot]] = field(default_factory=deque)
    _last: RandomState | None = None
    _fired: bool = False
    _given: list[tuple[int, weakref.ref[Snapshot]]] = field(default_factory=list)

    def passes(self, session: Session, step: int, *, exact: bool = False) -> None:
        """Remember a step's random state, its batches drawn; take a snapshot if one is due, or `exact`."""
        self._last = self._states[step] = session.random_state(self._last)
        due = exact or self.is_due(session, step)
        if session is not self._session:
            self._ring.clear()
        self._let_go(step)
        if due:
            if not self.behind:
                self._ring.clear()  # never two of them
            elif len(self._ring) > 1:  # taken because of a failure; the older one reaches back far enough
                self._ring.pop()
            self._ring.append((step, session.snapshot()))
            self._session, self._fired = session, False
        session.keep_steps(self._is_needed)

    def is_due(self, session: Session, step: int) -> bool:
        """Whether to take a snapshot before this step."""
        if self._fired or not self._ring or session is not self._session:
            return True
        return step - self._ring[-1][0] >= max(stretch(self.steps), self.behind)

    def random_state(self, step: int) -> RandomState:
        """Returns the generators' states at the start of a step, after its batches were drawn."""
        return self._states[step]

    def also(self, step: int, snapshot: Snapshot) -> None:
        """Keep the batches that a trial from this snapshot, held elsewhere, may need, as long as it lives."""
        self._given.append((step, weakref.ref(snapshot)))

    @property
    def nearest(self) -> Snapshot:
        """The last snapshot."""
        return self._nearest[1]

    @property
    def begin(self) -> int:
        """The first step that can be restored; 0 where no step has begun."""
        return self._ring[0][0] if self._ring else 0

    @property
    def farthest(self) -> Snapshot:
        """The snapshot before step `begin`."""
        return self._ring[0][1]

    @property
    def _nearest(self) -> tuple[int, Snapshot]:
        if not self._ring:
            raise AssertionError("no step has begun")
        return self._ring[-1]

    def to(self, step: int) -> Snapshot:
        """Returns the state before `step`, the last one given to `passes`; the session stays where it is."""
        session, (at, snapshot) = self._session, self._nearest
        self._fired = True
        if session is not None and at < step:
            now = session.snapshot()
            snapshot.restore()
            for earlier in range(at, step):
                self._states[earlier].restore()
                session.step(earlier)
            self._states[step].restore()
            snapshot = session.snapshot()
            now.restore()
        self._given = [(at, given) for at, given in self._given if given() is not None]
        self._given.append((step, weakref.ref(snapshot)))
        return snapshot

    def _let_go(self, step: int) -> None:
        while len(self._ring) > 1 and self._ring[1][0] <= step - self.behind:
            self._ring.popleft()
        for old in [earlier for earlier in self._states if earlier < self.begin]:
            del self._states[old]

    def _is_needed(self, step: int) -> bool:
        """Whether this step's batches may be needed again: on the way back, or by a trial from a snapshot in use."""
        return step >= self.begin or any(at <= step <= at + TRIED for at, given in self._given if given() is not None)
