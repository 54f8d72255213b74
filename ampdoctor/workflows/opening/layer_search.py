"""`--strategy bisect`: halves the order of a step's layers, then traces the one interval that turns bad.

One partial replay records the order of the step's points. Each further one looks at one point and ends the step there.
The last one traces the ops between the last good and the first bad point: at most ceil(log2(n)) + 2 for n points.

The premise is that what turned bad stays bad up to the harm that pass 1 saw. A masked NaN that appears again, a healthy
infinity, or a value that bypasses the points breaks it. The search notices: the interval reads a bad value that none of
its ops made, or a whole replay that follows its births does not reach the harm. Then every op of the step is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ampdoctor.bisect.first_bad import first_bad
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.of_runs.trace import Birth, StepOutcome, Trace
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe
from ampdoctor.probes.halving.points import OrderProbe, Point, PointProbe
from ampdoctor.probes.halving.window import Interval, IntervalTrace, UpdateTrace
from ampdoctor.replay.snapshot import ProcessState

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import Probe
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


class SearchLost(Exception):  # noqa: N818 - no error: a reason to look at the whole step
    """The search's premise does not hold; the message says what showed it."""


@dataclass(slots=True)
class LayerSearch:
    """Searches one step that did harm.

    Attributes:
        session: The run; the search leaves it in the state in which it found it.
        snapshot: The state before the step.
        outcome: How the step ended.
        sentinel: The probe that watched it.
        partial_replays: Replays that ended before the step was over, including one that traced the optimizers only.
    """

    session: Session
    snapshot: Snapshot
    outcome: StepOutcome
    sentinel: NonFiniteProbe
    partial_replays: int = field(default=0, init=False)

    def trace(self) -> Trace:
        """Returns the births behind the harm that pass 1 saw.

        Raises:
            SearchLost: Halving cannot find them.
        """
        sinks = self.sentinel.sightings.sinks
        forward = "loss" in sinks
        gradients = any(sink.startswith("grad:") for sink in sinks)
        if not forward and not gradients:
            if not sinks or any(sink.startswith("buffer:") for sink in sinks):
                raise SearchLost("neither the loss nor a gradient nor an optimizer's state is harmed")
            with self._keeping_the_state():
                return self._traced_update()
        with self._keeping_the_state():
            interval = self._searched(forward=forward)
            tracer = IntervalTrace(interval)
            self._partly(tracer)
            self._check(tracer.reached)
            return self._followed(interval, "loss" if forward else "grad:")

    # -- the search ----------------------------------------------------------------------------------------------

    def _searched(self, *, forward: bool) -> Interval:
        """Returns the interval between the last good point and the first bad one."""
        harmed = self._first_harmed_gradient()
        if harmed is None and not forward:
            raise SearchLost("no gradient of the model's own parameters is harmed")
        order = OrderProbe(None if harmed is None else harmed + 1)
        self._partly(order)
        points = order.points
        end = len(points) if harmed is None else self._place_of_gradient(points, harmed)
        line = _Line(order, end, forward=forward, unseen_loss=self.outcome.loss is None)
        count = len(line.places)
        if not count:
            raise SearchLost("no module returned a floating-point tensor before the harm")
        # the harm itself is one more position; what remains between two positions lies in the interval
        found = first_bad(line.before(), lambda at: self._is_bad(line.point(at)), limit=math.ceil(math.log2(count)))
        after = line.earliest_source(found.suspects)
        if found.bad == count:
            until, later = (None, []) if forward else (points[end], points[end:])
        else:
            until = line.point(found.bad)
            later = [until]
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

    def _gradients_seen(self, sentinel: NonFiniteProbe) -> list[tuple[str, float]]:
        """Returns (parameter, value) of the gradients in the order in which the backward wrote them."""
        names = self.session.parameter_names()
        own = {names[id(parameter)] for parameter in self.session.model.parameters()}
        return [(one.name, one.value) for one in sentinel.observed if one.kind == "grad" and one.name in own]

    def _first_harmed_gradient(self) -> int | None:
        seen = self._gradients_seen(self.sentinel)
        return next((i for i, (_, value) in enumerate(seen) if not math.isfinite(value)), None)

    def _place_of_gradient(self, points: Sequence[Point], index: int) -> int:
        """Returns the place in the order of a gradient that pass 1 saw; the backward must have taken the same way."""
        places = [place for place, point in enumerate(points) if point.kind == "gradient"]
        expected = [name for name, _ in self._gradients_seen(self.sentinel)[: index + 1]]
        if [points[place].name for place in places[: index + 1]] != expected:
            raise SearchLost("the gradients came in another order than before")
        return places[index]

    def _is_bad(self, point: Point) -> bool:
        probe = PointProbe(point)
        self._partly(probe)
        if probe.bad is None:
            raise SearchLost(f"the step did not get to {point.name or 'the model'} again")
        return probe.bad

    # -- what the interval shows ---------------------------------------------------------------------------------

    def _check(self, births: Sequence[Birth]) -> None:
        """Check that what is non-finite at the interval's end was made in the interval, from finite values."""
        if not births:
            raise SearchLost("nothing non-finite was born where the search ended")
        for birth in births:
            if birth.origin == "constant" or any(read.nans or read.infs for read in birth.inputs):
                raise SearchLost("where the search ended, a non-finite value comes from elsewhere")

    def _followed(self, interval: Interval, harm: str) -> Trace:
        """Follow the births in a whole replay to the harm that pass 1 saw; a masked birth does not reach it."""
        tracer = IntervalTrace(interval, follow=True)
        self.snapshot.restore()
        process = ProcessState()
        try:
            with self.session.watched(tracer):
                self.session.step(self.outcome.step)
        except AmpdoctorError as error:
            raise SearchLost(f"the step cannot be followed to its end: {error}") from error
        finally:
            process.restore()
        if tracer.trace is None:
            raise SearchLost("the step did not get to its end again")
        births = tuple(birth for birth in tracer.trace.births if birth.harms)
        if not any(sink.startswith(harm) for birth in births for sink in birth.harms):
            raise SearchLost("what was born where the search ended does no harm")
        self._check(births)
        return replace(tracer.trace, births=births, unattributed=())

    def _traced_update(self) -> Trace:
        tracer = UpdateTrace()
        self._partly(tracer)
        trace = tracer.trace
        births = [birth for birth in trace.births if birth.harms] if trace is not None else []
        if trace is None or trace.unattributed or not births or any(birth.origin == "constant" for birth in births):
            raise SearchLost("what harms the state was not made after the backward")
        return trace

    # -- replays -------------------------------------------------------------------------------------------------

    def _partly(self, probe: Probe) -> None:
        """Replay until the probe ends the step; it does not count as a replay of the step."""
        session = self.session
        self.snapshot.restore()
        process, replays, of_step = ProcessState(), session.replays, session.replays_of[self.outcome.step]
        self.partial_replays += 1
        try:
            with session.watched(probe):
                session.step(self.outcome.step)
        except StepHalted:
            pass
        except AmpdoctorError as error:
            raise SearchLost(f"a partial replay could not run: {error}") from error
        finally:
            process.restore()
            session.replays, session.replays_of[self.outcome.step] = replays, of_step

    @contextmanager
    def _keeping_the_state(self) -> Iterator[None]:
        """Keep the state after the step, whatever is replayed meanwhile: the run goes on from it."""
        after = self.session.snapshot()
        try:
            yield
        finally:
            after.restore()


class _Line:
    """The points before a step's harm, in the same turn of forward and backward, and how values flow between them.

    Args:
        order: The recorded order.
        end: The place in it at which the harm was seen.
        forward: The harm shows in the loss.
        unseen_loss: The step returns no loss, so a harmed gradient may come from the forward or the backward.
    """

    def __init__(self, order: OrderProbe, end: int, *, forward: bool, unseen_loss: bool) -> None:
        points = order.points
        self._order = order
        turn = points[end].turn if end < len(points) else points[-1].turn if points else 0
        self.places = [
            place
            for place, point in enumerate(points[:end])
            if point.turn == turn
            and (
                (point.kind == "output" and not point.recompute and (forward or unseen_loss))
                or (point.kind == "arrival" and not forward)
            )
        ]

    def point(self, at: int) -> Point:
        """Returns the point at a position."""
        return self._order.points[self.places[at]]

    def before(self) -> list[int]:
        """Returns for each position a bit mask of its sources; the last position is the harm, which comes from all."""
        masks = [self._mask(at, self._leads) for at in range(len(self.places))]
        return [*masks, (1 << len(masks)) - 1]

    def earliest_source(self, suspects: Sequence[int]) -> Point | None:
        """Returns the last point before the ops that make the values at the suspects; None for the step's start."""
        sources = [self._first_source(at) for at in suspects]
        first = min(sources)
        place = self.places[first] if first >= 0 else self.places[0] - 1
        return self._order.points[place] if place >= 0 else None

    def _first_source(self, at: int) -> int:
        count = len(self.places)
        if at == count:
            if self.point(count - 1).kind == "arrival":
                return count - 1
            handed_on = 0
            for later in range(count):
                handed_on |= self._mask(later, self._leads)
            return next(i for i in range(count) if not handed_on >> i & 1)
        if _loose(self.point(at)):
            return at - 1
        parents = self._mask(at, self._is_parent)
        return (parents & -parents).bit_length() - 1

    def _mask(self, at: int, related: Callable[[Point, Point], bool]) -> int:
        later = self.point(at)
        return sum(1 << i for i in range(at) if related(self.point(i), later))

    def _leads(self, earlier: Point, later: Point) -> bool:
        """Does the value at the earlier point flow into the value at the later one?"""
        if later.kind == "output":
            return bool(self._order.flow.ancestors[later.number] >> earlier.number & 1)
        if earlier.kind == "output" or _loose(earlier) or _loose(later):
            return True
        return bool(self._order.flow.ancestors[earlier.number] >> later.number & 1)

    def _is_parent(self, earlier: Point, later: Point) -> bool:
        """Does it flow there without passing another point?"""
        if later.kind == "output":
            return bool(self._order.flow.parents[later.number] >> earlier.number & 1)
        if earlier.kind == "output" or _loose(earlier):
            return False
        return bool(self._order.flow.parents[earlier.number] >> later.number & 1)


def _loose(point: Point) -> bool:
    """Is it an arrival in a separate graph (a recomputation, a second derivative)? Only its order is known."""
    return point.recompute or point.firing > 0
