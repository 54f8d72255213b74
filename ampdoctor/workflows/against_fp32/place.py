"""Where a session is among the steps of a replay, and a close look at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.workflows.against_fp32.side_by_side import Replayed

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Trace
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


@dataclass(slots=True)
class Place:
    """Where a session is among its steps; before the first one that has to be run again, it is where it was left."""

    session: Session
    start: Snapshot
    seen: Sequence[Replayed]
    step: int | None = None

    def comes_to(self, step: int) -> bool:
        """Lead the session to the start of a step, from the run's start if need be; False where its batch is gone."""
        if self.step is None:
            self.start.restore()
            self.step = 0
        for earlier in range(self.step, step):
            if self.session.has_step(earlier):
                self.seen[earlier].random_state.restore()
                self.session.step(earlier)
        if not self.session.has_step(step):  # drawn anew if the batches were too large to be kept
            return False
        self.session.keep_steps(lambda earlier: earlier >= step)
        self.seen[step].random_state.restore()
        return True


def traced(session: Session, before: Snapshot, step: int, *, flushes: bool = False) -> Trace:
    """Replay a step with every op watched; the session is left after it.

    Args:
        session: The session.
        before: The state before the step.
        step: The step.
        flushes: Record which ops of the backward lose elements to zero.
    """
    tracer = OpTraceProbe(flushes=flushes)
    before.restore()
    with session.watched(tracer):
        session.step(step)
    if tracer.trace is None:
        raise AssertionError("a finished step leaves a trace")
    return tracer.trace
