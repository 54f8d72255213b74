"""`bisect-nan`: detect cheaply, then look closely, then prove.

Pass 1 replays the steps with one reduction per tensor. A step that fires is rewound and traced op by op; the origins
that harm it give the cause, and the prescription is replayed. A run that stays clean is compared with fp32 before it
counts as healthy. A failure that the user has set aside does not end the search if the run continues after it. With
`until_sick` the run goes on for thousands of steps, and only the last ones are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.nonfinite import MISUSE_ADVICE
from ampdoctor.diagnosis.replay.scale_choice import shrinking_headroom
from ampdoctor.diagnosis.replay.scaler import SCALER_MISUSE as MISUSE
from ampdoctor.diagnosis.replay.scaler import (
    refused_call_finding,
    stepped_again_finding,
    stepped_past_finding,
    suspicious,
    unloaded_scale_finding,
)
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import (
    STEPS_AFTER,
    Check,
    ErrorNote,
    Finding,
    Report,
    Skipped,
    Verdict,
    finding_order,
    renumber_steps,
    verdict_of,
)
from ampdoctor.evidence.report_replay import FINITE_CHECK, NOT_COMPARED
from ampdoctor.live.scaler_protocol import half_weights
from ampdoctor.probes.user_code import as_source, own_line, raising_line
from ampdoctor.workflows.checkpoint_state import (
    history_findings,
    holds_nonfinite,
    not_said_yet,
    saved_scale,
    state_findings,
    with_trials,
)
from ampdoctor.workflows.close_look import SnapshotRing, StepTracer
from ampdoctor.workflows.compare_fp32 import CompareDuringReplay, DoesNotComeBackError, compare_with_fp32, is_calm
from ampdoctor.workflows.judge import Judge, led_on, told_once, unproved_while_misused
from ampdoctor.workflows.open_replay import OpenReplay, open_replay, scaler_after
from ampdoctor.workflows.output_files import last_log_of
from ampdoctor.workflows.repairs import after_refusal
from ampdoctor.workflows.report_notes import (
    LAST_COMPARED,
    failed_run,
    headroom_check,
    interrupted,
    module_types,
    never_updated,
    not_reproduced,
    nothing_in_half,
    only_looked_at,
    path_section,
    saw_anything,
    unexamined,
)
from ampdoctor.workflows.requests import MOST_UNTIL_SICK, keep_all
from ampdoctor.workflows.step_beside_fp32 import ReferencePass, Replayed, StateCopy, StepComparison, held, moved, sample
from ampdoctor.workflows.trials import as_far_as_replayed, proof_of

if TYPE_CHECKING:
    from ampdoctor.errors import UserCodeError
    from ampdoctor.evidence.report_replay import PathSection
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import Headroom, StepOutcome
    from ampdoctor.probes.nonfinite import NonFiniteProbe, Observation
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.requests import Progress, ReplayRequest, SetAside

DEFAULT_STEPS = 8


def bisect_nan(
    request: ReplayRequest,
    *,
    progress: Progress | None = None,
    set_aside: SetAside = keep_all,
    alongside: CompareDuringReplay | None = None,
) -> Report:
    """Find the first step, layer and op that goes wrong, the cause, and a proven cure.

    Args:
        request: What to replay.
        progress: Called after each step; with `until_sick` also before the first.
        set_aside: Decides what the user accepts. The search continues past a failure that this sets aside or makes less
            than an error, as long as the run stays finite.
        alongside: Compares the steps while they are replayed, and keeps what it saw.

    Returns:
        The report; `findings` is empty for a healthy run.

    Raises:
        AmpdoctorError: The run cannot be replayed; one sentence says why.
        KeyboardInterrupt: Ctrl-C; with `until_sick` the report holds what was known by then instead.
    """
    ways = [alongside] if alongside is not None else []  # counting what flushes may change the last bits of a sum
    ways += [CompareDuringReplay(request.compare_steps)]
    with open_replay(request) as replay:
        for way in (*(() if request.until_sick else ways), None):
            with suppress(DoesNotComeBackError):  # start over; at last no step runs twice before each has run once
                report = _searched(replay, progress, set_aside, way)
                break
            if way is not None:
                way.compared.clear()
    report = replace(report, run={**report.run, "notes": list(dict.fromkeys(replay.notes))})
    watched = last_log_of(replay.factory.name) if report.verdict == "healthy" else None
    if watched is not None:  # it knows more steps
        report = replace(report, run={**report.run, "kept": {"health": watched}})
    return _as_in_its_loop(renumber_steps(report, replay.first_step or 0), replay.finite_again)


def _as_in_its_loop(report: Report, finite_again: str | None) -> Report:
    """Returns the report, not healthy for a recorded step that was sick in its loop and finite when replayed there."""
    if finite_again is None or report.verdict == "sick":
        return report
    note = ErrorNote(what="the recorded step", kind="not_reproduced", message=finite_again)
    return replace(report, verdict="not_reproduced", complete=False, errors=(*report.errors, note))


def _searched(
    replay: OpenReplay, progress: Progress | None, set_aside: SetAside, alongside: CompareDuringReplay | None
) -> Report:
    request = replay.request
    steps = request.max_steps or MOST_UNTIL_SICK if request.until_sick else request.steps or DEFAULT_STEPS
    search = _Search(replay, steps, progress, set_aside, alongside)
    try:
        search.run()
    except KeyboardInterrupt:
        if not (request.until_sick and search.outcomes):
            raise
        search.errors.append(interrupted(replay, search.outcomes, search.looking_into))
    finally:
        search.start.restore()
        search.session.close()
    return search.report()


@dataclass(slots=True)
class _Search:
    replay: OpenReplay
    steps: int
    progress: Progress | None
    set_aside: SetAside
    alongside: CompareDuringReplay | None
    look: StepTracer = field(init=False)
    judge: Judge = field(init=False)
    start: Snapshot = field(init=False)
    _at_start: StateCopy = field(init=False)
    back: SnapshotRing = field(init=False)
    outcomes: list[StepOutcome] = field(default_factory=list)
    seen: list[Replayed] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    tightest: Headroom | None = None
    near: list[Headroom] = field(default_factory=list)
    _sick: bool = False
    _cut: bool = False
    _not_in_half: bool = False
    _nonfinite_steps: int = 0
    _compared: int = 0
    _forgotten: int = 0
    looking_into: int | None = None  # the step that fired
    _watching: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.look = StepTracer(self.replay)
        self.start = self.session.snapshot()
        self.session.events.called_at = lambda: as_source(own_line())
        self._at_start = StateCopy(trained={name: sample(tensor).clone() for name, tensor in held(self.session)})
        self.back = SnapshotRing(self.steps, self._beside_at_the_end if self.until_sick else 0)
        self.back.also(0, self.start)
        resumed = self.replay.resumed
        fresh = resumed.collapsed_from if resumed is not None else None
        self.judge = Judge(self.look, self.steps, self.session.events.scale(), self.start, fresh)

    @property
    def session(self) -> Session:
        """The run under examination."""
        return self.look.session

    @property
    def thresholds(self) -> Thresholds:
        return self.replay.request.thresholds

    @property
    def until_sick(self) -> bool:
        return self.replay.request.until_sick

    @property
    def _beside_at_the_end(self) -> int:
        wanted = self.replay.request.compare_steps
        return LAST_COMPARED if wanted is None else wanted

    # -- search --

    def run(self) -> None:
        """Check the state, replay, and stop at the first step with a sickness that is not set aside."""
        found = state_findings(self.replay, self.session, self.thresholds)
        if found and self.session.has_step(0):
            found = with_trials(found, self.judge.trials_of_state(self.start))
        self.findings += found
        self._sick = any(finding.where.nonfinite != "none" for finding in self.findings)
        harmed = any(finding.severity == "error" for finding in self.findings)
        if harmed and not self._goes_on(-1, self.start):
            return
        if not self._replay():
            self._conclude()
        self._judge_the_saved_scale()

    def _judge_the_saved_scale(self) -> None:
        saved, resumed = saved_scale(self.replay), self.replay.resumed
        if saved is None or resumed is None:
            return
        if not resumed.scaler_continued:
            needed = any("checkpoint_scale" in finding.evidence for finding in self.judge.findings)
            if not needed:
                own = self.outcomes[0].scale_before if self.outcomes else None
                self.findings.append(unloaded_scale_finding(saved, own))
            return
        with self._telling("replaying with a fresh scaler"):
            harmed = any(finding.severity == "error" for finding in self._found())
            collapsed = self.judge.collapsed_scale(saved, harmed=harmed)
        self.findings += [] if collapsed is None else [collapsed]

    def _replay(self) -> bool:
        """Whether a step is so sick that the search ends."""
        if self.until_sick:
            self._tell("replaying", 0)
        try:
            return self._replayed_to_the_end()
        finally:
            self._watching.close()

    def _replayed_to_the_end(self) -> bool:
        nonfinite_probe = self.look.nonfinite_probe()
        for step in self._steps():
            comparing = self._compares(step)
            self.back.passes(self.session, step, exact=comparing or not self.look.rewinds)
            outcome, beside = self._attempted(step, nonfinite_probe, comparing=comparing)
            raised = self.session.raised
            self.outcomes.append(outcome)
            state = self.back.random_state(step)
            left_out = outcome.loses_updates
            self.seen.append(Replayed(nonfinite_probe.observed, state, outcome.optimizer_steps, left_out, beside))
            self._forget()
            if not left_out:
                self._note_headroom(nonfinite_probe)
            self._tell("replaying", step + 1)
            if self._breaks_protocol(outcome, nonfinite_probe):
                if self._goes_on(step, self.back.nearest, raised=outcome.raised):
                    continue
                return True
            fired = outcome.skipped or bool(nonfinite_probe.report.affected)
            self._nonfinite_steps += outcome.skipped or any(
                target != "raised" for target in nonfinite_probe.report.affected
            )
            self.looking_into = step if fired else None
            snapshot, sick = self._judged(outcome, nonfinite_probe, fired=fired)
            if self._twice and not self.look.rewinds:
                raise DoesNotComeBackError
            if sick:
                self._sick = True
                self._look_before()
                self._say_what_was_raised(outcome)
                if self._goes_on(step, snapshot, raised=outcome.raised):
                    continue
                return True
            if raised is not None:
                if self._twice:
                    raise DoesNotComeBackError
                raise raised  # a bug in the user's code: nothing non-finite led to it
            del snapshot  # frees memory for the next one
            self.looking_into = None
        return False

    @property
    def _twice(self) -> bool:
        return self.alongside is not None and self.alongside.proved

    def _compares(self, step: int) -> bool:
        return self.alongside is not None and self.look.rewinds and self.alongside.wants(self.session, step)

    def _forget(self) -> None:
        if self.until_sick and self.back.begin > self._forgotten:
            del self.seen[: self.back.begin - self._forgotten]
            self._forgotten = self.back.begin

    def _judged(self, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe, *, fired: bool) -> tuple[Snapshot, bool]:
        """Returns the state before a step (an earlier one if it did not fire), and whether the step is sick."""
        step = outcome.step
        if fired:
            self._watching.close()
        with self._telling(f"looking closely at step {step}"):
            snapshot = self.back.to(step) if fired else self.back.nearest
            self.judge.earlier = (self.back.begin, self.back.farthest) if fired and self.until_sick else None
            return snapshot, self.judge.is_sick(snapshot, outcome, nonfinite_probe)

    def _steps(self) -> Iterator[int]:
        for step in count():
            if step >= self.steps or not self.session.has_step(step):
                return
            if self.back.is_due(self.session, step) or not self.look.rewinds:
                self._watching.close()  # snapshots are taken without a probe
            yield step

    def _attempted(
        self, step: int, nonfinite_probe: NonFiniteProbe, *, comparing: bool
    ) -> tuple[StepOutcome, StepComparison | None]:
        if comparing and self.alongside is not None:
            return self.alongside.attempt(self.session, step, self.back.nearest, nonfinite_probe)
        if self.until_sick:  # the probe stays attached between steps, because attaching it reads all state
            if not self.session.is_watched:
                self._watching.enter_context(self.session.watched(nonfinite_probe))
            return self.session.attempt(step), None
        with self.session.watched(nonfinite_probe):
            return self.session.attempt(step), None

    def _goes_on(self, step: int, snapshot: Snapshot, *, raised: str | None = None) -> bool:
        """Whether all errors so far are set aside and the run continues past the last; `step` is -1 before step 0."""
        found = self._found()
        if self.errors or self.judge.errors or verdict_of(found) != "sick" or self._counting(found):
            return False
        if raised is not None:
            stopped = f"it raises {raised}"
        elif not self.look.rewinds:
            stopped = "the run does not come back bit by bit"
        else:
            snapshot.restore()
            if step >= 0:
                self.session.attempt(step)
            if not holds_nonfinite(self.session):
                return True
            stopped = "parameters, buffers or moments are non-finite from there on"
        self._cut = True
        behind = f"step {step}" if step >= 0 else "the state at the start"
        reason = f"what was found there is set aside, and {stopped}"
        self.skipped.append(Skipped(what=f"{STEPS_AFTER}{behind}", reason=reason, kind="not_replayed"))
        return False

    def _found(self) -> list[Finding]:
        return [*self.look.findings, *self.judge.findings, *self.findings]

    def _decided(self, found: Sequence[Finding]) -> Report:
        target = self.replay.request.described(self.replay.factory.name)
        return self.set_aside(Report(command="bisect-nan", target=target, verdict="sick", findings=tuple(found)))

    def _counting(self, found: Sequence[Finding]) -> frozenset[str]:
        own = {finding.fingerprint for finding in found}
        left = self._decided(found).findings
        return frozenset(f.fingerprint for f in left if f.severity == "error" and f.fingerprint in own)

    def _conclude(self) -> None:
        if not self.outcomes:
            self.errors.append(
                ErrorNote(what="batches", kind="empty", message="the run has no batch: nothing was replayed")
            )
            return
        if self.judge.dead_scale() is not None:
            where = Where(step=0, phase="checkpoint", op="scaler_state")
            self.findings.append(self.judge.dead_scaler(self.start, where, self.judge.dead_scale()))
            return
        missing = unexamined(self.session, self.outcomes, self._observed)
        if missing is not None:
            self.errors.append(missing)
            return
        moves = self._moves()
        resumed = self.replay.resumed
        self.judge.settle(self.outcomes, resumed.lost_scaler if resumed is not None else None)
        if not any(finding.severity == "error" for finding in self.judge.findings):
            self._compare()
            ahead = shrinking_headroom(self.near, self.thresholds)
            self.findings += [] if ahead is None else [ahead]
        elif self._sick:
            self.skipped.append(Skipped(what=NOT_COMPARED, reason="a step that is set aside is not finite"))
        said = self.look.deterministic and (self.findings or self.judge.findings)  # more than that nothing was compared
        idle = None if said else never_updated(self.outcomes, moves=moves)
        self.errors += [] if idle is None else [idle]
        left_out = nothing_in_half(self.session, self.tightest, self._rewound(), self.replay.session)
        if left_out is not None:
            self.skipped.append(left_out)
            self._not_in_half = True
        asked = "--max-steps" if self.until_sick else "--steps"
        if len(self.outcomes) == self.steps and self.session.has_step(self.steps):
            self.skipped.append(Skipped(what="further batches", reason=f"{self.steps} steps were asked for ({asked})"))
        elif self.until_sick:
            ended = f"the batches end after {len(self.outcomes)} of {self.steps} (--max-steps)"
            self.skipped.append(Skipped(what="further steps", reason=ended))

    def _breaks_protocol(self, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> bool:
        """Whether the step's calls alone show that it misuses its scaler; if so, the finding is added."""
        raised = self.session.raised
        only_gradients = all(
            target == "raised" or target.startswith("grad:") for target in nonfinite_probe.report.affected
        )
        if raised is not None and self.session.events.refused and only_gradients:
            self._say_what_was_refused(outcome.step, raised)
            return True
        return self._steps_past_its_scaler(outcome)

    def _steps_past_its_scaler(self, outcome: StepOutcome) -> bool:
        """Add a finding, once, if an optimizer steps past its scaler; returns whether a scaler is at work.

        A replay of such a loop proves no change, because its next skipped update is made all the same.
        """
        one = next((event for event in outcome.events if event.again or event.past_scaler), None)
        if one is None or any(finding.code == MISUSE.code for finding in self.findings):
            return False
        scaled = one.scale is not None
        if one.again:
            finding = stepped_again_finding(outcome.step, one.source, held_back=one.held_back, scaled=scaled)
        else:
            finding = stepped_past_finding(outcome.step, one.source, one.scale)
        self.findings.append(finding)
        return scaled

    def _moves(self) -> bool:
        """Whether a parameter that an optimizer holds has moved since the start; True where no optimizer holds one."""
        moves = moved(self.session, self._at_start).trained.values()
        return not self._at_start.trained or any(bool(move.any()) for move in moves)

    def _say_what_was_refused(self, step: int, raised: UserCodeError) -> None:
        session = self.session
        source = None if raised.__cause__ is None else as_source(raising_line(raised.__cause__))
        halves = half_weights(session.optimizers.values(), session.parameter_names(), self.replay.half_made)
        said = raised.raised
        refused, advice = session.events.refused or "", after_refusal(session, halves, said)
        past = refused == "update" and halves is None and advice == MISUSE_ADVICE["optimizer.step"]
        if past:
            steps = [event.source for event in session.events.events if event.kind == "optimizer_step"]
            source = next((line for line in steps if line is not None), source)
        finding = refused_call_finding(step, refused, said, source=source, advice=advice, halves=halves, past=past)
        self.findings.append(finding)

    def _say_what_was_raised(self, outcome: StepOutcome) -> None:
        if outcome.raised is not None:
            self.judge.findings[:] = [
                replace(finding, evidence={**finding.evidence, "raised": outcome.raised})
                for finding in self.judge.findings
            ]

    def _note_headroom(self, nonfinite_probe: NonFiniteProbe) -> None:
        self.near += nonfinite_probe.near
        headroom = nonfinite_probe.headroom
        if headroom is not None and (self.tightest is None or headroom.log2 < self.tightest.log2):
            self.tightest = headroom

    @property
    def _observed(self) -> list[tuple[Observation, ...]]:
        return [step.observed for step in self.seen]

    def _compare(self) -> None:
        wanted = self.replay.request.compare_steps
        with self._telling("comparing with fp32"):
            if not self.until_sick:
                self.back = SnapshotRing(self.steps)  # frees its snapshot
            passed = self._beside_fp32(len(self.outcomes) if wanted is None or self.until_sick else wanted)
        if self.until_sick:
            self.skipped += only_looked_at(len(self.outcomes), self._beside_at_the_end)
        elif wanted is not None and wanted < len(self.seen):
            what = "comparison of further steps with fp32" if wanted else NOT_COMPARED
            reason = f"{wanted} were asked for (--compare-steps)" if wanted else "switched off (--no-compare)"
            self.skipped.append(Skipped(what=what, reason=reason))
        self.look.deterministic = self.look.deterministic and passed.deterministic
        self._compared = passed.steps
        of_state, beside = told_once(self.findings, passed.findings)
        self.findings = [*of_state, *beside]
        self.judge.origins.update(passed.origins)
        self.checks += passed.checks
        self.skipped += passed.skipped
        if 0 < passed.steps == passed.at_rest:
            reason = (
                f"none moves anything in {passed.steps} steps, in fp32 either (learning rate 0?): --steps looks at more"
            )
            self.skipped.append(Skipped(what="updates", reason=reason))
        if not passed.findings:
            self.judge.held_back(passed.held, len(self.outcomes))

    def _beside_fp32(self, end: int) -> ReferencePass:
        if not self.until_sick:
            return compare_with_fp32(self.session, self._rewound(), self.seen[:end], self.thresholds)
        begin, begun = self.back.begin, self.back.farthest if self.look.rewinds else None
        seen, first = self.seen[: end - begin], max(end - self._beside_at_the_end, begin)
        return compare_with_fp32(self.session, begun, seen, self.thresholds, begin=begin, first=first)

    def _rewound(self) -> Snapshot | None:
        """Returns the snapshot of the start, with its batches ahead; None if only a fresh run leads there."""
        if self.session.tape.cut and not self.until_sick:
            self.session.tape.rewind()
        return self.start if self.look.rewinds else None

    def _look_before(self) -> None:
        """Search the steps before a sick one for harm that stays finite: it came first, and may be the cause."""
        earlier = [step.beside.comparison for step in self.seen[:-1] if step.beside and step.beside.comparison]
        misused = any(suspicious(outcome.events) for outcome in self.outcomes[:-1])
        if not (self.until_sick or misused or not all(is_calm(one, self.thresholds) for one in earlier)):
            return
        passed = self._beside_fp32(len(self.outcomes) - 1)
        told, self.judge.findings[:] = led_on(passed.findings, self.judge.findings)
        self.findings += told
        self.judge.origins.update(passed.origins)

    def _tell(self, what: str, done: int) -> None:
        if self.progress is not None:
            self.progress(what, done, self.steps)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Report each step replayed inside as progress, without a total, which depends on the findings."""
        session, before, progress = self.session, self.session.replays, self.progress
        if progress is not None:
            session.told = lambda: progress(what, session.replays - before - 1, None)
        try:
            yield
        finally:
            session.told = None

    def _bad_step_replays(self, findings: Sequence[Finding]) -> int:
        bad = next((f.where.step for f in findings if f.severity == "error" and f.where.step is not None), None)
        return 0 if bad is None else self.session.replays_of[bad]

    def _never_finite(self) -> bool:
        return 0 < len(self.outcomes) == self._nonfinite_steps and not self._compared

    def _finite_result(self) -> str:
        settled = any(f.severity == "error" and f.where.nonfinite != "none" for f in self.judge.findings)
        if self._sick or settled or self._never_finite() or self.looking_into is not None:
            return "found"
        return "ok" if saw_anything(self.outcomes, self._observed) else "not_run"

    # -- report --

    def report(self) -> Report:
        found = self._found()
        harmed = any(finding.severity == "error" for finding in found)
        found += not_said_yet(history_findings(self.replay), found)
        errors = (*self.errors, *self.judge.errors)
        known = failed_run(self.replay)
        verdict = verdict_of(
            self._decided(found).found,
            settled=not (errors or self._cut or self._never_finite() or self._not_in_half),
            expect_failure=known is not None and not errors,
        )
        if known is not None and verdict == "not_reproduced":
            found.append(not_reproduced(known, self.replay, self.session, len(self.outcomes)))
        worst_first = sorted(unproved_while_misused(found), key=lambda finding: finding_order(finding)[:2])
        findings = tuple(as_far_as_replayed(self.replay.located(finding)) for finding in worst_first)
        counting = self._counting(findings)
        shown = sorted(findings, key=lambda finding: finding.fingerprint not in counting)  # new findings first
        many = f"{sum(outcome.skipped for outcome in self.outcomes)} of {len(self.outcomes)}"
        scaled = any(outcome.skipped or outcome.scale_before is not None for outcome in self.outcomes)
        checks = (
            Check(name=FINITE_CHECK, result=self._finite_result(), headroom={"steps": len(self.outcomes)}),
            *((Check(name="steps skipped by the scaler", result=many),) if scaled else ()),
            *(headroom_check(self.tightest, self.outcomes, self.replay.request) if not harmed else ()),
            *self.checks,
        )
        run = self.replay.described(self.session, len(self.outcomes))
        return Report(
            command="bisect-nan",
            target=self.replay.request.described(self.replay.factory.name),
            run={**run, **self.look.described(), "bad_step_replays": self._bad_step_replays(findings)},
            verdict=verdict,
            complete=not errors,
            findings=findings,
            checks=checks,
            skipped=(*self.replay.left_out(), *self.skipped, *self.look.left_out, *self._elsewhere(verdict)),
            errors=errors,
            scaler=scaler_after(self.session, findings),
            path=self._path(shown),
            proof=proof_of(shown),
            thresholds=self.thresholds.listed(),
        )

    def _elsewhere(self, verdict: Verdict) -> Iterator[Skipped]:
        if self.until_sick and verdict != "sick":
            here = f"one process ran it on this machine's {self.session.device.type}"
            reason = f"{here}: a failure that hangs on either may not come back here"
            yield Skipped(what="other hardware and other numbers of ranks", reason=reason)

    def _path(self, findings: Sequence[Finding]) -> PathSection | None:
        for finding in findings:
            origin = self.judge.origins.get(finding.fingerprint)
            if finding.severity == "error" and origin is not None:
                types = module_types(self.session.model, self.session.module_names)
                return path_section(origin, finding.fingerprint, types)
        return None
