"""`--strategy bisect`: halving the order of a step's layers, then a trace of the one interval that turns bad.

One partial replay records the order of the step's points; each further one looks at one point and ends the step there;
the last one traces the ops between the last good point and the first bad one. At most ceil(log2(n)) + 2 for n points.

The premise is that what turned bad stays bad up to the harm that pass 1 saw. A masked NaN that appears again, a healthy
infinity, or a value that travels beside the points breaks it. It is noticed: the interval reads what none of its ops
made, or the harm is still there in a whole replay in which what was born there is zero. Then the step is traced whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ampdoctor.bisect.first_bad import first_bad
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.trace import Birth, StepOutcome, Trace
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.points import OrderProbe, Point, PointProbe
from ampdoctor.probes.window import Cleansing, Interval, IntervalTrace, UpdateTrace
from ampdoctor.replay.halt import StepHalted
from ampdoctor.replay.snapshot import ProcessState

if TYPE_CHECKING:
    from ampdoctor.replay.probe import Probe
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

_GRADIENT = "gradient of "


class SearchLost(Exception):  # noqa: N818 - no error: a reason to look at the whole step
    """The search's premise does not hold; the message says what showed it."""


@dataclass(slots=True)
class LayerSearch:
    """Searches one step that did harm.

    Attributes:
        session: The run; it is left in the state in which it was found.
        snapshot: The state before the step.
        outcome: How the step ended.
        sentinel: The probe that watched it.
        partial_replays: Replays that were ended before the step was over, and one that traced the optimizers only.
    """

    session: Session
    snapshot: Snapshot
    outcome: StepOutcome
    sentinel: NonFiniteProbe
    partial_replays: int = field(default=0, init=False)

    def trace(self) -> Trace:
        """The births behind the harm that pass 1 saw.

        Raises:
            SearchLost: They cannot be found so.
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
            births = tuple(replace(birth, harms=sinks) for birth in self._own(tracer))
            self._confirm(interval, forward=forward)
        return Trace(step=self.outcome.step, ops=births[-1].order, births=births)

    # -- the search ----------------------------------------------------------------------------------------------

    def _searched(self, *, forward: bool) -> Interval:
        """The interval between the last good point and the first bad one."""
        harmed = self._first_harmed_gradient()
        if harmed is None and not forward:
            raise SearchLost("no gradient of the model's own parameters is harmed")
        order = OrderProbe(None if harmed is None else harmed + 1)
        self._partly(order)
        points = order.points
        end = len(points) if harmed is None else self._place_of_gradient(points, harmed)
        candidates = list(_candidates(points, end, forward=forward, unseen_loss=self.outcome.loss is None))
        if not candidates:
            raise SearchLost("no module returned a floating-point tensor before the harm")
        first = first_bad(len(candidates), lambda index: self._is_bad(points[candidates[index]])).position
        begins = candidates[first - 1] if first else candidates[0] - 1
        after = points[begins] if begins >= 0 else None
        last = first == len(candidates) - 1
        until = (None if forward else points[end]) if last else points[candidates[first]]
        if until is None or until.kind == "output":
            return Interval(after=after, until=until)
        later = [point for point in points[end:] if point.kind == "arrival"] if last else [until]
        oldest = later[0].sequence if later else None
        newest = after.sequence if after is not None and after.kind == "arrival" else None
        return Interval(
            after=after,
            until=until,
            oldest=-math.inf if oldest is None else oldest,
            newest=math.inf if newest is None else newest,
        )

    def _gradients_seen(self, sentinel: NonFiniteProbe) -> list[tuple[str, float]]:
        """(parameter, value) of the gradients in the order in which the backward wrote them."""
        names = self.session.parameter_names()
        own = {names[id(parameter)] for parameter in self.session.model.parameters()}
        seen = [(what[len(_GRADIENT) :], value) for what, value in sentinel.observed if what.startswith(_GRADIENT)]
        return [(name, value) for name, value in seen if name in own]

    def _first_harmed_gradient(self) -> int | None:
        seen = self._gradients_seen(self.sentinel)
        return next((i for i, (_, value) in enumerate(seen) if not math.isfinite(value)), None)

    def _place_of_gradient(self, points: Sequence[Point], index: int) -> int:
        """Where in the order a gradient is that pass 1 saw; the backward must have come by the same way."""
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

    def _own(self, tracer: IntervalTrace) -> tuple[Birth, ...]:
        """The births at the interval's end, if they are the interval's own."""
        births = tracer.reached
        if not births and tracer.trace is not None:  # no backward came: the loss is all there is
            births = tuple(birth for birth in tracer.trace.births if "loss" in birth.harms)
        if not births:
            raise SearchLost("nothing non-finite was born where the search ended")
        for birth in births:
            if birth.origin == "constant" or any(read.nans or read.infs for read in birth.inputs):
                raise SearchLost("where the search ended, a non-finite value comes from elsewhere")
        return births

    def _traced_update(self) -> Trace:
        tracer = UpdateTrace()
        self._partly(tracer)
        trace = tracer.trace
        births = [birth for birth in trace.births if birth.harms] if trace is not None else []
        if trace is None or trace.unattributed or not births or any(birth.origin == "constant" for birth in births):
            raise SearchLost("what harms the state was not made after the backward")
        return trace

    def _confirm(self, interval: Interval, *, forward: bool) -> None:
        """A whole replay without the births: the harm must be gone, or they are not all that is behind it."""
        cleansing, sentinel = Cleansing(interval), NonFiniteProbe(locate=False)
        self.snapshot.restore()
        process = ProcessState()
        try:
            with self.session.watched(sentinel, cleansing):
                self.session.step(self.outcome.step)
        except AmpdoctorError as error:
            raise SearchLost(f"the step without its births cannot run: {error}") from error
        finally:
            process.restore()
        cured = self._loss_is_cured(cleansing, sentinel) if forward else self._gradients_are_cured(sentinel)
        if not cleansing.cleansed or not cured:
            raise SearchLost("without what the search found, there is harm still")

    def _loss_is_cured(self, cleansing: Cleansing, sentinel: NonFiniteProbe) -> bool:
        """The losses of the micro-batch that was searched are finite; others may be sick for the same reason."""
        losses = [finite for micro_batch, finite in cleansing.losses if micro_batch == cleansing.micro_batch]
        return all(losses) if losses else "loss" not in sentinel.sightings.sinks

    def _gradients_are_cured(self, sentinel: NonFiniteProbe) -> bool:
        """The gradients that came no later than the first harmed one, counted for each parameter, are finite."""
        harmed = self._first_harmed_gradient()
        before = self._gradients_seen(self.sentinel)[:harmed]
        turn = [name for name, _ in before].count(self._gradients_seen(self.sentinel)[harmed or 0][0])
        counts: Counter[str] = Counter()
        for name, value in self._gradients_seen(sentinel):
            if counts[name] <= turn and not math.isfinite(value):
                return False
            counts[name] += 1
        return True

    # -- replays -------------------------------------------------------------------------------------------------

    def _partly(self, probe: Probe) -> None:
        """A replay that the probe ends; it is no replay of the step."""
        session = self.session
        self.snapshot.restore()
        process, replays = ProcessState(), session.replays
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
            session.replays = replays

    @contextmanager
    def _keeping_the_state(self) -> Iterator[None]:
        """The run goes on after the step, whatever was replayed meanwhile."""
        after = self.session.snapshot()
        try:
            yield
        finally:
            after.restore()


def _candidates(points: Sequence[Point], end: int, *, forward: bool, unseen_loss: bool) -> Iterator[int]:
    """Places in the order that lie before the harm, in the same turn of forward and backward."""
    turn = points[end].turn if end < len(points) else points[-1].turn if points else 0
    for place, point in enumerate(points[:end]):
        if point.turn != turn:
            continue
        is_output = point.kind == "output" and not point.recompute
        if (is_output and (forward or unseen_loss)) or (point.kind == "arrival" and not forward):
            yield place
