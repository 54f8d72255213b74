"""Compares the steps of a run with fp32: during the replay, by rewinding, or in fresh runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.forward import CLEARLY_NEARER, far_alone, may_be_stale, together, unexplained
from ampdoctor.diagnosis.replay.gradients import ZEROED_SHARE, deserves_a_look, underflow, underflow_at
from ampdoctor.diagnosis.replay.nonfinite import departing, finding_of_birth
from ampdoctor.diagnosis.replay.outcome import nondeterministic_finding
from ampdoctor.diagnosis.replay.scaler_misuse import misuse, other_readings, suspected_misuse, used_while_scaled
from ampdoctor.diagnosis.replay.updates import stagnation, stagnation_finding
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Finding, Prescription, Skipped
from ampdoctor.evidence.report_replay import ReplayedStep
from ampdoctor.evidence.trace import Comparison
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.numerics.tensors import extremes
from ampdoctor.probes.gradients import distances
from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.snapshot import Snapshot, tensors_of
from ampdoctor.workflows.lost_updates import at_full_rate, by_tensor, standing_still
from ampdoctor.workflows.prescribe import prescribe, underflow_cure
from ampdoctor.workflows.repairs import put_right
from ampdoctor.workflows.rerun_step import ReplayPosition, jolted_beside, traced
from ampdoctor.workflows.step_beside_fp32 import (
    AS_FAR,
    ComparisonSummary,
    Fp32Step,
    Known,
    Observed,
    ReferencePass,
    Replayed,
    StepComparison,
    all_finite,
    compared,
    kept,
    moved,
    overflowed,
    stepped,
)
from ampdoctor.workflows.trials import SHOWN, Trials, replayed
from ampdoctor.workflows.wrong_forward import seen_in_forward, stale_casts, stalest_without_fp32, wrong_in_forward

if TYPE_CHECKING:
    from ampdoctor.diagnosis.replay.updates import Stagnation
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import StepOutcome, Trace
    from ampdoctor.replay.session import Session


# -- fresh runs side by side, where snapshots do not reproduce a step --

NOT_ALONE = Skipped(
    what="parameters one by one, and wrong values of the forward", reason="its steps do not come back from a snapshot"
)
"""Checks that need to run a step again as it was."""
_UNPROVABLE = "the failure does not come back from a snapshot, so a clean replay would prove nothing"


def compare_fresh_runs(
    session: Session, seen: Sequence[Replayed], fresh: Callable[[], Session], thresholds: Thresholds
) -> ReferencePass:
    """Step a fresh run as the user's loop does, and another in fp32, each step from the first one's state.

    State outside the snapshots advances once per step in both runs. A step whose gradients depart is traced in a third
    run. No change is tried, because no step can be run again under one. Replays are counted in `session`.
    """
    passing = ComparisonSummary(thresholds, comes_back=False)
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
                    findings = _examine_fresh(session, comparison, seen[: step + 1], fresh, thresholds, passing=passing)
                    after.restore()
                    passing.add(comparison)
                    if findings:
                        return passing.ended(findings)
    passed = passing.ended()
    return replace(passed, skipped=(*passed.skipped, NOT_ALONE))


def _examine_fresh(
    session: Session,
    comparison: Comparison,
    seen: Sequence[Replayed],
    fresh: Callable[[], Session],
    thresholds: Thresholds,
    *,
    passing: ComparisonSummary,
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
    return Prescription(kind="code", value=finding.help, status="not_run", reason=_UNPROVABLE, detail=finding.help)


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
    here: Session, there: Session, step: int, sentinel: NonFiniteProbe, passing: ComparisonSummary
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


# -- steps run again, beside the same steps in fp32 from the same states --

_ELSEWHERE = ("forward_overflow", "forward_precision")
"""Causes for which other elements move than in fp32: rows of other ids, or none behind a normaliser of inf."""
TOO_FAR = "its steps do not come back from a snapshot, and a fresh run would have to come all the way"
FOLLOWED = 8
"""Number of steps in which stale copies are searched where fp32 cannot run, and of steps with notes after which the
comparison ends: as many as `bisect-nan` replays by default."""
NOT_YET: Mapping[int, StepComparison] = MappingProxyType({})


def compare_with_fp32(  # noqa: C901, PLR0917 - what a run is, and what is known of it
    session: Session,
    start: Snapshot | None,
    seen: Sequence[Replayed],
    fresh: Callable[[], Session],
    thresholds: Thresholds,
    beside: Mapping[int, StepComparison] = NOT_YET,
    *,
    begin: int = 0,
    first: int = 0,
) -> ReferencePass:
    """Compare the steps with fp32, and stop at the first sick one.

    A step that was compared while it was replayed (`beside`) and in which no rule fires counts as it is. Any other is
    run once more, beside fp32. If snapshots do not reproduce a step (a counter or a generator of the user's own), two
    fresh runs are stepped side by side instead; with `begin` > 0 the comparison ends there, because a fresh run would
    have to replay too many steps first.

    `start` is the state before step `begin`, None if snapshots are known not to reproduce a step; `seen` holds the
    first replay's steps from `begin` on. `first` is the first step to compare.
    """
    passing = ComparisonSummary(thresholds)
    if start is None:
        return passing.ended(cut=TOO_FAR) if begin else compare_fresh_runs(session, seen, fresh, thresholds)
    place = ReplayPosition(session, start, seen, begin=begin)
    notes: list[Finding] = []
    for step, noted in islice(enumerate(seen, begin), max(first - begin, 0), None):
        known = beside.get(step) if not noted.skipped else StepComparison()  # without an update, nothing is compared
        if known is not None and (known.comparison is None or is_calm(known.comparison, thresholds, passing.known)):
            passing.passes(known)
            continue
        if not place.comes_to(step):
            break
        before = session.snapshot()
        try:
            pair = _Pair.replayed(session, before, step, passing)
        except AmpdoctorError as error:
            rest = range(step, min(begin + len(seen), step + FOLLOWED))
            stale = stalest_without_fp32(session, before, rest, thresholds)
            cut = f"from step {step} on the run cannot be replayed in fp32: {error}"
            return passing.ended(() if stale is None else (stale,), cut=cut)
        place.step = step + 1
        if pair is None:
            continue
        same = first_difference(noted.observed, pair.observed) is None
        own, wide = pair.steps
        if same and own == noted.optimizer_steps != wide:
            return passing.ended(cut=f"step {step} makes {own} updates, and in fp32 {wide}: the loop's code decides so")
        if not same or own != noted.optimizer_steps:
            return passing.ended(cut=TOO_FAR) if begin else compare_fresh_runs(session, seen, fresh, thresholds)
        findings = _looked_at_closely(place, before, pair, thresholds, passing=passing)
        passing.add(pair.comparison)
        if _may_grow(findings) and len(notes) < FOLLOWED:
            notes += findings
        elif findings:
            return passing.ended(findings)
    return passing.ended((*notes[:1], *by_tensor(place.anew(), passing.compared, thresholds, passing.known)))


def _may_grow(findings: Sequence[Finding]) -> bool:
    """Whether all findings are notes on stale copies: an average starts as the weights, so later steps show more."""
    return bool(findings) and all(one.cause == "stale_casts" and one.severity == "note" for one in findings)


def is_calm(comparison: Comparison, thresholds: Thresholds, known: Known | None = None) -> bool:
    """Whether no rule fires in a step, so that it need not run again; `known` is what earlier steps have shown."""
    known = known or Known()
    far = (
        deserves_a_look(comparison, thresholds)
        or used_while_scaled(comparison, thresholds)
        or unexplained(comparison, thresholds)
    )
    chaotic = bool(far) and comparison.gradient_error <= known.explained
    return not (
        misuse(comparison, thresholds)
        or suspected_misuse(comparison, thresholds)
        or underflow(comparison, thresholds)
        or (not known.warm_up and stagnation(comparison, thresholds))
        or may_be_stale(comparison.events)
        or (not chaotic and (far or far_alone(comparison, thresholds, known.alone)))
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    comparison: Comparison
    observed: Observed
    steps: tuple[int, int]
    """How often an optimizer stepped, in the run and in fp32."""
    own: ReplayedStep
    """The step as it is."""

    @classmethod
    def replayed(cls, session: Session, before: Snapshot, step: int, passing: ComparisonSummary) -> _Pair | None:
        """Run the step in fp32, restore, run it as it is, and stay there. None if skipped or fp32 is not finite."""
        wide = Fp32Step.run(session, step)
        before.restore()
        sentinel = NonFiniteProbe()
        with session.watched(sentinel, wide.probe):
            outcome = session.step(step)
        if passing.leaves_out(outcome, wide.outcome, sentinel) or not wide.finite:
            return None
        comparison = wide.compared(session, outcome)
        steps = (outcome.optimizer_steps, wide.outcome.optimizer_steps)
        own = replace(replayed(outcome, sentinel.sightings.sinks), gradient_norm=math.sqrt(wide.probe.distance.norm))
        return cls(comparison, sentinel.observed, steps, own)


Ends = tuple["Snapshot", "Snapshot"]
"""The states before and after a step."""


def _rounding_alone(session: Session, before: Snapshot, step: int) -> float:
    """Returns how far the fp32 gradients move when each weight is rounded once in the compute format."""
    if not session.precision.reduced:
        return 0.0
    beside = jolted_beside(session, before, step, session.precision.dtype)
    return beside.distance.relative if math.isfinite(beside.distance.norm) else 0.0


def _looked_at_closely(
    place: ReplayPosition, before: Snapshot, pair: _Pair, thresholds: Thresholds, *, passing: ComparisonSummary
) -> tuple[Finding, ...]:
    """Returns the findings of a step that is not calm; without any, its values count as harmless from then on."""
    comparison = pair.comparison
    if is_calm(comparison, thresholds, passing.known):
        return ()
    ends = before, place.session.snapshot()
    findings = _examine(place, ends, pair, thresholds, passing=passing)
    if not findings:
        passing.known.looks(far_alone(comparison, thresholds))
    return findings


def _examine(
    place: ReplayPosition, ends: Ends, pair: _Pair, thresholds: Thresholds, *, passing: ComparisonSummary
) -> tuple[Finding, ...]:
    """Returns the findings of the first rule that holds; the session is left after the step."""
    session, comparison, (before, after) = place.session, pair.comparison, ends
    trying = partial(Trials, session, before, comparison.step, place.steps, without=(pair.own,))
    wrong_use = misuse(comparison, thresholds)
    readings = () if wrong_use is None else (wrong_use, *other_readings(comparison, wrong_use))
    tried: list[Finding] = []
    for reading in (*readings, *suspected_misuse(comparison, thresholds)):
        order = put_right(reading.where.op or "", trying(), session)
        after.restore()
        tried.append(replace(reading, prescription=order))
        if order.status == "intervention":
            return (tried[-1],)
    if wrong_use is not None:
        return (tried[0],)
    findings: list[Finding] = []
    try:
        stale = stale_casts(session, before, comparison, trying(), thresholds)
        if stale is not None:
            return (stale,)
        trials = trying()
        findings += _far_from_fp32(session, before, comparison, trying, thresholds, passing=passing)
        still = _still_at_full_rate(place, before, comparison, thresholds, passing.known)
        if still is not None and not any(finding.cause in _ELSEWHERE for finding in findings):
            found_still = standing_still(session, before, comparison, still)
            findings += [] if found_still is None else [found_still]
        last = used_while_scaled(comparison, thresholds) if not findings else None
        if last is not None:
            order = put_right(last.where.op or "", trials, session)
            findings += [replace(last, prescription=order)] if order.status == "intervention" else []
    finally:
        after.restore()
    return tuple(findings)


def _still_at_full_rate(
    place: ReplayPosition, before: Snapshot, comparison: Comparison, thresholds: Thresholds, known: Known
) -> Stagnation | None:
    """Returns what stands still, unless it moves at the learning rate that a warm-up rises to."""
    still = stagnation(comparison, thresholds)
    if still is None or known.warm_up:
        return None
    later = at_full_rate(place.session, place.start, before, comparison.step)
    known.warm_up = later is not None and stagnation(later, thresholds) is None
    return None if known.warm_up else still


def _far_from_fp32(
    session: Session,
    before: Snapshot,
    comparison: Comparison,
    trying: Callable[..., Trials],
    thresholds: Thresholds,
    *,
    passing: ComparisonSummary,
) -> Iterator[Finding]:
    """Yields why gradients are far from fp32's, in total or for single parameters; the session is left in any state.

    The reason is an overflow that is divided away, a forward value that rounding changes, or gradients that flush to
    zero. For single parameters it is reported only where a change was shown to bring their gradients back.
    """
    alone, look = far_alone(comparison, thresholds, passing.known.alone), deserves_a_look(comparison, thresholds)
    if not (look or alone):
        return
    severity = underflow(comparison, thresholds)
    trace = traced(session, before, comparison.step, flushes=severity is not None)
    births = departing(trace, thresholds)
    flushed = severity is not None and bool(trace.flushes)
    own = {"tensors": [p.name for p in alone], "together": together(alone) / CLEARLY_NEARER} if alone else {}
    cure: Prescription | None = None
    if births:
        silent = trying(silent=thresholds, settles=True, **own)
        cure = prescribe(births[0], "forward_overflow", silent, session, others=births[1:])
    clear = flushed and comparison.zeroed_share > thresholds[ZEROED_SHARE]
    if not clear and (cure is None or cure.status not in SHOWN):
        rounding = _rounding_alone(session, before, comparison.step) if look else 0.0
        passing.looked_at(comparison, rounding)
        chaotic = look and comparison.gradient_error <= AS_FAR * rounding
        seen = () if chaotic else seen_in_forward(session, before, comparison.step, thresholds)
        found = wrong_in_forward(comparison, seen, alone or comparison.parameters, trying)
        if found is not None:
            yield found
            return
    if cure is not None and (
        cure.status in SHOWN if alone else cure.verified or not flushed
    ):  # else it is not the cause
        found = finding_of_birth(births[0], cause="forward_overflow", prescription=cure, others=births[1:])
        yield passing.rests_on(found, births[0])
    elif severity is not None and flushed:
        found = underflow_at(comparison, trace.flushes, severity)
        yield replace(found, prescription=underflow_cure(trying(), session))


# -- comparison during the replay: each step first in fp32, then restored, then as the run takes it --
# No step is run a second time for this, and none of its gradients is copied: each is compared where the optimizer gets
# it, and fp32's is then freed. State outside snapshots would advance twice a step. So this is only for runs in which
# none was seen to move (`Reached.beyond`) and that do nothing after a step (an average of the weights would include
# fp32's), and only once one step was seen to be reproduced: `CompareDuringReplay.proves`.


class DoesNotComeBackError(Exception):
    """A restored step gave other values when run again: the run keeps state that no snapshot holds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What distinguishes two runs of a step.

    `left` holds the smallest and largest element of each of the model's tensors after the step, as text: an optimizer
    with its own counter makes another update from the same gradients.
    """

    observed: Observed
    left: tuple[str, ...]

    @classmethod
    def of(cls, session: Session, sentinel: NonFiniteProbe) -> Seen:
        """Returns it for the step that has just run."""
        pairs = (extremes(tensor) for _, tensor in tensors_of(session.model))
        return cls(sentinel.observed, tuple(repr(float(end)) for pair in pairs for end in pair))

    def is_same(self, other: Seen) -> bool:
        """Whether two runs of the step do not differ."""
        return self.left == other.left and first_difference(self.observed, other.observed) is None


@dataclass(slots=True)
class CompareDuringReplay:
    """Collects the comparisons of pass 1 with fp32."""

    steps: int | None = None  # maximum number of compared steps; None for all
    seen: dict[int, StepComparison] = field(default_factory=dict)  # by step; others have to run again to be compared
    _proved: bool = False
    _gone: bool = False

    def wants(self, session: Session, step: int) -> bool:
        """Whether the step is to be compared during the replay."""
        return session.run.after_step is None and not self._gone and (self.steps is None or step < self.steps)

    @property
    def proved(self) -> bool:
        """A step after a step in fp32 was seen to be reproduced as well."""
        return self._proved

    def gives_up(self) -> None:
        """Compare no further step: the run keeps state of its own."""
        self._gone = True

    def twin(self, session: Session, step: int, snapshot: Snapshot, random_state: RandomState) -> Fp32Step | None:
        """Run the step, whose batch is drawn, in fp32 and restore; None, and no further twin, if it cannot run so."""
        try:
            return Fp32Step.run(session, step)
        except AmpdoctorError:
            self._gone = True  # the later comparison reports why
            return None
        finally:
            snapshot.restore()
            random_state.restore()

    def proves(self, step: int, first: Seen, again: Seen) -> None:
        """Record that the step, run again after its twin, was the same; raises DoesNotComeBackError if not."""
        if not first.is_same(again):
            raise DoesNotComeBackError(f"step {step}")
        self._proved = True

    def note(self, session: Session, twin: Fp32Step, outcome: StepOutcome, sentinel: NonFiniteProbe) -> None:
        """Keep the step's comparison with its twin; raises DoesNotComeBackError where only fp32 is not finite."""
        step = outcome.step
        if outcome.loses_updates:
            self.seen[step] = StepComparison()
        elif overflowed(sentinel) and outcome.optimizer_steps < twin.outcome.optimizer_steps:
            self.seen[step] = StepComparison(held=True)
        elif not twin.finite and not sentinel.sightings.sinks:  # only fp32 is not: the run may count its calls
            raise DoesNotComeBackError(f"step {step}")
        elif outcome.optimizer_steps == twin.outcome.optimizer_steps:
            self.seen[step] = StepComparison(twin.compared(session, outcome))
