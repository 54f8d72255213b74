"""Goes back to the step that fired and runs it once more: traced op by op, or searched by halving."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.replay.outcome import nondeterministic_finding
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Skipped
from ampdoctor.evidence.trace import NonFiniteOrigin, StepOutcome, Trace
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.probes.halving import Interval, IntervalTrace, OrderProbe, Point, PointProbe, UpdateTrace
from ampdoctor.probes.nonfinite import NonFiniteProbe, Observation, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.snapshot import Snapshot, process_settings
from ampdoctor.workflows.trials import AFTER

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.hooks.interfaces import Probe
    from ampdoctor.hooks.process_state import RandomState
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.open_replay import OpenReplay


# `--strategy bisect`: halves the order of a step's layers, then traces the one interval that turns bad. One partial
# replay records the order of the step's points. Each further one reads one point and ends the step there. The last one
# traces the ops between the last good and the first bad point: at most ceil(log2(n + 1)) + 2 partial replays for n
# points. The premise is that a bad value stays bad, in the order of the points, up to the harm that pass 1 saw. A
# masked NaN, a healthy infinity, a branch beside a bad one, or a value that bypasses the points breaks it. The search
# notices this: no op of the interval made the bad value, or a whole replay that follows it does not reach the harm.
# Then every op of the step is traced.


class SearchLost(Exception):  # noqa: N818 - no error: a reason to look at the whole step
    """The search's premise does not hold; the message says why."""


@dataclass(slots=True)
class LayerSearch:
    """Searches one step that did harm, from the snapshot before it; the session's state is the same afterwards."""

    session: Session
    snapshot: Snapshot
    outcome: StepOutcome
    nonfinite_probe: NonFiniteProbe
    partial_replays: int = field(default=0, init=False)  # ended before the step was over

    def trace(self) -> Trace:
        """Returns the origins behind the harm that pass 1 saw; raises SearchLost where halving cannot find them."""
        affected = self.nonfinite_probe.report.affected
        forward = "loss" in affected
        gradients = any(target.startswith("grad:") for target in affected)
        if not forward and not gradients:
            if not affected or any(target.startswith("buffer:") for target in affected):
                raise SearchLost("neither the loss nor a gradient nor an optimizer's state is harmed")
            with self._keeping_the_state():
                return self._traced_update()
        with self._keeping_the_state():
            interval = self._searched(forward=forward)
            tracer = IntervalTrace(interval)
            self._partly(tracer)
            self._check(tracer.reached)
            return self._followed(interval, "loss" if forward else "grad:")

    # -- search --

    def _searched(self, *, forward: bool) -> Interval:
        """Returns the interval between the last good point and the first bad one."""
        seen = enumerate(self._gradients_seen(self.nonfinite_probe))
        harmed = next((i for i, (_, value) in seen if not math.isfinite(value)), None)
        if harmed is None and not forward:
            raise SearchLost("no gradient of the model's own parameters is harmed")
        order = OrderProbe(None if harmed is None else harmed + 1)
        self._partly(order)
        points = order.points
        end = len(points) if harmed is None else self._place_of_gradient(points, harmed)
        line = self._line(points, end, forward=forward)
        if not line:
            raise SearchLost("no module returned a floating-point tensor before the harm")
        bad = bisect_left(range(len(line)), True, key=lambda at: self._is_bad(points[line[at]]))
        before = line[bad - 1] if bad else line[0] - 1
        after = points[before] if before >= 0 else None
        # what lies between the last point and the harm belongs to the step's end
        later = [points[line[bad]]] if bad < len(line) else [] if forward else points[end:]
        until = later[0] if later else None
        if until is None or until.kind == "output":
            return Interval(after=after, until=until)
        oldest = next((point.sequence for point in later if point.kind == "arrival"), None)
        newest = after.sequence if after is not None and after.kind == "arrival" else None
        return Interval(
            after=after,
            until=until,
            oldest=-math.inf if oldest is None else oldest,
            newest=math.inf if newest is None else newest,
        )

    def _line(self, points: Sequence[Point], end: int, *, forward: bool) -> list[int]:
        """Returns the places of the points before the harm at `end`, in its round of forward and backward."""
        turn = points[end].turn if end < len(points) else points[-1].turn if points else 0
        outputs = forward or self.outcome.loss is None
        return [
            place
            for place, point in enumerate(points[:end])
            if point.turn == turn
            and (
                (point.kind == "output" and not point.recompute and outputs)
                or (point.kind == "arrival" and not forward)
            )
        ]

    def _gradients_seen(self, nonfinite_probe: NonFiniteProbe) -> list[tuple[str, float]]:
        names = self.session.parameter_names()
        own = {names[id(parameter)] for parameter in self.session.model.parameters()}
        return [(one.name, one.value) for one in nonfinite_probe.observed if one.kind == "grad" and one.name in own]

    def _place_of_gradient(self, points: Sequence[Point], index: int) -> int:
        places = [place for place, point in enumerate(points) if point.kind == "gradient"]
        expected = [name for name, _ in self._gradients_seen(self.nonfinite_probe)[: index + 1]]
        if [points[place].name for place in places[: index + 1]] != expected:
            raise SearchLost("the gradients came in another order than before")
        return places[index]

    def _is_bad(self, point: Point) -> bool:
        probe = PointProbe(point)
        self._partly(probe)
        if probe.bad is None:
            raise SearchLost(f"the step did not get to {point.name or 'the model'} again")
        return probe.bad

    # -- checks of the interval --

    def _check(self, origins: Sequence[NonFiniteOrigin]) -> None:
        if not origins:
            raise SearchLost("nothing non-finite was born where the search ended")
        for origin in origins:
            if origin.came_from == "constant" or any(read.nans or read.infs for read in origin.inputs):
                raise SearchLost("where the search ended, a non-finite value comes from elsewhere")

    def _followed(self, interval: Interval, harm: str) -> Trace:
        """Follow the origins in a whole replay to the harm that pass 1 saw; a masked origin does not reach it."""
        tracer = IntervalTrace(interval, follow=True)
        self.snapshot.restore()
        process = process_settings()
        try:
            with self.session.watched(tracer):
                self.session.step(self.outcome.step)
        except AmpdoctorError as error:
            raise SearchLost(f"the step cannot be followed to its end: {error}") from error
        finally:
            process()
        if tracer.trace is None:
            raise SearchLost("the step did not get to its end again")
        origins = tuple(origin for origin in tracer.trace.origins if origin.affected)
        if not any(target.startswith(harm) for origin in origins for target in origin.affected):
            raise SearchLost("what was born where the search ended does no harm")
        self._check(origins)
        return replace(tracer.trace, origins=origins, unattributed=())

    def _traced_update(self) -> Trace:
        tracer = UpdateTrace()
        self._partly(tracer)
        trace = tracer.trace
        origins = [origin for origin in trace.origins if origin.affected] if trace is not None else []
        if (
            trace is None
            or trace.unattributed
            or not origins
            or any(origin.came_from == "constant" for origin in origins)
        ):
            raise SearchLost("what harms the state was not made after the backward")
        return trace

    # -- replays --

    def _partly(self, probe: Probe) -> None:
        session = self.session
        self.snapshot.restore()
        process, replays, of_step = process_settings(), session.replays, session.replays_of[self.outcome.step]
        self.partial_replays += 1
        try:
            with session.watched(probe):
                session.step(self.outcome.step)
        except StepHalted:
            pass
        except AmpdoctorError as error:
            raise SearchLost(f"a partial replay could not run: {error}") from error
        finally:
            process()
            session.replays, session.replays_of[self.outcome.step] = replays, of_step

    @contextmanager
    def _keeping_the_state(self) -> Iterator[None]:
        after = self.session.snapshot()
        try:
            yield
        finally:
            after.restore()


# -- the step that fired, once more --


@dataclass(slots=True)
class StepTracer:
    """Runs a step again with every op watched, from its snapshot or, where that does not reproduce it, a fresh run."""

    replay: OpenReplay
    session: Session = field(init=False)  # replaced by a fresh one once snapshots do not reproduce a step
    rewinds: bool = True  # restoring a snapshot reproduces a step bit by bit
    deterministic: bool = True  # each repeated step was the same bit by bit, from a snapshot or a fresh run
    findings: list[Finding] = field(default_factory=list)  # about the replay itself
    partial_replays: int = 0  # ended by a search before the end of the step
    left_out: list[Skipped] = field(default_factory=list)  # what could not be found out

    def __post_init__(self) -> None:
        self.session = self.replay.session()

    def nonfinite_probe(self) -> NonFiniteProbe:
        """Returns the probe for pass 1; halving, and runs of thousands of steps, need no location of the harm."""
        return NonFiniteProbe(locate=not self._bisects and not self.replay.request.until_sick)

    def described(self) -> dict[str, Any]:
        """Returns this part of the report's `run` section."""
        run: dict[str, Any] = {"deterministic": self.deterministic, "strategy": self.replay.request.strategy}
        return {**run, "partial_replays": self.partial_replays} if self._bisects else run

    @property
    def _bisects(self) -> bool:
        return self.replay.request.strategy == "bisect"

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
        if (
            self._bisects
            and outcome.raised is None
            and (found := self._searched(snapshot, outcome, nonfinite_probe)) is not None
        ):
            return found
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

    def _searched(self, snapshot: Snapshot, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> Trace | None:
        search = LayerSearch(self.session, snapshot, outcome, nonfinite_probe)
        try:
            return search.trace()
        except SearchLost as lost:
            self.replay.notes.append(f"step {outcome.step}: traced instead of searched by halving: {lost}")
            return None
        finally:
            self.partial_replays += search.partial_replays

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
