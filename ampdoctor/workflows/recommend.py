"""`recommend`: loss scaling and precision from measured ranges, then one replay that shows whether they hold.

Classify first: what overflows in the forward, or in fp32 as well, no loss scale cures. Then the closed forms, then a
replay with the run's own scaling and one with the recommended: the same steps from the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ampdoctor.evidence.report import Check, Finding, Report, Skipped, finding_order, verdict_of
from ampdoctor.workflows.advising import Advice, advise, outcome_of, outcome_seen, pays
from ampdoctor.workflows.hand_scale import rescaled
from ampdoctor.workflows.history import history_findings, not_said_yet
from ampdoctor.workflows.measuring import Measurement, measure
from ampdoctor.workflows.profile import merged_files, range_checks, range_findings, run_of_file
from ampdoctor.workflows.range_section import profile_section
from ampdoctor.workflows.replaying import open_replay
from ampdoctor.workflows.scale_findings import Judgement, judge
from ampdoctor.workflows.shadow import Observed, both, observe, scaler
from ampdoctor.workflows.trials import fp32_modules

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.request import Progress, ReplayRequest

KEPT: dict[str, Any] = {"recommended": None, "change": False, "bound_by": None, "predicted": None, "observed": None}


def recommend(request: ReplayRequest, *, progress: Progress | None = None) -> Report:
    """Recommend GradScaler settings and precision.

    Args:
        request: What to replay.
        progress: Told after each step.

    Returns:
        The report; `scaler.change` is False where what is there is as good.

    Raises:
        AmpdoctorError: The run cannot be replayed, in one sentence.
    """
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        try:
            taken = measure(session, start, request.steps, progress, factory=replay.factory.name)
            replays = _Replays(session, start, taken, progress)
            report = _Recommendation(taken.ranges, request.thresholds, replays).report()
        finally:
            start.restore()
            session.close()
        replay.notes.extend(taken.notes)
        resumed = replay.resumed
        if resumed is not None and resumed.settled_scale_lost and resumed.file_scaler is not None:
            lost = f"the checkpoint's settled scale of {resumed.file_scaler.scale:g} is not continued by the run"
            report = replace(report, checks=(*report.checks, Check(name="checkpoint's loss scale", result=lost)))
        found = (*report.findings, *not_said_yet(history_findings(replay), report.findings))
        report = replace(report, findings=tuple(sorted(found, key=finding_order)))
        run = replay.described(session, taken.ranges.steps)
        target = {"factory": replay.factory.name, "checkpoint": request.checkpoint}
    return replace(
        report,
        target=target,
        run={**run, "notes": list(dict.fromkeys(replay.notes))},
        verdict=verdict_of(report.findings, expect_failure=request.expect_failure),
    )


def recommend_from_files(paths: Sequence[str], request: ReplayRequest) -> Report:
    """Recommend settings from saved profiles of one run; nothing runs.

    Args:
        paths: At least one.
        request: Its thresholds count; there is nothing to replay.

    Raises:
        AmpdoctorError: A file is no profile, or they are not of one run.
    """
    ranges = merged_files(paths)
    report = _Recommendation(ranges, request.thresholds, None).report()
    skipped = Skipped(what="replay", reason="a profile file holds ranges, not the run: give the factory for a replay")
    return replace(
        report, target={"profile": ", ".join(paths)}, run=run_of_file(ranges), skipped=(*report.skipped, skipped)
    )


@dataclass(slots=True)
class _Replays:
    """The replays that a recommendation rests on; each is made at most once."""

    session: Session
    start: Snapshot
    taken: Measurement
    progress: Progress | None
    _own: Observed | None = None

    def own(self) -> Observed:
        """With the run's own scaling."""
        if self._own is None:
            self._tell("replaying as it is")
            self._own = observe(self.session, self.start, self.taken.ranges.steps, self.taken.plan)
        return self._own

    def changed(self, advice: Advice) -> Observed:
        """With the recommended scaler, and with the modules in fp32 that it does not serve."""
        self._tell("replaying with the recommended scaler")
        ranges = self.taken.ranges
        wanted = scaler(advice.recommended)
        if ranges.run.base_scale != 1.0:
            wanted = rescaled(advice.recommended.scale / ranges.run.base_scale)
        if advice.choice.fp32_modules:
            wanted = both(wanted, fp32_modules(advice.choice.fp32_modules))
        return observe(self.session, self.start, ranges.steps, self.taken.plan, wanted)

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, 0, None)


@dataclass(slots=True)
class _Recommendation:
    ranges: RangeProfile
    thresholds: Thresholds
    replays: _Replays | None
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _fits: float | None = None

    def report(self) -> Report:
        """Everything but target and run."""
        section = self._scaler_section()
        findings = tuple(sorted(self.findings, key=finding_order))
        return Report(
            command="recommend",
            target={},
            verdict=verdict_of(findings),
            findings=findings,
            checks=(*range_checks(self.ranges), *self.checks),
            skipped=tuple(self.skipped),
            scaler=section,
            profile=profile_section(self.ranges, self._fits, sites=self.replays is not None),
        )

    def _scaler_section(self) -> dict[str, Any]:
        ranges = self.ranges
        current = self._current()
        if ranges.nonfinite_steps:
            self.findings += range_findings(ranges, self.thresholds)
            self._say("loss scale", "not derived: the run is not finite in fp32")
            return {"current": current, **KEPT}
        advice = advise(ranges, self.thresholds)
        self._fits = None if advice is None else advice.recommended.scale
        if ranges.run.precision != "fp16":
            self._say("loss scaling", f"not needed in {ranges.run.precision}: its exponents reach as far as fp32's")
            self._say_what_fp16_would_take(advice)
            return {"current": None, **KEPT}
        if advice is None:
            self._say("loss scaling", "nothing to scale: no gradient of a half tensor is nonzero")
            return {"current": current, **KEPT}
        return self._fp16(advice, current)

    def _fp16(self, advice: Advice, current: dict[str, Any] | None) -> dict[str, Any]:
        now, then, unusable = self._replayed(advice)
        change = pays(advice, self.thresholds, scaled=current is not None, now=now, then=then)
        by_hand = self.ranges.run.base_scale != 1.0
        known = Judgement(now=now, then=then, change=change, unusable=unusable, by_hand=by_hand)
        judgement = judge(self.ranges, self.thresholds, advice, known, self.replays)
        self.findings += judgement.findings
        change = judgement.change
        keep = "no loss scale helps" if judgement.no_scale else "keep what is there: a change gains nothing measurable"
        self._say("loss scale", "change" if change else keep)
        shown = then if change else now
        settings = advice.recommended if change else advice.current
        recommended = None if judgement.no_scale else settings.arguments()
        if not change and (self.ranges.run.scaler is None or settings.growth_interval < 1):
            recommended = None  # what is kept is no scaler, or none to recommend to anybody
        predicted = advice.then if change else advice.now
        return {
            "current": current,
            "recommended": recommended,
            "change": change,
            "bound_by": f"{advice.choice.bound_by}: at most 2^{advice.choice.exponent}",
            "predicted": None if judgement.no_scale else outcome_of(predicted),
            "observed": outcome_seen(shown) if shown is not None and shown.steps else None,
        }

    def _replayed(self, advice: Advice) -> tuple[Observed | None, Observed | None, str | None]:
        """(with the run's own scaling, with the recommended scaler, why the latter cannot be)."""
        if self.replays is None:
            return None, None, "a profile file holds ranges, not the run"
        now = self.replays.own()
        unusable = self._unusable()
        if unusable is None:
            then = self.replays.changed(advice)
            if then.scaled or then.failure is not None or self.ranges.run.base_scale != 1.0:
                return now, then, None
            unusable = "the step does not use the scaler that it is given"
        self.skipped.append(Skipped(what="replay with the recommended scaler", reason=unusable))
        return now, None, unusable

    def _unusable(self) -> str | None:
        if self.replays is not None and not self.replays.session.optimizers:
            return "the run has no optimizer for a scaler to step"
        precision = self.replays.session.precision if self.replays is not None else None
        if precision is not None and not precision.autocast and not precision.master_weights:
            return "a GradScaler refuses fp16 gradients: a pure fp16 model needs autocast, master weights or bf16"
        return None

    def _current(self) -> dict[str, Any] | None:
        run = self.ranges.run
        if run.scaler is not None:
            return {key: value for key, value in run.scaler.items() if not key.startswith("_")}
        return {"scale": run.base_scale, "by_hand": True} if run.base_scale != 1.0 else None

    def _say_what_fp16_would_take(self, advice: Advice | None) -> None:
        if advice is None:
            return
        if advice.large:
            worst = max(advice.large, key=lambda name: (advice.large[name], name))
            self._say("fp16 instead", f"does not fit: {worst or 'the model'} reaches {advice.large[worst]:.4g}")
            return
        bf16 = self.ranges.merged("weight_grad").relative_error("bf16")
        self.checks.append(
            Check(
                name="fp16 instead",
                result=f"fits with GradScaler(init_scale={advice.recommended.scale:g})",
                headroom={"relative_error_fp16": advice.then.relative_error, "relative_error_bf16": bf16},
            )
        )

    def _say(self, name: str, result: str) -> None:
        self.checks.append(Check(name=name, result=result))
