"""The finding that a recommendation leads to, and its change, which is replayed if possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.forward import GRADIENTS_DEPART, departs
from ampdoctor.diagnosis.replay.gradients import CLEARLY_BETTER, underflow_seen
from ampdoctor.diagnosis.replay.scale_choice import forward_range, no_common_scale, no_valid_scale, scale_too_high
from ampdoctor.diagnosis.replay.scaler import unusable_scale_finding
from ampdoctor.diagnosis.scan.tensors import FP16_MAX
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Finding, Prescription, PrescriptionKind, PrescriptionStatus
from ampdoctor.workflows.changes import Change, both, compute_dtype, fp32_modules, no_change, rescaled, with_scaler
from ampdoctor.workflows.profile import range_findings
from ampdoctor.workflows.replay_under_change import Observed, Then, observe, observed_alongside
from ampdoctor.workflows.trials import AGREEMENT, first_cure

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.advice import Advice
    from ampdoctor.workflows.measure import Measurement
    from ampdoctor.workflows.requests import Progress
    from ampdoctor.workflows.step_beside_fp32 import StepComparison

TRIED_STEPS = 8
"""Steps of a replay that only has to show that another precision is a cure."""


@dataclass(slots=True)
class Replays:
    """The replays behind a recommendation."""

    session: Session
    start: Snapshot
    taken: Measurement
    progress: Progress | None
    compared: Sequence[StepComparison] = ()  # by the search before
    _unlike: int | None = None  # a step that is not reproduced

    def own(self) -> Observed:
        """Returns the replay with the run's own scaling."""
        steps = self.taken.ranges.steps
        own = observed_alongside(self.compared, steps)
        if own is None:
            self._tell("replaying as it is")
            own = self._observe(no_change, steps)
        self._unlike = own.unlike
        return own

    def changed(self, advice: Advice) -> Observed:
        """Returns the replay with the recommended scaler, and with fp32 for the modules that no scale fits."""
        self._tell("replaying with the recommended scaler")
        by_hand = self.taken.ranges.run.base_scale
        scaler = with_scaler(**advice.recommended.arguments())
        scaled = scaler if by_hand == 1.0 else rescaled(advice.recommended.scale / by_hand)
        in_fp32 = fp32_modules(advice.choice.fp32_modules) if advice.choice.fp32_modules else no_change
        return self._observe(both(scaled, in_fp32), self.taken.ranges.steps)

    def tried(self, change: Change) -> Observed:
        """Returns a short replay with another change, which ends where it is refused."""
        return self._observe(change, min(self.taken.ranges.steps, TRIED_STEPS), enough=AGREEMENT)

    def _observe(self, change: Change, steps: int, *, enough: float = math.inf) -> Observed:
        return observe(self.session, self.start, steps, self.taken, change, unlike=self._unlike, enough=enough)

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, 0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The results of the replays, and what follows from them."""

    now: Observed | None  # with the run's own scaling; None for a profile file
    then: Then  # runs the replay with the recommended scaler, once, if anything hangs on it
    change: bool  # the recommended scaler is better
    unusable: str | None  # why the recommended scaler could not be replayed
    by_hand: bool = False  # the step scales its loss itself: the recommended scale was tried on its backward
    no_scale: bool = False  # no loss scale is recommended at all
    harm: str | None = None  # a clause on what went wrong in an fp16 replay with either scaler
    settled: bool = False  # the scaler skipped no steps after that
    findings: list[Finding] = field(default_factory=list)


def judge(
    ranges: RangeProfile, thresholds: Thresholds, advice: Advice, judgement: Judgement, replays: Replays | None
) -> Judgement:
    """Add the findings. What no loss scale cures comes first, and then the scale is not mentioned."""
    trial = _Trial(advice, judgement, replays)
    if advice.now.inf_in_weights:
        found = unusable_scale_finding(
            advice.current.scale, trial.scaler(), reached=DEAD_SCALE < advice.current.scale < math.inf
        )
        return replace(judgement, change=True, findings=[found])
    incurable = _incurable(ranges, thresholds, advice, judgement, trial)
    if incurable is not None:
        settled = incurable.settled  # with the recommended scaler: the present one may still be settling
        return replace(
            judgement,
            change=settled and judgement.now is not None and not judgement.now.settled,
            no_scale=not settled,
            harm=incurable.harm,
            settled=settled,
            findings=[incurable.finding],
        )
    if advice.choice.exponent < 0:  # whatever a scale below 1 would save, it is no cure
        judgement = replace(judgement, change=False, no_scale=True)
    findings = _of_the_scale(ranges, thresholds, advice, judgement, trial)
    if advice.large:
        findings.append(forward_range(advice.large, trial.in_fp32()))
    choice = advice.choice
    if choice.modules_not_covered:
        findings.append(
            no_common_scale(
                choice.modules_not_covered,
                choice.share,
                choice.settings.scale,
                trial.modules_no_scale_fits(),
                thresholds,
            )
        )
    return replace(judgement, findings=findings)


@dataclass(frozen=True, slots=True)
class _Incurable:
    finding: Finding
    harm: str | None = None
    settled: bool = False


def _incurable(
    ranges: RangeProfile, thresholds: Thresholds, advice: Advice, judgement: Judgement, trial: _Trial
) -> _Incurable | None:
    now = judgement.now
    if now is None:
        beyond = {name: amax for name, amax in advice.large.items() if amax > FP16_MAX}
        return _Incurable(forward_range(beyond, trial.forward())) if beyond else None
    at_odds = partial(departs, relative_error=now.relative_error, precision=ranges.run.precision)
    if now.harmed is not None and not (now.harmed.startswith("grad:") and advice.now.skipped):
        harm = f"{now.harmed} is not finite at step {now.harmed_at}"
        found = at_odds(harm, nonfinite=now.harmed, step=now.harmed_at, prescription=trial.in_bf16())
        return _Incurable(found, harm)
    then = judgement.then() if now.skipped else None
    stubborn = sorted(set(now.skipped) & set(then.skipped)) if then is not None else []
    if stubborn:
        harm = f"the gradients of step {stubborn[0]} are not finite with the recommended loss scale either"
        settled = then is not None and then.settled
        lower = trial.at_its_level() if settled else trial.in_bf16()  # skips while the scale comes down are normal
        found = at_odds(harm, nonfinite=None, step=stubborn[0], settled=settled, prescription=lower)
        return _Incurable(found, harm, settled)
    # in each compared step: near an optimum the gradient is tiny, and rounding is large beside it
    if now.settled and now.relative_error is not None and min(now.errors) > thresholds[GRADIENTS_DEPART]:
        then = judgement.then() if judgement.change else None  # where nothing is lost, it is rounding
        better = then.relative_error if then is not None else None
        cured = better is not None and now.relative_error >= thresholds[CLEARLY_BETTER] * better
        foreseen = advice.now.relative_error > thresholds[GRADIENTS_DEPART]
        if not cured and not foreseen:
            harm = f"the weight gradients are {now.relative_error:.2g} away from fp32's (relative L2)"
            return _Incurable(at_odds(harm, nonfinite=None, step=None, prescription=trial.in_bf16()), harm)
    return None


def _of_the_scale(
    ranges: RangeProfile, thresholds: Thresholds, advice: Advice, judgement: Judgement, trial: _Trial
) -> list[Finding]:
    """Returns the first that holds: no valid scale, a scale that is too high, or underflow."""
    now = judgement.now
    stuck = not now.settled if now is not None else not advice.now.settled
    if advice.choice.exponent < 0:
        scale = now.scales[-1] if now is not None and now.scales else advice.now.scale
        fell = 0.0 < scale < 1.0 and advice.current.growth_interval > 0  # by itself, losing steps at each scale above
        return [
            no_valid_scale(
                advice.recommended.scale,
                bound_by=advice.choice.bound_by,
                stuck=stuck or fell,
                step=_last_bad(now),
                prescription=trial.bf16(),
            )
        ]
    if stuck:
        return [_too_high(ranges, advice, judgement, trial)]
    if now is None or now.unlike is not None:
        found = range_findings(ranges, thresholds)
        return [replace(finding, prescription=trial.scaler()) for finding in found] if judgement.change else found
    if not judgement.change:
        return []
    then = judgement.then()
    shares = then.shares() if then is not None and then.relative_error is not None else None
    underflow = underflow_seen(now.shares(), shares, advice.now.scale, trial.scaler(), thresholds)
    return [] if underflow is None else [underflow]


def _last_bad(now: Observed | None) -> int | None:
    if now is None:
        return None
    return now.harmed_at if now.harmed_at is not None else max(now.skipped, default=None)


def _too_high(ranges: RangeProfile, advice: Advice, judgement: Judgement, trial: _Trial) -> Finding:
    now = judgement.now
    step = ranges.steps - 1 if now is None else _last_bad(now) or 0
    scale = now.scales[step] if now is not None and step < len(now.scales) else advice.current.scale
    return scale_too_high(
        scale,
        advice.recommended.scale,
        step=step,
        harmed=now.harmed if now is not None else None,
        bound_by=advice.choice.bound_by,
        begun_again=now.begun_again if now is not None else 0,
        prescription=trial.scaler(),
    )


class _Trial:
    def __init__(self, advice: Advice, judgement: Judgement, replays: Replays | None) -> None:
        self._advice = advice
        self._judgement = judgement
        self._replays = replays

    def scaler(self) -> Prescription:
        """The recommended scaler, with its replay; bf16 if that scaler does not cure."""
        made = self._scaler_alone()
        if made.status in ("verified", "intervention") or self._replays is None:
            return made
        return self._first(lambda: made, self.in_bf16)

    def _scaler_alone(self) -> Prescription:
        advice, judgement = self._advice, self._judgement
        settings = advice.recommended
        detail = f"GradScaler(init_scale={exact(settings.scale)})"
        new = advice.current.growth_interval == 0 and not judgement.by_hand  # there is no scaler yet
        kind: PrescriptionKind = "scaler" if new else "init_scale"
        value = settings.arguments() if new else settings.scale
        status: PrescriptionStatus = "not_run"
        reason = judgement.unusable
        then = judgement.then()
        if then is not None:
            status, reason = then.cures(judgement.now, skips=advice.then.skipped)
        if judgement.by_hand:
            detail = f"multiply the loss by {exact(settings.scale)} where the step multiplies it, or use {detail}"
            if status == "verified":
                status, reason = "intervention", "tried on the backward: the factor itself is in the step's code"
        proof = then.proof(judgement.now) if then is not None else None
        return Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail, proof=proof)

    def bf16(self) -> Prescription:
        """bf16, with the scale below 1 as the alternative."""
        scaled = self._scaler_alone()
        scaled = replace(scaled, detail=f"if you must stay in fp16: {scaled.detail}")
        return replace(self.in_bf16(), alternatives=(scaled,))

    def forward(self) -> Prescription:
        """fp32 for the modules whose activations overflow; then also for those close to it; then bf16 for all."""
        large = self._advice.large
        beyond = sorted(name for name in large if name and large[name] > FP16_MAX)
        near = sorted(name for name in large if name)
        tried = [partial(self._in_fp32, names) for names in ([beyond] if beyond == near else [beyond, near]) if names]
        return self._first(*tried, self.in_bf16)

    def in_fp32(self) -> Prescription:
        """fp32 for the modules with large activations."""
        names = sorted(name for name in self._advice.large if name)
        return self._in_fp32(names) if names else self.in_bf16()

    def _in_fp32(self, names: list[str]) -> Prescription:
        return self._try("fp32_modules", names, fp32_modules(names), f"run {', '.join(names)} in fp32")

    def modules_no_scale_fits(self) -> Prescription:
        """fp32 for the modules that no scale fits, as replayed with the scaler; bf16 if they are many."""
        choice = self._advice.choice
        if not choice.fp32_modules:
            return self.in_bf16()
        names = list(choice.fp32_modules)
        detail = f"run {', '.join(names)} in fp32, with GradScaler(init_scale={exact(choice.settings.scale)})"
        alone = self._scaler_alone()
        return replace(alone, kind="fp32_modules", value=names, detail=detail)

    def at_its_level(self) -> Prescription:
        """The recommended scaler, started at the scale to which it backs off."""
        then = self._judgement.then()
        if then is None or not then.scales:
            return self._scaler_alone()
        level = then.scales[-1]
        settings = replace(self._advice.recommended, scale=level)
        return self._try(
            "init_scale", level, with_scaler(**settings.arguments()), f"GradScaler(init_scale={exact(level)})"
        )

    def in_bf16(self) -> Prescription:
        """The whole run in bf16."""
        return self._try("dtype", "bfloat16", compute_dtype("bf16"), "train in bf16, without a GradScaler")

    def _try(self, kind: PrescriptionKind, value: object, change: Change, detail: str) -> Prescription:
        replays, now = self._replays, self._judgement.now
        if replays is None:
            return Prescription(
                kind=kind, value=value, status="not_run", reason=self._judgement.unusable, detail=detail
            )
        seen = replays.tried(change)
        status, reason = seen.cures(now)
        proof = seen.proof(now)
        return Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail, proof=proof)

    @staticmethod
    def _first(*attempts: Callable[[], Prescription]) -> Prescription:
        return first_cure(attempt() for attempt in attempts) or attempts[-1]()
