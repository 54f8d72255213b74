"""Compares the steps of a run with fp32, while they are replayed or afterwards, and explains what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.forward import CLEARLY_NEARER, far_alone, may_be_stale, together, unexplained
from ampdoctor.diagnosis.replay.gradients import ZEROED_SHARE, deserves_a_look, underflow, underflow_at
from ampdoctor.diagnosis.replay.nonfinite import departing, origin_finding
from ampdoctor.diagnosis.replay.outcome import nondeterministic_finding
from ampdoctor.diagnosis.replay.scaler import misuse, other_readings, suspected_misuse, used_while_scaled
from ampdoctor.diagnosis.replay.updates import stagnation
from ampdoctor.evidence.report import Finding
from ampdoctor.numerics.tensors import extremes
from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.op_trace import NonFiniteOpsProbe
from ampdoctor.replay.python_state import has_moved
from ampdoctor.replay.snapshot import tensors_of
from ampdoctor.workflows import wrong_forward
from ampdoctor.workflows.lost_updates import at_full_rate, by_tensor, standing_still
from ampdoctor.workflows.prescribe import prescribe, underflow_cure
from ampdoctor.workflows.repairs import fix_scaler_misuse
from ampdoctor.workflows.rerun_step import ReplayPosition, StepRerun
from ampdoctor.workflows.step_beside_fp32 import (
    AS_FAR,
    ComparisonSummary,
    Known,
    ReferencePass,
    Replayed,
    StepComparison,
    beside_fp32,
)
from ampdoctor.workflows.trials import SHOWN, Trials

if TYPE_CHECKING:
    from ampdoctor.diagnosis.replay.updates import Stagnation
    from ampdoctor.evidence.report import Prescription
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import Comparison, StepOutcome
    from ampdoctor.probes.formats_seen import FormatsProbe
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


# -- while a step is replayed: first in fp32, then restored, then as the run takes it --
# State outside snapshots would advance twice a step. So this is only for runs in which none was seen to move
# (`Reached.beyond`) and that do nothing after a step (an average of the weights would include fp32's), and only once
# one step was seen to be reproduced. Any other run is compared afterwards.


class DoesNotComeBackError(Exception):
    """A restored step gave other values when run again: the run keeps state that no snapshot holds."""


def _left(session: Session) -> list[str]:
    """Returns the ends of each tensor after a step: an optimizer that counts makes another of the same gradients."""
    return [repr(float(end)) for _, tensor in tensors_of(session.model) for end in extremes(tensor)]


@dataclass(slots=True)
class CompareDuringReplay:
    """Runs the steps of pass 1 beside fp32."""

    steps: int | None = None  # maximum number of compared steps; None for all
    formats: FormatsProbe | None = None  # sees the first step, for what flushes
    compared: list[StepComparison] = field(default_factory=list)
    proved: bool = False  # a step after a step in fp32 was seen to be reproduced
    _gone: bool = False

    def wants(self, session: Session, step: int) -> bool:
        """Whether the step is to be compared during the replay."""
        return session.run.after_step is None and not self._gone and (self.steps is None or step < self.steps)

    def attempt(
        self, session: Session, step: int, before: Snapshot, nonfinite_probe: NonFiniteProbe
    ) -> tuple[StepOutcome, StepComparison | None]:
        """Replay a step beside fp32 from `before`; the first healthy one once more, to see that it comes back."""
        own, first = session.reached.beyond(), None
        if not self.proved:
            with session.watched(nonfinite_probe):
                outcome = session.attempt(step)
            if outcome.raised is not None or outcome.skipped or nonfinite_probe.report.affected:
                return outcome, None
            if has_moved(own, session.reached.beyond()):
                self._gone = True
                return outcome, None
            first = nonfinite_probe.observed, _left(session)
            before.restore()
            if self.formats is not None:  # once more: under a mode of ours torch may choose other kernels
                with session.watched(self.formats):
                    session.attempt(step)
                before.restore()
        outcome, beside = beside_fp32(session, before, step, nonfinite_probe, self.formats)
        differs = first is not None and (
            first[1] != _left(session) or first_difference(first[0], nonfinite_probe.observed) is not None
        )
        only_fp32 = beside.only_fp32_fails and not nonfinite_probe.report.affected  # the run may count its calls
        if differs or only_fp32 or has_moved(own, session.reached.beyond()):
            raise DoesNotComeBackError
        self.proved = True
        self._gone = self._gone or beside.raises
        self.compared.append(beside)
        return outcome, beside


# -- which of the compared steps is sick, and why --

_ELSEWHERE = ("forward_overflow", "forward_precision")
"""Causes for which other elements move than in fp32: rows of other ids, or none behind a normaliser of inf."""
NOT_REPEATABLE = "a step has other values when it is run again: the run keeps state that no snapshot holds"
FOLLOWED = 8
"""Number of steps in which stale copies are searched where fp32 cannot run, and of steps with notes after which the
comparison ends: as many as `bisect-nan` replays by default."""


def compare_with_fp32(
    session: Session,
    start: Snapshot | None,
    seen: Sequence[Replayed],
    thresholds: Thresholds,
    *,
    begin: int = 0,
    first: int = 0,
) -> ReferencePass:
    """Judge the steps from `first` on beside fp32, and stop at the first sick one; `start` is before step `begin`."""
    passing = ComparisonSummary(thresholds)
    if start is None:
        return passing.ended(cut=NOT_REPEATABLE)
    place = ReplayPosition(session, start, seen, begin)
    notes: list[Finding] = []
    for step, noted in islice(enumerate(seen, begin), max(first - begin, 0), None):
        if noted.skipped:
            continue  # without an update, nothing is compared
        beside = noted.beside or _run_again(place, step, noted)
        if isinstance(beside, Finding):
            passed = passing.ended(cut=NOT_REPEATABLE)
            return replace(passed, findings=(*passed.findings, beside), deterministic=False)
        if beside.cut is not None:
            return passing.ended(_stalest(place, step, thresholds) if beside.raises else (), cut=beside.cut)
        findings = _findings(place, step, beside, passing)
        # an average starts as the weights, so that later steps show more of stale copies
        grows = all(one.cause == "stale_casts" and one.severity == "note" for one in findings)
        if grows and len(notes) < FOLLOWED:
            notes += findings
        elif findings:
            return passing.ended(findings)
    return passing.ended((*notes[:1], *by_tensor(place, passing.compared, thresholds, passing.known)))


def _run_again(place: ReplayPosition, step: int, noted: Replayed) -> StepComparison | Finding:
    again = place.to(step)
    if again is None:
        return StepComparison()
    nonfinite_probe = NonFiniteProbe()
    outcome, beside = beside_fp32(again.session, again.before, step, nonfinite_probe)
    place.at = step + 1
    differs = first_difference(noted.observed, nonfinite_probe.observed)
    if differs is None and outcome.optimizer_steps != noted.optimizer_steps:
        differs = "number of updates", float(noted.optimizer_steps), float(outcome.optimizer_steps)
    return beside if differs is None else nondeterministic_finding(step, *differs, "note")


def _stalest(place: ReplayPosition, step: int, thresholds: Thresholds) -> tuple[Finding, ...]:
    again = place.to(step)
    steps = min(place.steps - step, FOLLOWED)
    found = None if again is None else wrong_forward.stalest_without_fp32(again, steps, thresholds)
    return () if found is None else (found,)


def _findings(
    place: ReplayPosition, step: int, beside: StepComparison, passing: ComparisonSummary
) -> tuple[Finding, ...]:
    comparison = beside.comparison
    findings: tuple[Finding, ...] = ()
    if comparison is None or beside.own is None:
        passing.held += beside.held
        return ()
    if not is_calm(comparison, passing.thresholds, passing.known) and (again := place.to(step)) is not None:
        trying = partial(again.trials, place.steps, without=(beside.own,))
        findings = _Examination(again, comparison, place.start, trying, passing).findings()
    passing.add(comparison)
    return findings


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
class _Examination:
    """Explains a step in which a rule fires; the session is left in any state."""

    again: StepRerun
    comparison: Comparison
    start: Snapshot  # the state before the first step
    trying: Callable[..., Trials]  # makes trials of the step
    passing: ComparisonSummary

    def findings(self) -> tuple[Finding, ...]:
        """Returns the findings of the first rule that holds; without any, the step's values count as harmless."""
        again, comparison, thresholds, trying = self.again, self.comparison, self.passing.thresholds, self.trying
        session = again.session
        wrong_use = misuse(comparison, thresholds)
        readings = () if wrong_use is None else (wrong_use, *other_readings(comparison, wrong_use))
        tried: list[Finding] = []
        for reading in (*readings, *suspected_misuse(comparison, thresholds)):
            order = fix_scaler_misuse(reading.where.op or "", trying(), session)
            tried.append(replace(reading, prescription=order))
            if order.status == "intervention":
                return (tried[-1],)
        if wrong_use is not None:
            return (tried[0],)
        ops = NonFiniteOpsProbe()
        old = wrong_forward.old_copies(again, ops)
        stale = None if old is None else wrong_forward.stale_casts(again, old, comparison, trying(), thresholds)
        if stale is not None:
            return (stale,)
        findings = [*self._far_from_fp32(ops)]
        still = self._still_at_full_rate()
        if still is not None and not any(finding.cause in _ELSEWHERE for finding in findings):
            found_still = standing_still(again, comparison, still)
            findings += [] if found_still is None else [found_still]
        last = used_while_scaled(comparison, thresholds) if not findings else None
        if last is not None:
            order = fix_scaler_misuse(last.where.op or "", trying(), session)
            findings += [replace(last, prescription=order)] if order.status == "intervention" else []
        if not findings:
            self.passing.known.looks(far_alone(comparison, thresholds))
        return tuple(findings)

    def _still_at_full_rate(self) -> Stagnation | None:
        known, thresholds = self.passing.known, self.passing.thresholds
        still = stagnation(self.comparison, thresholds)
        if still is None or known.warm_up:
            return None
        later = at_full_rate(self.again, self.start)
        known.warm_up = later is not None and stagnation(later, thresholds) is None
        return None if known.warm_up else still

    def _far_from_fp32(self, ops: NonFiniteOpsProbe) -> Iterator[Finding]:
        """Yields why gradients are far from fp32's: an overflow divided away, rounding in the forward, underflow."""
        again, comparison, thresholds, trying = self.again, self.comparison, self.passing.thresholds, self.trying
        alone = far_alone(comparison, thresholds, self.passing.known.alone)
        look = deserves_a_look(comparison, thresholds)
        if not (look or alone):
            return
        severity = underflow(comparison, thresholds)
        trace = again.traced(flushes=severity is not None) if ops.found or severity is not None else None
        origins = () if trace is None else departing(trace, thresholds)
        flushes = () if trace is None else trace.flushes
        flushed = severity is not None and bool(flushes)
        own = {"tensors": [p.name for p in alone], "together": together(alone) / CLEARLY_NEARER} if alone else {}
        cure: Prescription | None = None
        if origins:
            silent = trying(silent=thresholds, settles=True, **own)
            cure = prescribe(origins[0], "forward_overflow", silent, again.session, others=origins[1:])
        clear = flushed and comparison.zeroed_share > thresholds[ZEROED_SHARE]
        if not clear and (cure is None or cure.status not in SHOWN):
            rounding = self._rounding_alone() if look else 0.0
            self.passing.looked_at(comparison, rounding)
            chaotic = look and comparison.gradient_error <= AS_FAR * rounding
            seen = () if chaotic else wrong_forward.seen_in_forward(again, thresholds)
            found = wrong_forward.wrong_in_forward(comparison, seen, alone or comparison.parameters, trying)
            if found is not None:
                yield found
                return
        if cure is not None and (
            cure.status in SHOWN if alone else cure.verified or not flushed
        ):  # else it is not the cause
            found = origin_finding(origins[0], cause="forward_overflow", prescription=cure, others=origins[1:])
            self.passing.origins[found.fingerprint] = origins[0]
            yield found
        elif severity is not None and flushed:
            found = underflow_at(comparison, flushes, severity)
            yield replace(found, prescription=underflow_cure(trying(), again.session))

    def _rounding_alone(self) -> float:
        """Returns how far the fp32 gradients move when each weight is rounded once in the compute format."""
        precision = self.again.session.precision
        if not precision.reduced:
            return 0.0
        apart = self.again.perturbed_weights(precision.dtype).distance
        return apart.relative if math.isfinite(apart.norm) else 0.0
