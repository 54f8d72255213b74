"""Proof: runs a bad step again with a change in place, and reports what the replay shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from ampdoctor.diagnosis.replay.nonfinite import departing
from ampdoctor.errors import AmpdoctorError, UserCodeError
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Prescription, PrescriptionKind, PrescriptionStatus
from ampdoctor.evidence.report_replay import Proof, ProofSection, ProofStep, ReplayedStep
from ampdoctor.numerics.tensors import blocks, squares, together
from ampdoctor.probes.gradients import GradientProbe, distances, relative_error
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.workflows.changes import both, loss_scale, no_change, noted_roots, perturbed_weights

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import StepOutcome
    from ampdoctor.probes.gradients import Gradients
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.changes import Change


STEPS_BEFORE = 3
"""Number of steps before the first with the change that are shown, to show how the run failed."""
MOST_STEPS = 200
"""Maximum number of steps that are shown; of a longer replay, the first and the last half."""

_SETTINGS = ("init_scale", "scaler")
"""Changes of the scaler's start: one step shows what this scale does to it, and not where the scale goes from there."""
_ONE_STEP = (
    "beyond this step, which is finite with it: where the scaler's growth and backoff take the scale from there is not "
    "known"
)


def replayed(outcome: StepOutcome, affected: Sequence[str], gradients: Gradients | None = None) -> ReplayedStep:
    """Returns a step's numbers for a proof; `affected` names its non-finite values."""
    return ReplayedStep(
        step=outcome.step,
        loss=outcome.loss,
        scale=outcome.scale_before,
        gradient_norm=_norm(gradients) if gradients else None,
        skipped=outcome.skipped,
        finite=not affected,
    )


def as_far_as_replayed(finding: Finding) -> Finding:
    """Returns the finding; a change of the scaler with which only one step was replayed is no longer verified."""
    change = finding.prescription
    if change is None or not change.verified or change.kind not in _SETTINGS or change.proof is None:
        return finding
    if len(change.proof.changed) > 1:
        return finding
    return replace(finding, prescription=replace(change, status="not_run", reason=_ONE_STEP))


def proof_of(findings: Sequence[Finding]) -> ProofSection | None:
    """Returns the section for the first finding whose change was replayed, or None."""
    for finding in findings:
        change = finding.prescription
        if change is not None and change.proof is not None and change.proof.changed:
            return proof_section(change, change.proof, finding.fingerprint)
    return None


def proof_section(change: Prescription, proof: Proof, fingerprint: str = "") -> ProofSection:
    """Returns the section for one change; `fingerprint` is that of the finding that it cures, or ""."""
    without, changed, fp32 = ({row.step: row for row in rows} for rows in (proof.without, proof.changed, proof.fp32))
    first, last = min(changed, default=0), max(changed, default=0)
    known = sorted(without.keys() | changed.keys() | fp32.keys())
    steps = [step for step in known if first - STEPS_BEFORE <= step <= last]
    half = MOST_STEPS // 2
    shown = [*steps[:half], *steps[-half:]] if len(steps) > MOST_STEPS else steps
    return ProofSection(
        fingerprint=fingerprint,
        kind=change.kind,
        value=change.value,
        status=change.status,
        steps=tuple(
            ProofStep(step=step, without=without.get(step), with_=changed.get(step), fp32=fp32.get(step))
            for step in shown
        ),
        omitted=len(steps) - len(shown),
    )


def _norm(gradients: Gradients) -> float:
    return math.sqrt(math.fsum(squares(block) for gradient in gradients.values() for block in blocks(gradient)))


# -- trials: the same step, from the same state and random state, with a change --

AFTER = 3
"""Number of steps after the bad one that must be clean as well (DESIGN: verified)."""
AGREEMENT = 0.1
"""Largest relative L2 error of the gradients against fp32 that counts as agreement.

Measured on small transformers: scaled fp16 5e-4 to 7e-3, bf16 3e-3 to 5.5e-3; runs above 0.1 failed to learn. bf16 on
deep or recurrent nets can reach a few percent without harm. So the bound is where harm was seen, not where rounding
ends.
"""

ONE_ALONE = 0.3
"""The same for a single tensor that got no gradient before. Such a gradient is small beside the rest and has few
significant bits, but its direction is there; an error of 1 is that of no gradient at all."""

NO_REFERENCE = "finite, but fp32 {}, so there is nothing to agree with"
UNPROVABLE = "the failure does not come back when the step is run again, so a clean replay would prove nothing"
NO_SCALER = "the step uses no scaler, so none was tried, and adding a GradScaler by hand is untested"
NO_GRADIENT = "finite, but with the change every gradient is zero, in fp32 too: nothing would be learned"

SHOWN = ("verified", "intervention")
"""Statuses of a change with which a replay is healthy."""

WayBack = Callable[[], AbstractContextManager["Session"]]

MOST_EARLIER = 32
"""Maximum number of steps before the bad one that are replayed with a permanent change."""
_SCALES = ("init_scale", "scaler")
"""Changes that are a loss scale themselves."""
_FOR_GOOD = ("fp32_modules", "dtype", "optimizer")
"""Changes with which a run is trained from its start, and not only from the bad step on."""


@dataclass(slots=True, kw_only=True)
class Trials:
    """Tries changes on one bad step of a session, whose state may be any."""

    session: Session
    snapshot: Snapshot  # the state before the bad step
    step: int  # the bad one
    steps: int  # of the whole replay
    back: WayBack | None = None  # another way to the bad step, where snapshots do not reproduce it
    comes_back: bool = True  # one of the ways reproduces the failure
    silent: Thresholds | None = None  # of a failure that stays finite: no finite value may depart from the right one
    raised: str | None = None  # with what the user's code ended the bad step, type first
    before: tuple[Snapshot, frozenset[int]] | None = None  # state before `begin`, and the steps that were skipped since
    begin: int = 0  # a permanent change must not break the steps from this one on
    without: tuple[ReplayedStep, ...] = ()  # the steps as they ran without a change, for the proof
    tensors: Sequence[str] = ()  # parameters whose gradients vanish in the total, and must agree with fp32's as well
    together: float | None = None  # their largest relative L2 error in total; None: `ONE_ALONE` for each
    settles: bool = False  # if only scaled gradients still overflow, the scaler may back off as in a healthy run
    fresh: float | None = None  # loss scale of the trials where the run's own has collapsed; it may back off
    replays: int = field(default=0, init=False)  # of the bad step, with or without a change; fp32 does not count
    by_hand: float = field(default=1.0, init=False)  # from fp32: the backward's start over the loss, without a scaler
    unable: str | None = field(default=None, init=False)  # from fp32: why it could not run
    _reference: Gradients | None = field(default=None, init=False)
    _referenced: bool = field(default=False, init=False)
    _too_high: float | None = field(default=None, init=False)
    _settled: float | None = field(default=None, init=False)
    _unscaled: bool = field(default=False, init=False)  # the bad step ran to its end without a scaled loss
    _changed: dict[int, ReplayedStep] = field(default_factory=dict, init=False)
    _fp32: tuple[ReplayedStep, ...] = field(default=(), init=False)

    def attempt(
        self,
        kind: PrescriptionKind,
        value: Any,
        change: Change,
        detail: str,
        *,
        from_step: int | None = None,
        stands_in: bool = False,
        restores: bool = False,
    ) -> Prescription:
        """Replay with a change and decide whether it cures; `stands_in` for one that only the user can make."""
        first = self.step if from_step is None else from_step
        self._changed = {}
        self._settled, self._unscaled = None, False
        status, reason = self._replay(change, first, stands_in=stands_in, restores=restores)
        if kind == "scaler" and self._unscaled:  # the change was given to nothing
            self._changed = {}
            status, reason = "not_run", NO_SCALER
        if status == "verified" and kind in _FOR_GOOD and first == self.step:
            broken = self._breaks_earlier(change)
            status, reason = ("verified", None) if broken is None else ("worse", broken)
        if status == "verified" and self._settled is not None:
            where = f"shown at a loss scale of {exact(self._settled)}, to which the scaler comes down"
            detail = f"{detail.removesuffix('.')} ({where})"
        elif status == "verified" and self.fresh is not None and kind not in _SCALES:
            detail = f"{detail.removesuffix('.')} (shown with a fresh scaler at {exact(self.fresh)})"
        if status == "verified" and stands_in:
            status = "intervention"
        proof = Proof(without=self.without, changed=tuple(self._changed.values()), fp32=self._fp32)
        return Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail, proof=proof)

    def reference(self) -> Gradients | None:
        """The bad step's gradients in fp32 from the same state; None if fp32 is not finite either or cannot run."""
        if not self._referenced:
            self._referenced = True
            self._reference, self.unable = self._in_fp32(no_change)
        return self._reference

    def diverges(self) -> tuple[float | None, ...]:
        """Returns the losses in fp32 from the run's start up to a step that its updates ruin; () where none is."""
        begun = self._begun()
        if begun is None:
            return ()
        start, _ = begun
        try:
            losses, fine = self._wide_from(start, range(self.begin, min(self.step + AFTER + 1, self.steps)))
            last = self.begin + len(losses) - 1
            if fine or last == self.begin or not self._wide_from(start, range(last, last + 1))[1]:
                return ()
        except AmpdoctorError:
            return ()
        return tuple(losses)

    def _wide_from(self, start: Snapshot, steps: range) -> tuple[list[float | None], bool]:
        session, nonfinite_probe = self.session, NonFiniteProbe(locate=False)
        losses: list[float | None] = []
        start.restore()
        try:
            with session.reference(), session.watched(nonfinite_probe):
                for step in steps:
                    if not session.has_step(step):
                        break
                    outcome = session.step(step)
                    losses.append(outcome.loss)
                    if not _is_finite(outcome, nonfinite_probe):
                        return losses, False
        finally:
            self.snapshot.restore()
        return losses, True

    def _replay(
        self, change: Change, first: int, *, stands_in: bool, restores: bool
    ) -> tuple[PrescriptionStatus, str | None]:
        if not self.comes_back:
            return "not_run", UNPROVABLE
        if first > self.steps - 1:
            return "not_run", "no step is left after the one left out"
        bad = first == self.step
        reference = self.reference() if bad and not restores else None
        try:
            wrong, got = self._settling(change, first, reference)
            if wrong is None and bad and reference is None:
                own, unable = self._in_fp32(change) if stands_in else (None, self.unable)
                why = "is not finite here" if unable is None else f"cannot be run here ({unable})"
                wrong = NO_REFERENCE.format(why) if own is None else self._disagreement(got, own)
                if own and wrong is not None and self._as_far_by_rounding(change, got, own):
                    wrong = None
                if own and not self._learns(own):
                    wrong = NO_GRADIENT
        except AmpdoctorError as error:
            return self._ended_by(error)
        return ("verified" if wrong is None else "failed"), wrong

    def _learns(self, gradients: Gradients) -> bool:
        """Whether a gradient is nonzero in the bad step or in one after it: one batch alone may teach nothing."""
        if any(bool(gradient.any()) for gradient in gradients.values()):
            return True
        return any(row.gradient_norm for step, row in self._changed.items() if step > self.step)

    def _settling(self, change: Change, first: int, reference: Gradients | None) -> tuple[str | None, Gradients]:
        begun = no_change if self.fresh is None else loss_scale(self.fresh)
        with self._at_the_step() as session, begun(session), change(session):
            wrong, got = self._run(session, first, reference)
        while (
            (self.settles or self.fresh is not None)
            and self._too_high is not None
            and (lower := self._too_high / 2) >= 1.0
        ):
            with self._at_the_step() as session, change(session), loss_scale(lower)(session):
                wrong, got = self._run(session, first, reference)
            self._settled = lower
        return wrong, got

    def _begun(self) -> tuple[Snapshot, frozenset[int]] | None:
        """Returns `before` if the steps from there on can be replayed; the batches of a run's start may be gone."""
        there = 0 <= self.step - self.begin <= MOST_EARLIER and (self.begin > 0 or not self.session.tape.cut)
        return self.before if there else None

    def _breaks_earlier(self, change: Change) -> str | None:
        """Returns how the change harms a healthy step before the bad one: the run will train through it, too."""
        begun = self._begun()
        if begun is None:
            return None
        start, skipped = begun
        session, nonfinite_probe = self.session, NonFiniteProbe(locate=False)
        start.restore()
        try:
            with change(session), session.watched(nonfinite_probe):
                for step in range(self.begin, self.step):
                    outcome = session.step(step)
                    self._changed[step] = replayed(outcome, nonfinite_probe.report.affected)
                    if nonfinite_probe.report.affected and not outcome.skipped:
                        return f"step {step}, which was well, becomes non-finite ({nonfinite_probe.report.affected[0]})"
                    if outcome.skipped and step not in skipped:
                        return f"the scaler skips step {step}, which it did not"
        except AmpdoctorError as error:
            return f"step {self.begin} to {self.step - 1} cannot be replayed with it: {error}"
        finally:
            self.snapshot.restore()
        return None

    def _run(self, session: Session, first: int, reference: Gradients | None) -> tuple[str | None, Gradients]:
        got: Gradients = {}
        nonfinite_probe, gradients = NonFiniteProbe(), GradientProbe()
        self._too_high = None
        with session.watched(nonfinite_probe, gradients):
            if self.silent is not None and session.has_step(first):
                still = self._departing(session, self.silent, first)
                if still is not None:
                    return f"finite values still depart from what they should be ({still})", got
            for step in range(first, min(first + AFTER + 1, self.steps)):
                if not session.has_step(step):
                    break
                self.replays += step == self.step
                outcome = session.step(step)
                self._unscaled |= step == self.step and all(event.kind != "scale" for event in outcome.events)
                self._changed[step] = replayed(outcome, nonfinite_probe.report.affected, gradients.gradients)
                lost = outcome.loses_updates
                if lost and all(target.startswith("grad:") for target in nonfinite_probe.report.affected):
                    self._too_high = outcome.scale_before
                if outcome.is_harmed_by(nonfinite_probe.report.affected):
                    return f"step {step} is still non-finite ({nonfinite_probe.report.affected[0]})", got
                if outcome.skipped:
                    return f"the scaler still skips step {step}", got
                if step == self.step:
                    got = dict(gradients.gradients)
                    wrong = self._disagreement(got, reference) if reference is not None else None
                    if wrong is not None:
                        return wrong, got
        return None, got

    def _ended_by(self, error: AmpdoctorError) -> tuple[PrescriptionStatus, str]:
        if self._raises_the_same(error):
            return "failed", f"the user's code still raises {error.raised}"
        return "not_run", f"the replay with the change cannot run: {error}"

    def _raises_the_same(self, error: AmpdoctorError) -> TypeGuard[UserCodeError]:
        return (
            isinstance(error, UserCodeError) and self.raised is not None and _kind(error.raised) == _kind(self.raised)
        )

    def _in_fp32(self, change: Change) -> tuple[Gradients | None, str | None]:
        """Returns the bad step's gradients in fp32, None if they or the loss are not finite, and why it cannot run."""
        nonfinite_probe, gradients = NonFiniteProbe(), GradientProbe()
        try:
            with (
                self._at_the_step() as session,
                session.reference(),
                change(session),
                noted_roots() as roots,
                session.watched(nonfinite_probe, gradients),
            ):
                session.has_step(self.step)
                outcome = session.step(self.step)
                if session.run.step is not None and len(roots) == 1 and outcome.loss:
                    self.by_hand = roots[0] / outcome.loss
        except AmpdoctorError as error:
            return None, None if self._raises_the_same(error) else str(error)  # e.g. an asserted dtype, or memory
        self._fp32 = (replayed(outcome, nonfinite_probe.report.affected, gradients.gradients),)
        return (dict(gradients.gradients) if _is_finite(outcome, nonfinite_probe) else None), None

    def _as_far_by_rounding(self, change: Change, got: Gradients, own: Gradients) -> bool:
        """Whether rounding each weight once moves the changed step's fp32 gradients as far as half precision does."""
        narrow = self.session.precision
        kept = self._fp32
        moved = self._in_fp32(both(change, perturbed_weights(narrow.dtype)))[0] if narrow.reduced else None
        self._fp32 = kept
        return moved is not None and relative_error(got, own) <= relative_error(moved, own)

    def _departing(self, session: Session, thresholds: Thresholds, step: int) -> str | None:
        here = session.snapshot()
        tracer = OpTraceProbe()
        with session.watched(tracer):
            self.replays += step == self.step
            session.step(step)
        here.restore()
        found = departing(tracer.trace, thresholds) if tracer.trace is not None else ()
        return found[0].where.module or "the loss code" if found else None

    def _disagreement(self, got: Gradients, reference: Gradients) -> str | None:
        error = relative_error(got, reference)
        if error > AGREEMENT:
            return f"finite, but the gradients are {error:.2g} away from fp32's (relative L2)"
        apart = distances(got, {name: reference[name] for name in self.tensors if name in reference})
        if self.together is not None:
            error = together(apart.values()).relative
            who = f"the gradients of {len(apart)} parameters are" if len(apart) > 1 else "the parameter's gradient is"
            return None if error <= self.together else f"{who} still {error:.2g} away from fp32's (relative L2)"
        for name, one in apart.items():
            if one.relative > ONE_ALONE:
                return f"the gradient of {name} is still {one.relative:.2g} away from fp32's (relative L2)"
        return None

    @contextmanager
    def _at_the_step(self) -> Iterator[Session]:
        if self.back is not None:
            with self.back() as session:
                yield session
            return
        self.snapshot.restore()
        try:
            yield self.session
        finally:
            self.snapshot.restore()


def _is_finite(outcome: StepOutcome, nonfinite_probe: NonFiniteProbe) -> bool:
    return not nonfinite_probe.report.affected and (outcome.loss is None or math.isfinite(outcome.loss))


def _kind(raised: str | None) -> str:
    return (raised or "").partition(":")[0]


def first_cure(attempts: Iterator[Prescription]) -> Prescription | None:
    """Try in order until one is shown to cure; the attempts before it become its alternatives."""
    tried: list[Prescription] = []
    for attempt in attempts:
        if attempt.status in SHOWN:
            return replace(attempt, alternatives=tuple(tried))
        tried.append(attempt)
    return replace(tried[0], alternatives=tuple(tried[1:])) if tried else None
