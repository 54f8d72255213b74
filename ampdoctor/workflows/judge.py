"""Decides whether a step is sick, what its cause is, and which findings share a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.nonfinite import (
    beside_finding,
    cause_of,
    culprits,
    harms_beside_alone,
    independent,
    log2_over_limit,
    origin_finding,
    past_the_scaler,
    scale_may_cure,
)
from ampdoctor.diagnosis.replay.outcome import DIVERGES, diverging_finding
from ampdoctor.diagnosis.replay.scaler import (
    MAKE_ONCE,
    PERSISTS,
    dead_scaler_finding,
    lost_scale_finding,
    scale_kills,
    times_begun_again,
    unguarded_step_finding,
    verdict_on_skips,
)
from ampdoctor.diagnosis.replay.scaler import SCALER_MISUSE as MISUSE
from ampdoctor.diagnosis.replay.updates import STUCK_STATE as STUCK
from ampdoctor.diagnosis.scan.optimizer import STEP_COUNTERS as COUNTERS
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, is_dead
from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.report import Cause, ErrorNote, Finding, Prescription
from ampdoctor.evidence.report_replay import ReplayedStep
from ampdoctor.workflows.changes import loss_scale
from ampdoctor.workflows.prescribe import FP32_FAILS, fresh_scaler, prescribe, scale_cure
from ampdoctor.workflows.repairs import fix_scaler_misuse
from ampdoctor.workflows.trials import AFTER, SHOWN, Trials, replayed

if TYPE_CHECKING:
    from ampdoctor.evidence.checkpoint_stats import ScalerState
    from ampdoctor.evidence.trace import NonFiniteOrigin, NonFiniteReport, StepOutcome, Trace
    from ampdoctor.probes.nonfinite import NonFiniteProbe
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.close_look import StepTracer


CULPRITS = 8
"""Maximum number of independent origins of a step that get a finding each; the first one's evidence lists the rest."""

SEVERAL = 3
"""Number of steps skipped in a row that need an explanation although later steps are taken: one or two follow from a
scale that has just doubled, or an unusual batch."""
OVERFLOWS: tuple[Cause, ...] = ("forward_overflow", "backward_overflow", "scaler_collapse")
"""Causes to which growing weights lead."""


@dataclass(slots=True)
class _Skip:
    """A skipped step that a lower loss scale may explain, kept until the run shows whether the scaler settles."""

    step: int
    snapshot: Snapshot
    origin: NonFiniteOrigin
    optimizers: frozenset[str] = frozenset()
    steps: int = 1

    @property
    def unexplained(self) -> bool:
        """Whether several steps in a row were skipped, but fewer than would bring the overflow into its format."""
        return SEVERAL <= self.steps < (log2_over_limit(self.origin) or 0.0)


@dataclass(slots=True)
class Judge:
    """Judges the steps of a run one by one, and its scaler at the end."""

    look: StepTracer
    steps: int  # that were asked for
    start_scale: float | None  # before step 0; None without an enabled scaler
    start: Snapshot | None = None  # the state before step 0
    fresh: float | None = None  # the factory's initial scale, where the checkpoint's has collapsed
    findings: list[Finding] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)  # what could not be explained
    origins: dict[str, NonFiniteOrigin] = field(default_factory=dict)  # by the finding's fingerprint
    earlier: tuple[int, Snapshot] | None = None
    _skipped: set[int] = field(default_factory=set)
    _replayed: list[ReplayedStep] = field(default_factory=list)
    _unsettled: _Skip | None = None
    _unexplained: _Skip | None = None
    _pending: tuple[Snapshot, tuple[NonFiniteOrigin, ...]] | None = None
    """Of a step that only accumulates: kept until an optimizer uses its gradients or a scaler skips."""
    _raised: str | None = None

    def is_sick(self, snapshot: Snapshot, outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> bool:
        """Whether this step did harm; if so, its findings are added. `snapshot` is the state before it."""
        nonfinite = nonfinite_probe.report
        affected = nonfinite.affected
        self._raised = outcome.raised
        self._replayed.append(replayed(outcome, affected))
        if outcome.skipped:
            self._skipped.add(outcome.step)
        used = bool(outcome.optimizer_steps) or outcome.skipped or not self.look.session.optimizers
        used = used or outcome.raised is not None  # nothing comes after it
        if used and (not outcome.skipped or self._has_settled(outcome)):
            self._keep_unexplained()
            self._unsettled = None
        pending, self._pending = self._pending, None
        if not outcome.is_harmed_by(affected) and not outcome.skipped:
            self._pending = None if used else pending
            return False
        if pending is not None and not used:
            self._pending = pending
            return False
        trace = self.look.trace(snapshot, outcome, nonfinite_probe)
        origins = culprits(trace) if trace is not None else ()
        if outcome.raised is not None:  # the user's own check raised, or their code has a bug in a healthy step
            origins = tuple(
                origin for origin in origins if any(not harm.startswith("grad:") for harm in origin.affected)
            )
        if not used and origins and all(target.startswith("grad:") for target in affected):
            self._pending = snapshot, origins
            return False
        if pending is not None:
            new = tuple(origin for origin in origins if origin.came_from not in ("constant", "grad"))
            origins, snapshot = (*pending[1], *new), pending[0]
        return self._judge(trace, origins, outcome, nonfinite, snapshot)

    def _keep_unexplained(self) -> None:
        if self._unexplained is None and self._unsettled is not None and self._unsettled.unexplained:
            self._unexplained = self._unsettled

    def _has_settled(self, outcome: StepOutcome) -> bool:
        skip = self._unsettled
        own = {event.optimizer for event in outcome.updates_skipped}
        stepped = {event.optimizer for event in outcome.events if event.kind == "optimizer_step"}
        return skip is not None and bool(skip.optimizers) and skip.optimizers <= stepped - own

    def _judge(
        self,
        trace: Trace | None,
        origins: tuple[NonFiniteOrigin, ...],
        outcome: StepOutcome,
        nonfinite: NonFiniteReport,
        snapshot: Snapshot,
    ) -> bool:
        if not origins:
            if outcome.skipped or (trace is not None and trace.unattributed):
                step, what = f"step {outcome.step}", nonfinite.affected[0] if nonfinite.affected else "a gradient"
                said = f"{step}: {what} is non-finite, but no op was seen to make it so"
                said = f"{said} (in another thread, or outside torch's dispatcher?)"
                self.errors.append(ErrorNote(what=step, kind="unattributed", message=said))
                return bool(trace is not None and trace.unattributed)
            return False  # the cheap sum fired on finite values
        if sum(event.kind == "step" for event in outcome.events) > 1 and outcome.updates_skipped:
            # one optimizer's overflow may be left to the scaler, while another's gradients are lost at every scale
            origins = tuple(origin for origin in origins if not scale_may_cure((origin,), nonfinite)) or origins
        main = origins[0]
        if outcome.loses_updates and scale_may_cure(origins, nonfinite):
            if outcome.skipped and self._unsettled is not None:
                self._unsettled.steps += 1
            elif outcome.skipped:
                by = frozenset(event.optimizer for event in outcome.updates_skipped)
                self._unsettled = _Skip(main.where.step or 0, snapshot, main, by)
            return False
        if harms_beside_alone(main):
            self._add(beside_finding(main), main)
            return True
        if scale_kills(main, outcome.scale_before):
            own = main.where.phase == "scaler"
            phase: Phase = "checkpoint" if outcome.step == 0 else "scaler"
            where = main.where if own else Where(step=outcome.step, phase=phase, op="scaler_state")
            self._add(self.dead_scaler(snapshot, where, outcome.scale_before), main)
            return True
        cause = cause_of(main)
        if cause == "backward_overflow" and past_the_scaler(outcome) and self.look.session.events.enabled:
            finding = unguarded_step_finding(main, outcome.scale_before)
            trials = self._trials(snapshot, main.where.step or 0, self._known_steps(outcome.step + 1))
            cure = fix_scaler_misuse(finding.where.op or "", trials, self.look.session, overflowed=True)
            self._add(replace(finding, prescription=cure), main)
            return True
        self._prescribe(origins, cause, snapshot, outcome)
        return True

    def _prescribe(
        self, origins: tuple[NonFiniteOrigin, ...], cause: Cause, snapshot: Snapshot, outcome: StepOutcome
    ) -> None:
        main, *rest = independent(origins)
        session = self.look.session
        steps = self._known_steps(outcome.step + 1)
        trials = self._trials(snapshot, main.where.step or 0, steps, settles=cause != "backward_overflow")
        cure = prescribe(main, cause, trials, session, others=rest)
        if self._diverges(main, cause, cure, trials):
            return
        if not session.precision.reduced and cause in OVERFLOWS and cure.status == "intervention":
            cure = _unless_diverging(cure, trials)
        if cause == "invalid_op" and cure.kind == "skip_batch" and cure.verified:
            cause = "bad_data"  # fp32 does not cure it, and without this batch nothing is wrong
        if cause == "backward_overflow" and cure.kind == "init_scale" and cure.verified:
            cause = "grad_overflow"
        if cure.kind == "fp32_modules" and cure.verified:
            # an origin in the backward that is cured although its own module is unchanged was a consequence
            rest = [b for b in rest if b.where.module in cure.value or b.where.phase == main.where.phase == "forward"]
        finding = origin_finding(main, cause=cause, prescription=cure, others=rest)
        finding = replace(finding, help=cure.detail) if cure.detail in {FP32_FAILS, DIVERGES} else finding
        self._add(replace(finding, evidence={**finding.evidence, "trials": trials.replays}), main)
        first = cause_of(main)
        batch = next((origin for origin in (main, *rest) if origin.came_from == "data"), None)
        # a batch is bad as a whole: returns and advantages are made of the same rewards
        apart = [origin for origin in rest if origin.came_from != "data" or origin is batch]
        for origin in apart[: CULPRITS - 1]:
            own = cause if cause_of(origin) == first else None
            self._add(origin_finding(origin, cause=own, prescription=cure), origin)

    def trials_of_state(self, start: Snapshot) -> Trials:
        """Returns the trials of step 0 for changes of the state before it."""
        return self._trials(start, 0, self._known_steps(1), settles=True)

    def collapsed_scale(self, saved: Finding, *, harmed: bool) -> Finding | None:
        """Returns scan's finding on a collapsed scale (`saved`), None where the run needs a scale as low."""
        if self.fresh is None or self.start is None or self.start_scale is None:
            return None
        value, detail = {"init_scale": self.fresh}, "Resume with a fresh scaler instead of the stored state."
        if harmed:
            reason = "replayed together with the change of what overflows, not by itself"
            cure = Prescription(kind="scaler", value=value, status="not_run", reason=reason, detail=detail)
            return replace(saved, prescription=cure)
        cure = self.trials_of_state(self.start).attempt("scaler", value, loss_scale(self.fresh), detail)
        return replace(saved, prescription=cure) if cure.verified else None

    def dead_scale(self) -> float | None:
        """The loss scale before step 0 if it is one with which every step does harm, else None."""
        return self.start_scale if self.start_scale is not None and is_dead(self.start_scale) else None

    def dead_scaler(self, snapshot: Snapshot, where: Where, scale: float | None) -> Finding:
        """Returns the finding for a dead scale at `where`, after a trial with a fresh scaler."""
        step = where.step or 0
        trials = self._trials(snapshot, step, self._known_steps(step + 1))
        return dead_scaler_finding(scale or 0.0, DEAD_SCALE, where, fresh_scaler(trials))

    def settle(self, outcomes: Sequence[StepOutcome], lost: ScalerState | None) -> None:
        """Judge skips at a high scale: healthy once a step is taken; otherwise the scale is at fault, or none works."""
        skip = self._unsettled
        if skip is not None and skip.step > 0 and len(outcomes) - skip.step < PERSISTS:
            self._keep_unexplained()
            skip = None  # a scaler that still settles
        over = self._unexplained if skip is None else None
        skip = skip or over
        told = self._not_continued(lost, skip, outcomes) if lost is not None else None
        if told is not None:
            self._add(told, skip.origin if skip is not None else None)
        elif skip is not None:
            trials = self._trials(skip.snapshot, skip.step, len(outcomes))
            session = self.look.session
            later = [event for o in outcomes[skip.step :] for event in o.updates_skipped]
            scales = [event.scale or 1.0 for event in later if event.optimizer in skip.optimizers]
            used = scales[0] if scales else None
            if over is not None and self._fits_lower(skip, used):
                return  # the gradients of a few batches are larger than those after them
            cure = scale_cure(skip.origin, trials, session, used)
            cures = cure is not None and cure.verified
            begun_again = times_begun_again(outcomes[skip.step :], skip.optimizers)
            verdict = verdict_on_skips(
                skip.origin,
                scales=scales,
                steps=skip.steps if over is not None else len(outcomes) - skip.step,
                cures=cures,
                updated=any(event.kind == "update" for outcome in outcomes for event in outcome.events),
                hopeless=not cures and trials.reference() is None,
                begun_again=begun_again,
            )
            prescription = cure if cures else prescribe(skip.origin, verdict.cause, trials, session)
            if self._diverges(skip.origin, verdict.cause, prescription, trials):
                return
            finding = origin_finding(
                skip.origin, cause=verdict.cause, prescription=prescription, severity=verdict.severity
            )
            if begun_again and cures:
                finding = _of_new_scalers(finding, scales, begun_again)
            elif verdict.advice:
                finding = replace(finding, help=f"{verdict.advice} {finding.help}")
            self._add(finding, skip.origin)

    def _fits_lower(self, skip: _Skip, used: float | None) -> bool:
        """Whether the skipped step is healthy at some lower scale, whatever happens in later steps."""
        alone = self._trials(skip.snapshot, skip.step, skip.step + 1)
        cure = scale_cure(skip.origin, alone, self.look.session, used)
        return cure is not None and cure.verified

    def held_back(self, last: int, steps: int) -> None:
        """Judge the `last` steps of `steps` that the user's own check skips: sick if none is taken any more."""
        pending = self._pending
        if pending is None or last < min(PERSISTS, steps):
            return
        snapshot, (origin, *rest) = pending
        trials = self._trials(snapshot, origin.where.step or 0, steps)
        cause = cause_of(origin)
        lower = scale_cure(origin, trials, self.look.session) if cause == "backward_overflow" else None
        cured = lower is not None and lower.verified
        cure = lower if cured else prescribe(origin, cause, trials, self.look.session, others=rest)
        if self._diverges(origin, cause, cure, trials):
            return
        settles = cure is not None and cure.kind == "init_scale" and cure.verified
        finding = origin_finding(
            origin,
            cause="grad_overflow" if settles else cause,
            prescription=cure,
            others=rest,
            severity="warning" if settles else "error",
        )
        self._add(replace(finding, evidence={**finding.evidence, "steps_left_out": last}), origin)

    def _diverges(self, origin: NonFiniteOrigin, cause: Cause, cure: Prescription | None, trials: Trials) -> bool:
        """Add a finding on the updates if no change cures an overflow in half and fp32 diverges; returns whether so."""
        if not self.look.session.precision.reduced or cause not in OVERFLOWS or cure is None or cure.verified:
            return False
        losses = trials.diverges()
        if not losses:
            return False
        self._add(diverging_finding(origin, losses), origin)
        return True

    def _add(self, finding: Finding, origin: NonFiniteOrigin | None) -> None:
        self.findings.append(finding)
        if origin is not None:
            self.origins.setdefault(finding.fingerprint, origin)

    def _not_continued(self, lost: ScalerState, skip: _Skip | None, outcomes: Sequence[StepOutcome]) -> Finding | None:
        """Returns the finding that the checkpoint's scale is not continued; None where it should not be."""
        own = outcomes[0].scale_before
        collapsed = lost.collapsed and (own is None or own >= 1)
        if skip is None:
            return None if collapsed else lost_scale_finding(lost, own)
        trials = self._trials(skip.snapshot, skip.step, len(outcomes))
        cure = trials.attempt("init_scale", lost.scale, loss_scale(lost.scale), "load the checkpoint's scaler state")
        return None if collapsed and not cure.verified else lost_scale_finding(lost, own, skip.origin, cure)

    def _trials(self, snapshot: Snapshot, step: int, steps: int, *, settles: bool = False) -> Trials:
        look, (begin, before) = self.look, self.earlier or (0, self.start)
        known = look.rewinds and before is not None and step > begin
        return Trials(
            session=look.session,
            snapshot=snapshot,
            step=step,
            steps=steps,
            back=partial(look.started_again, step) if look.deterministic and not look.rewinds else None,
            comes_back=look.deterministic,
            raised=self._raised,
            before=(before, frozenset(self._skipped)) if known and before is not None else None,
            begin=begin,
            without=tuple(self._replayed),
            settles=settles,
            fresh=self.fresh,
        )

    def _known_steps(self, known: int) -> int:
        last = min(known + AFTER + 1, self.steps)
        while known < last and self.look.session.has_step(known):
            known += 1
        return known


def _unless_diverging(cure: Prescription, trials: Trials) -> Prescription:
    """Returns another prescription where fp32 diverges by its updates: a bound on one op's operands is no cure then."""
    if not trials.diverges():
        return cure
    reason = "how large a step the run bears is not tried"
    return Prescription(kind="code", value=DIVERGES, status="not_run", detail=DIVERGES, reason=reason)


def _of_new_scalers(finding: Finding, scales: Sequence[float], begun_again: int) -> Finding:
    lower = finding.prescription
    made_once = Prescription(
        kind="code",
        value=MAKE_ONCE,
        status="not_run",
        reason="the steps that a scaler needs to settle are more than a proof replays",
        detail=MAKE_ONCE,
        alternatives=() if lower is None else (replace(lower, alternatives=()), *lower.alternatives),
    )
    starts = f"the loss scale is back at {max(scales):g} {begun_again} times after a skip: the GradScaler is made anew"
    return replace(
        finding,
        message=f"{starts}, as in each epoch, and no update is made; {finding.message}",
        evidence={**finding.evidence, "begun_again": begun_again, "begins_at": max(scales)},
        where=replace(finding.where, source=None, forward_source=None),
        help="Make the GradScaler once, before the epochs; or start it at an init_scale that fits.",
        prescription=made_once,
    )


# -- one cause, one finding --

LEADS_ON = ("scaler_misuse", "forward_overflow", "forward_precision")
"""Causes of harm that stays finite for some steps and then becomes non-finite; weights that stand still make no NaN."""


def led_on(earlier: Sequence[Finding], later: Sequence[Finding]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns the earlier findings (of finite steps) that may be the cause, and the later that they do not explain."""
    first = [finding for finding in earlier if finding.cause in LEADS_ON]
    left = list(later)
    told: list[Finding] = []
    for finding in first:
        same = [one for one in left if _one_cure(finding, one)]
        left = [one for one in left if one not in same]
        then = [{"step": f.where.step, "op": f.where.op, "nonfinite": f.where.nonfinite} for f in same]
        told.append(replace(finding, evidence={**finding.evidence, "then": then}) if then else finding)
    return tuple(told), tuple(left)


def _one_cure(first: Finding, later: Finding) -> bool:
    one, other = first.prescription, later.prescription
    if one is None or other is None or (one.kind, one.value) != (other.kind, other.value):
        return False
    return one.status == other.status and one.status in SHOWN


def unproved_while_misused(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings without proved cures while a step's calls on its scaler are out of order."""
    broken = next((f for f in findings if f.code == MISUSE.code and _is_of_calls(f)), None)
    return [one if broken is None or _is_of_calls(one) else _unproved(one, broken) for one in findings]


def _is_of_calls(finding: Finding) -> bool:
    return finding.cause == "scaler_misuse" and finding.severity == "error" and finding.where.op != "scaler_state"


def _unproved(finding: Finding, broken: Finding) -> Finding:
    cure = finding.prescription
    if cure is None or not cure.verified:
        return finding
    reason = f"no proof as long as the order of the scaler's calls is broken ({broken.where.op}): mend that first"
    return replace(finding, prescription=replace(cure, status="not_run", reason=reason, proof=None))


def told_once(
    of_state: Sequence[Finding], beside: Sequence[Finding]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Returns both kinds of findings, where each step counter is reported by one of them."""
    counters = [finding for finding in of_state if finding.code == COUNTERS.code]
    named = {f"optimizer:{where.tensor}.step" for finding in counters for where in (finding.where, *finding.also)}
    same = [finding for finding in beside if finding.code == STUCK.code and _all_of(finding, named)]
    untold = counters if same and all(finding.severity == "note" for finding in counters) else same
    return tuple(f for f in of_state if f not in untold), tuple(f for f in beside if f not in untold)


def _all_of(finding: Finding, named: set[str]) -> bool:
    return named.issuperset(finding.evidence["tensors"]) and finding.evidence["tensors_count"] <= len(named)
