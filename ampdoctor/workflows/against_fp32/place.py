"""Where a session is among the steps of a replay, and a close look at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.probes.cheap.gradients import DistanceProbe
from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.workflows.against_fp32.side_by_side import Replayed, stepped
from ampdoctor.workflows.proving import changes as change

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Trace
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


NOISE = 0.5
"""Relative change of a parameter's fp32 gradient, when the last bit of each weight changes, from which it is noise. Of
the bias of a key projection, whose true gradient is zero, nothing stays (above 1); else 1e-3 and less, in a chaotic
network too: rounding to fp32 is 2^-13 of rounding to fp16."""


@dataclass(slots=True)
class Place:
    """Where a session is among its steps; before the first one that has to be run again, it is where it was left.

    Attributes:
        session: The session.
        start: The state from which its steps are led to.
        seen: What the first replay saw of the steps from there on.
        step: The step that it stands before; None where it was left.
        begin: The step that `start` stands before.
    """

    session: Session
    start: Snapshot
    seen: Sequence[Replayed]
    step: int | None = None
    begin: int = 0

    @property
    def steps(self) -> int:
        """The number of steps of the run, those before `start` included."""
        return self.begin + len(self.seen)

    def anew(self) -> Place:
        """Returns the same place before anything is run again."""
        return replace(self, step=None)

    def comes_to(self, step: int) -> bool:
        """Lead the session to the start of a step, from the run's start if need be; False where its batch is gone."""
        if self.step is None:
            self.start.restore()
            self.step = self.begin
        for earlier in range(self.step, step):
            if self.session.has_step(earlier):
                self.seen[earlier - self.begin].random_state.restore()
                self.session.step(earlier)
        if not self.session.has_step(step):  # drawn anew if the batches were too large to be kept
            return False
        self.session.keep_steps(lambda earlier: earlier >= step)
        self.seen[step - self.begin].random_state.restore()
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


def noise(session: Session, before: Snapshot, step: int) -> frozenset[str]:
    """Returns the parameters whose gradient in fp32 is rounding: the last bits of the weights make another of it.

    Args:
        session: The session; it is left at the state before the step.
        before: The state before the step.
        step: The step.
    """
    try:
        beside = jolted_beside(session, before, step, torch.float32)
    except AmpdoctorError:
        return frozenset()
    return frozenset(name for name, apart in beside.distances.items() if not apart.relative <= NOISE)


def jolted_beside(session: Session, before: Snapshot, step: int, dtype: torch.dtype) -> DistanceProbe:
    """Run a step in fp32 twice, once with each weight moved by its rounding in a format; how far are the gradients?

    Args:
        session: The session; it is left at the state before the step.
        before: The state before the step.
        step: The step.
        dtype: The format.

    Raises:
        AmpdoctorError: The step cannot be run so.
    """
    before.restore()
    try:
        with session.reference():
            wide = stepped(session, step)[0]
        beside = DistanceProbe(wide.gradients, wide.times)
        before.restore()
        with session.reference(), change.jolted(dtype)(session), session.watched(beside):
            session.step(step)
    finally:
        before.restore()
    return beside
