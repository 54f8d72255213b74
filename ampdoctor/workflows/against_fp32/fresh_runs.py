"""The comparison with fp32 if snapshots do not bring a step back: fresh runs of the factory, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.gradient_underflow import deserves_a_look, underflow, underflow_at
from ampdoctor.diagnosis.replay.births import departing, finding_of_birth
from ampdoctor.diagnosis.replay.nondeterministic_replay import nondeterministic_finding
from ampdoctor.diagnosis.replay.optimizer_precision import stagnation, stagnation_finding
from ampdoctor.diagnosis.replay.scaler_misuse import misuse
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Finding, Prescription, Skipped
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.probes.cheap.gradients import distances
from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.workflows.against_fp32.moves import kept, moved
from ampdoctor.workflows.against_fp32.side_by_side import (
    Passing,
    ReferencePass,
    Replayed,
    all_finite,
    compared,
    stepped,
)
from ampdoctor.workflows.proving.trials import UNPROVABLE

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison, Trace
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session

NOT_ALONE = Skipped(
    what="parameters one by one, and wrong values of the forward", reason="its steps do not come back from a snapshot"
)
"""What needs a step to be run again as it was."""


def compare_fresh_runs(
    session: Session, seen: Sequence[Replayed], fresh: Callable[[], Session], thresholds: Thresholds
) -> ReferencePass:
    """Step one fresh run as the user's loop does, and another in fp32, each step from the first one's state.

    State outside the snapshots moves on once per step in both runs. A step whose gradients depart is traced in a third
    run. No change is tried, because no step can be run again under one.

    Args:
        session: The session whose replays are counted.
        seen: The steps of the first replay.
        fresh: Makes another session from the factory.
        thresholds: What matters, and how far is far.
    """
    passing = Passing(thresholds, comes_back=False)
    sentinel = NonFiniteProbe()
    with ExitStack() as stack:
        here, there = (stack.enter_context(_counted(session, fresh())) for _ in range(2))
        there.tape = here.tape
        with here.watched(sentinel):
            for step, first in enumerate(seen):
                if not here.has_step(step):
                    break
                here.keep_steps(lambda earlier, now=step: earlier >= now)  # type: ignore[misc]
                first.random_state.restore()
                try:
                    comparison = _side_by_side(here, there, step, sentinel, passing)
                except AmpdoctorError as error:
                    return passing.ended(cut=f"from step {step} on the run cannot be replayed in fp32: {error}")
                differs = first_difference(first.observed, sentinel.observed)
                if differs is not None:
                    return passing.ended((nondeterministic_finding(step, *differs),), deterministic=False)
                if comparison is not None:
                    after = RandomState.capture()
                    findings = _examine(session, comparison, seen[: step + 1], fresh, thresholds, passing=passing)
                    after.restore()
                    passing.add(comparison)
                    if findings:
                        return passing.ended(findings)
    passed = passing.ended()
    return replace(passed, skipped=(*passed.skipped, NOT_ALONE))


def _examine(
    session: Session,
    comparison: Comparison,
    seen: Sequence[Replayed],
    fresh: Callable[[], Session],
    thresholds: Thresholds,
    *,
    passing: Passing,
) -> tuple[Finding, ...]:
    """Returns the finding of the first rule that holds, with what a traced fresh run adds."""
    wrong_use = misuse(comparison, thresholds)
    if wrong_use is not None:
        return (wrong_use,)
    findings = []
    severity = underflow(comparison, thresholds)
    trace = _traced_afresh(session, seen, fresh) if deserves_a_look(comparison, thresholds) else None
    if trace is not None and severity is not None and trace.flushes:
        findings.append(underflow_at(comparison, trace.flushes, severity))
    elif trace is not None and (births := departing(trace, thresholds)):
        departed = finding_of_birth(births[0], cause="forward_overflow", others=births[1:])
        findings.append(passing.rests_on(departed, births[0]))
    still = stagnation(comparison, thresholds)
    findings += [] if still is None else [stagnation_finding(comparison.step, still)]
    return tuple(replace(finding, prescription=_untried(finding)) for finding in findings)


def _untried(finding: Finding) -> Prescription:
    return Prescription(kind="code", value=finding.help, status="not_run", reason=UNPROVABLE, detail=finding.help)


def _traced_afresh(session: Session, seen: Sequence[Replayed], fresh: Callable[[], Session]) -> Trace | None:
    """Trace the last step in a third fresh run, op by op; None if the step differs there."""
    sentinel, tracer = NonFiniteProbe(), OpTraceProbe(flushes=True)
    last = len(seen) - 1
    with _counted(session, fresh()) as third:
        for step, first in enumerate(seen):
            if not third.has_step(step):
                return None
            first.random_state.restore()
            if step < last:
                third.step(step)
        with third.watched(sentinel, tracer):
            third.step(last)
    return tracer.trace if first_difference(seen[last].observed, sentinel.observed) is None else None


@contextmanager
def _counted(session: Session, other: Session) -> Iterator[Session]:
    """Close the other session afterwards and count its replays as the first session's."""
    try:
        yield other
    finally:
        session.count_with(other)
        other.close()


def _side_by_side(
    here: Session, there: Session, step: int, sentinel: NonFiniteProbe, passing: Passing
) -> Comparison | None:
    there.adopt_state(here)
    values = kept(here)
    random_state = RandomState.capture()
    probe, outcome = stepped(here, step)
    done = moved(here, values)
    after = RandomState.capture()
    random_state.restore()
    with there.reference():
        wide, reference = stepped(there, step)
        meant = moved(there, values)
    after.restore()
    if passing.leaves_out(outcome, reference, sentinel) or not all_finite(wide):
        return None
    return compared(here, step, (outcome, reference), distances(probe.gradients, wide.gradients), (values, done, meant))
