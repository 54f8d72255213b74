"""`bisect-nan`: detect cheaply, then look closely, then prove.

Pass 1 replays the steps with one reduction a tensor. A step that fires is rewound and traced op by op; the births that
harm it give the cause; the prescription is replayed. A run that stays clean is compared with fp32 before it is healthy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.causes import Cause, cause_of, culprits, past_the_scaler, scale_may_cure
from ampdoctor.diagnosis.findings import (
    dead_scaler_finding,
    finding_of_birth,
    lost_scale_finding,
    nondeterministic_finding,
    unguarded_step_finding,
)
from ampdoctor.evidence.report import Check, ErrorNote, Finding, Report, Skipped, finding_order, verdict_of
from ampdoctor.evidence.where import Where
from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.snapshot import RandomState
from ampdoctor.workflows.prescribing import FP32_FAILS, fresh_scaler, prescribe, scale_cure
from ampdoctor.workflows.replaying import OpenReplay, open_replay
from ampdoctor.workflows.silent import Replayed, compare_with_fp32
from ampdoctor.workflows.state_check import DEAD_SCALE, scaler_section, sick_state
from ampdoctor.workflows.trials import Trials, loss_scale

if TYPE_CHECKING:
    from ampdoctor.evidence.checkpoint import ScalerState
    from ampdoctor.evidence.trace import Birth, Sightings, StepOutcome, Trace
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.request import Progress, ReplayRequest

DEFAULT_STEPS = 8
PERSISTS = 4
"""Steps in a row, up to the end, that a scaler must skip before it counts as unable to settle, if it ever stepped.

A scaler that has just doubled its scale skips one step; an overflow of h binades is left after h more.
"""


def bisect_nan(request: ReplayRequest, *, progress: Progress | None = None) -> Report:
    """Find the first step, layer and op that goes wrong, the cause, and a proven cure.

    Args:
        request: What to replay.
        progress: Told after each step.

    Returns:
        The report; `findings` is empty for a healthy run.

    Raises:
        AmpdoctorError: The run cannot be replayed, in one sentence.
    """
    with open_replay(request) as replay:
        search = _Search(replay, request.steps or DEFAULT_STEPS, progress)
        try:
            search.run()
        finally:
            search.start.restore()
            search.session.close()
        report = search.report()
    return replace(report, run={**report.run, "notes": list(dict.fromkeys(replay.notes))})


@dataclass(slots=True)
class _Skip:
    """A skipped step that a lower loss scale may explain: kept until the run shows whether the scaler settles."""

    step: int
    snapshot: Snapshot
    birth: Birth


@dataclass(slots=True)
class _Pending:
    """Non-finite gradients of a step that only accumulates: kept until an optimizer uses them, or a scaler does not."""

    snapshot: Snapshot
    births: tuple[Birth, ...]


@dataclass(slots=True)
class _Search:
    replay: OpenReplay
    steps: int
    progress: Progress | None
    session: Session = field(init=False)
    start: Snapshot = field(init=False)
    start_scale: float | None = field(init=False)
    outcomes: list[StepOutcome] = field(default_factory=list)
    seen: list[Replayed] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    deterministic: bool = True
    rewinds: bool = True
    """Snapshots bring a step back bit by bit."""
    unsettled: _Skip | None = None
    pending: _Pending | None = None

    def __post_init__(self) -> None:
        self.session = self.replay.session()
        self.start = self.session.snapshot()
        self.start_scale = self.session.events.scale()

    # -- the search ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look at the state, replay, and stop at the first step that is sick."""
        self.findings += sick_state(self.session)
        if self.findings:
            return
        sentinel = NonFiniteProbe()
        for step in range(self.steps):
            if not self.session.has_step(step):
                break
            snapshot = self.session.snapshot()
            random_state = RandomState.capture()
            with self.session.watched(sentinel):
                outcome = self.session.step(step)
            self.outcomes.append(outcome)
            self.seen.append(Replayed(sentinel.observed, random_state, outcome.optimizer_steps))
            self._tell("replaying", step + 1)
            if self._is_sick(snapshot, outcome, sentinel):
                return
        if not self.outcomes:
            self.errors.append(
                ErrorNote(what="batches", kind="empty", message="the run has no batch: nothing was replayed")
            )
            return
        if self._dead_scale() is not None:
            self.findings.append(self._dead_scaler(self.start, Where(step=0, phase="checkpoint", op="scaler_state")))
            return
        if not self._saw_anything():
            self.errors.append(
                ErrorNote(what="steps", kind="empty", message="no step had a loss or a gradient: nothing was examined")
            )
            return
        self._settle()
        if not any(finding.severity == "error" for finding in self.findings):
            self._compare()
        if len(self.outcomes) == self.steps and self.session.has_step(self.steps):
            self.skipped.append(Skipped(what="further batches", reason=f"{self.steps} steps were asked for (--steps)"))

    def _saw_anything(self) -> bool:
        """Did a step leave a loss, or a gradient?"""
        seen = any(what.startswith("gradient of") for step in self.seen for what, _ in step.observed)
        return seen or any(outcome.loss is not None for outcome in self.outcomes)

    def _dead_scale(self) -> float | None:
        """The loss scale before step 0, where it is one with which every step does harm."""
        scale = self.start_scale
        return scale if scale is not None and not (math.isfinite(scale) and abs(scale) > DEAD_SCALE) else None

    def _dead_scaler(self, snapshot: Snapshot, where: Where) -> Finding:
        trials = self._trials(snapshot, 0, self._known_steps())
        return dead_scaler_finding(self._dead_scale() or 0.0, DEAD_SCALE, where, fresh_scaler(trials))

    def _look_closely(self, snapshot: Snapshot, outcome: StepOutcome, sentinel: NonFiniteProbe) -> Trace | None:
        """The same step again, traced; from a fresh run where the snapshot does not bring the same bits back."""
        seen, step = sentinel.observed, outcome.step
        if not self.rewinds:
            return self._from_the_start(step, seen, go_on=False)
        tracer = OpTraceProbe()
        snapshot.restore()
        with self.session.watched(sentinel, tracer):
            again = self.session.step(step)
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

    def _from_the_start(self, step: int, seen: tuple[tuple[str, float], ...], *, go_on: bool) -> Trace | None:
        """A fresh factory call replayed from step 0: the reference where state hides from snapshots.

        With `go_on` the search goes on in it: what no snapshot holds has moved on twice in the run so far.
        """
        session = self.replay.session()
        sentinel, tracer = NonFiniteProbe(), OpTraceProbe()
        try:
            for earlier in range(step):
                if not session.has_step(earlier):
                    return None
                session.step(earlier)
            if not session.has_step(step):
                return None
            with session.watched(sentinel, tracer):
                session.step(step)
            same = first_difference(seen, sentinel.observed) is None
            if same and go_on:
                self.session, session = session, self.session
                self.session.replays, session.replays = session.replays, self.session.replays
        finally:
            self.session.replays += session.replays
            session.close()
        return tracer.trace if same else None

    def _is_sick(self, snapshot: Snapshot, outcome: StepOutcome, sentinel: NonFiniteProbe) -> bool:
        """Did this step do harm? Then its findings are added.

        Gradients that no optimizer has used yet, in a step that only accumulates, are judged in the one that uses them.
        """
        sinks = sentinel.sightings.sinks
        used = bool(outcome.optimizer_steps) or outcome.skipped or not self.session.optimizers
        if used and not outcome.skipped:
            self.unsettled = None
        pending, self.pending = self.pending, None
        if not sinks and not outcome.skipped:
            self.pending = None if used else pending
            return False
        sightings = sentinel.sightings
        if pending is not None and not used:
            self.pending = pending
            return False
        trace = self._look_closely(snapshot, outcome, sentinel)
        births = culprits(trace) if trace is not None else ()
        if not used and births and all(sink.startswith("grad:") for sink in sinks):
            self.pending = _Pending(snapshot, births)
            return False
        if pending is not None:
            new = tuple(birth for birth in births if birth.origin not in ("constant", "grad"))
            births, snapshot = (*pending.births, *new), pending.snapshot
        return self._judge(trace, births, outcome, sightings, snapshot)

    def _judge(
        self,
        trace: Trace | None,
        births: tuple[Birth, ...],
        outcome: StepOutcome,
        sightings: Sightings,
        snapshot: Snapshot,
    ) -> bool:
        """Is this step sick? Then its findings are added. A step that a scaler skips may be health."""
        if not births:
            if outcome.skipped or (trace is not None and trace.unattributed):
                self.errors.append(
                    ErrorNote(
                        what=f"step {outcome.step}",
                        kind="unattributed",
                        message=_unattributed(outcome.step, sightings.sinks),
                    )
                )
                return bool(trace is not None and trace.unattributed)
            return False  # the cheap sum fired on finite values
        main = births[0]
        if outcome.skipped and scale_may_cure(births, sightings):
            if self.unsettled is None:
                self.unsettled = _Skip(main.where.step or 0, snapshot, main)
            return False
        if main.where.phase == "scaler" and outcome.step == 0 and self._dead_scale() is not None:
            self.findings.append(self._dead_scaler(snapshot, main.where))
            return True
        cause = cause_of(main)
        if cause == "backward_overflow" and past_the_scaler(outcome) and self.session.events.enabled:
            self.findings.append(unguarded_step_finding(main, outcome.scale_before))
            return True
        trials = self._trials(snapshot, main.where.step or 0, self._known_steps())
        prescription = prescribe(main, cause, trials, self.session)
        if cause == "invalid_op" and prescription.kind == "skip_batch" and prescription.verified:
            cause = "bad_data"  # fp32 does not cure it, and without this batch nothing is wrong
        finding = finding_of_birth(main, cause=cause, prescription=prescription, others=births[1:])
        fails_anyway = prescription.detail == FP32_FAILS
        self.findings.append(replace(finding, help=FP32_FAILS) if fails_anyway else finding)
        return True

    def _trials(self, snapshot: Snapshot, step: int, steps: int) -> Trials:
        return Trials(self.session, snapshot, step, steps, comes_back=self.rewinds)

    def _known_steps(self) -> int:
        """Steps that have batches, so that a trial may run past the bad one."""
        known = len(self.outcomes)
        while known < self.steps and self.session.has_step(known):
            known += 1
        return known

    def _settle(self) -> None:
        """Skips at a high scale are health once a step is taken; otherwise the scale is at fault, or none works."""
        resumed = self.replay.resumed
        lost = resumed.file_scaler if resumed is not None and resumed.settled_scale_lost else None
        skip = self.unsettled
        if skip is not None and skip.step > 0 and len(self.outcomes) - skip.step < PERSISTS:
            skip = None  # a scaler at work
        if lost is not None:
            self.findings.append(self._not_continued(lost, skip))
        elif skip is not None:
            trials = self._trials(skip.snapshot, skip.step, len(self.outcomes))
            cure = scale_cure(skip.birth, trials, self.session)
            cause: Cause = "grad_overflow" if cure is not None and cure.verified else "scaler_collapse"
            if cause == "scaler_collapse" and trials.reference() is None:
                cause = cause_of(skip.birth)  # no scale works because nothing does
            prescription = cure if cause == "grad_overflow" else prescribe(skip.birth, cause, trials, self.session)
            self.findings.append(
                finding_of_birth(
                    skip.birth,
                    cause=cause,
                    prescription=prescription,
                    severity="warning" if cause == "grad_overflow" else "error",
                )
            )

    def _not_continued(self, lost: ScalerState, skip: _Skip | None) -> Finding:
        """The checkpoint's settled scale is not continued: a warning, an error where the run skips its steps for it."""
        own = self.outcomes[0].scale_before
        if skip is None:
            return lost_scale_finding(lost, own, None, None)
        trials = self._trials(skip.snapshot, skip.step, len(self.outcomes))
        cure = trials.attempt("init_scale", lost.scale, loss_scale(lost.scale), "load the checkpoint's scaler state")
        return lost_scale_finding(lost, own, skip.birth, cure)

    def _compare(self) -> None:
        """Some sickness stays finite: the same steps in fp32, from the same states."""
        self._tell("comparing with fp32", 0)
        start = self.start if self.rewinds else None
        passed = compare_with_fp32(self.session, start, self.seen, self.replay.session)
        self.deterministic = self.deterministic and passed.deterministic
        self.findings += passed.findings
        self.checks += passed.checks
        self.skipped += passed.skipped

    def _tell(self, what: str, done: int) -> None:
        if self.progress is not None:
            self.progress(what, done, self.steps)

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What was found."""
        findings = tuple(self.replay.located(f) for f in sorted(self.findings, key=finding_order))
        verdict = verdict_of(findings, expect_failure=self.replay.request.expect_failure)
        sick = verdict == "sick"
        if self.errors and not sick:
            verdict = "inconclusive"
        skipped = [outcome.step for outcome in self.outcomes if outcome.skipped]
        checks = (
            Check(
                name="finite loss, gradients, parameters, buffers and optimizer state",
                result="found" if sick else "ok",
                headroom={"steps": len(self.outcomes)},
            ),
            Check(name="steps skipped by the scaler", result=f"{len(skipped)} of {len(self.outcomes)}"),
            *self.checks,
        )
        run = self.replay.described(self.session, len(self.outcomes))
        return Report(
            command="bisect-nan",
            target={"factory": self.replay.factory.name, "checkpoint": self.replay.request.checkpoint},
            run={**run, "deterministic": self.deterministic},
            verdict=verdict,
            complete=not self.errors,
            findings=findings,
            checks=checks,
            skipped=(*self.replay.left_out(), *self.skipped),
            errors=tuple(self.errors),
            scaler=scaler_section(self.session, self.findings),
        )


def _unattributed(step: int, sinks: tuple[str, ...]) -> str:
    what = sinks[0] if sinks else "a gradient"
    return f"step {step}: {what} is non-finite, but no op was seen to make it so (code outside torch's dispatcher?)"
