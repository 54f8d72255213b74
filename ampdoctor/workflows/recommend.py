"""`recommend`: advice on loss scaling and precision with its proof, or another cause where ranges explain nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ampdoctor.diagnosis.replay.precision import advise_precision
from ampdoctor.diagnosis.replay.scaler_state import run_scaler_findings
from ampdoctor.diagnosis.replay.updates import stagnation_expected
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.report import Check, Finding, Prescription, Report, Skipped, finding_order, verdict_of
from ampdoctor.evidence.report_replay import ProofSection
from ampdoctor.evidence.report_scaler import EmittedSettings, ScalerArguments, ScalerSection
from ampdoctor.evidence.targets import target_named
from ampdoctor.scaling.emit import emit
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.workflows.advice import (
    Advice,
    advise,
    is_sound,
    outcome_of,
    pays,
    precision_facts,
    with_simulation,
)
from ampdoctor.workflows.bisect_nan import DEFAULT_STEPS, bisect_nan
from ampdoctor.workflows.changes import Change, both, fp32_modules, no_change, rescaled, with_scaler
from ampdoctor.workflows.checkpoint_state import history_findings, holds_nonfinite, not_said_yet, state_findings
from ampdoctor.workflows.measure import MeasuredStep, Measurement, Shadows, measure, not_compared
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.profile import (
    described_files,
    merged_files,
    profile_section,
    range_checks,
    range_findings,
    run_of_files,
    shadow_scales,
)
from ampdoctor.workflows.replay_under_change import FirstSteps, Observed, observe
from ampdoctor.workflows.requests import keep_all
from ampdoctor.workflows.scale_findings import Judgement, judge
from ampdoctor.workflows.trials import proof_of, proof_section

if TYPE_CHECKING:
    from ampdoctor.evidence.run_facts import PrecisionAdvice
    from ampdoctor.probes.ranges import Zeroed
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.requests import Progress, ReplayRequest, SetAside


SCALING = frozenset({"grad_underflow", "grad_overflow", "scaler_collapse"})
"""Causes that a recommendation derives from ranges and replays itself."""
UNEXPLAINED = frozenset({"AMP206", "AMP207"})
"""Codes of a recommendation's findings if ranges explain nothing."""
_SCALES = frozenset({"init_scale", "scaler"})
HARM = frozenset({"error", "warning"})


def classified(
    request: ReplayRequest, own: Sequence[Finding], steps: int, progress: Progress | None, set_aside: SetAside
) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    """Returns a recommendation's findings with `bisect-nan`'s for other causes than the scale, and what it left out.

    If the recommendation's own replays (of `steps` steps) were harmed, all of their steps are searched. Otherwise only
    the usual few are, to find lost updates and a misused scaler.
    """
    wanted = replace(request, steps=steps if is_harmed(own) else searched_steps(steps))

    def decided(report: Report) -> Report:
        return set_aside(replace(report, command="recommend"))  # the user's decisions are per command

    try:
        search = bisect_nan(wanted, progress=progress, set_aside=decided)
    except AmpdoctorError as error:
        return tuple(own), (Skipped(what="search for other causes", reason=str(error)),)
    behind = tuple(one for one in search.skipped if one.kind == "not_replayed")
    return combined(own, search.findings), behind


def searched_steps(steps: int) -> int:
    """Returns how many of the replayed steps are searched where nothing was harmed."""
    return min(steps, DEFAULT_STEPS)


def is_harmed(own: Sequence[Finding]) -> bool:
    """Whether a recommendation's findings name harm that does not come from the loss scale."""
    return any(finding.severity in HARM and finding.cause not in SCALING for finding in own)


def combined(own: Sequence[Finding], found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns one finding per cause: the recommendation's own for the scale, else the search's, which names the op.

    A cause in the scale whose change was not shown to cure gives way to another cause that was found. The search's
    finding that gradients depart without a cause (AMP207) is left out if the scale harms them.
    """
    named = any(finding.severity == "error" and finding.cause not in {None, *SCALING} for finding in found)
    own = [finding for finding in own if not (named and finding.cause in SCALING and not _is_proved(finding))]
    scaling = {finding.cause for finding in own if finding.cause in SCALING}
    harmful = any(finding.cause in SCALING and finding.severity in HARM for finding in own)
    codes = {finding.code for finding in own}
    added = [
        finding
        for finding in found
        if finding.cause not in scaling
        and not (finding.code in codes and finding.code.startswith("AMP4"))
        and not (harmful and finding.code == "AMP207")
        # the search's few steps may end while the scaler still backs off; in the recommendation's replay it has settled
        and not (finding.cause in SCALING and finding.severity != "error")
    ]
    explained = any(finding.severity in HARM for finding in added)
    causes = {finding.cause for finding in added}
    superseded = causes - SCALING
    kept = [f for f in own if f.cause not in superseded and not (explained and f.code in UNEXPLAINED)]
    return tuple(sorted([*kept, *added], key=finding_order))


def _is_proved(finding: Finding) -> bool:
    """Whether another scale cured it; a cure by bf16 says nothing about the scale."""
    change = finding.prescription
    return change is not None and change.kind in _SCALES and change.status in ("verified", "intervention")


# -- `recommend` --
# It classifies first: no loss scale cures an overflow in the forward, or one in fp32 as well. Then come the closed
# forms and their simulation, then replays of the same steps, with the run's own scaling and with the recommended.


def recommend(request: ReplayRequest, *, progress: Progress | None = None, set_aside: SetAside = keep_all) -> Report:
    """Recommend GradScaler settings and precision.

    Args:
        request: What to replay.
        progress: Called after each step.
        set_aside: As for `bisect_nan`, for causes other than the loss scale.

    Returns:
        The report; `scaler.change` is False if the present scaler is as good.

    Raises:
        AmpdoctorError: The run cannot be replayed; one sentence says why.
    """
    report, steps, calm = _from_a_replay(request, progress)
    findings, skipped = report.findings, tuple[Skipped, ...]()
    if not calm:
        findings, skipped = classified(request, findings, steps, progress, set_aside)
    shown = proof_of(findings) or report.proof
    report = replace(report, findings=findings, skipped=(*report.skipped, *skipped), proof=shown, verdict="sick")
    cut = any(one.kind == "not_replayed" for one in skipped)
    found = set_aside(report).found
    return replace(report, verdict=verdict_of(found, settled=not cut, expect_failure=request.expect_failure))


def _from_a_replay(request: ReplayRequest, progress: Progress | None) -> tuple[Report, int, bool]:
    """Returns the report from ranges and replays, the number of steps, and whether no other cause need be searched."""
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        suspect = [f for f in state_findings(replay, session, request.thresholds) if f.severity != "note"]
        try:
            taken = measure(session, start, request.steps, progress, factory=replay.factory.name)
            finite = not taken.ranges.nonfinite_steps
            shadows = Shadows(taken.ranges, shadow_scales(taken.ranges, request.thresholds) if finite else ())
            while len(taken.moments) > 1:  # no other reference, so the last step's state is freed at once
                shadows.take(session, taken.moments[-1])
                taken = replace(taken, moments=taken.moments[:-1])
            calm = FirstSteps(taken.first, searched_steps(taken.ranges.steps), request.thresholds)
            replays = _Replays(session, start, taken, shadows, calm, progress)
            report = _Recommendation(taken.ranges, request, replays).report()
            quiet = calm.throughout and not is_harmed(report.findings) and not holds_nonfinite(session) and not suspect
        finally:
            start.restore()
            session.close()
        replay.notes.extend(taken.notes)
        resumed = replay.resumed
        lost = resumed.lost_scaler if resumed is not None else None
        if lost is not None:
            was = "collapsed" if lost.collapsed else "settled"
            said = f"the checkpoint's {was} scale of {lost.scale:g} is not continued by the run"
            report = replace(report, checks=(*report.checks, Check(name="checkpoint's loss scale", result=said)))
        past = history_findings(replay, request.thresholds)
        found = (*report.findings, *not_said_yet(past, report.findings))
        report = replace(report, findings=tuple(sorted(found, key=finding_order)))
        run = replay.described(session, taken.ranges.steps)
        target = {**request.described(replay.factory.name), **request.described_advice()}
        scalers = (replay.scaler, resumed.file_scaler if resumed is not None else None)
        quiet = quiet and not past and not any(scaler is not None and scaler.dead for scaler in scalers)
        quiet = quiet and lost is None
    run = {**run, "notes": list(dict.fromkeys(replay.notes))}
    return replace(report, target=target, run=run), taken.ranges.steps, quiet


def recommend_from_files(paths: Sequence[str], request: ReplayRequest) -> Report:
    """Recommend settings from saved profiles of one run (at least one file); nothing runs.

    Of `request`, only the thresholds and the options of the advice count. Raises AmpdoctorError where a file is no
    profile, or the profiles are of several runs.
    """
    ranges = merged_files(paths)
    report = _Recommendation(ranges, request, None).report()
    if report.verdict == "healthy" and _loses(ranges, report):
        report = replace(report, verdict="inconclusive")
    skipped = Skipped(what="replay", reason="ranges alone were given, not the run: give the factory for a replay")
    target = {**described_files(paths), **request.described_advice()}
    return replace(report, target=target, run=run_of_files(paths, ranges), skipped=(*report.skipped, skipped))


def _loses(ranges: RangeProfile, report: Report) -> bool:
    """Whether gradients are lost, at this loss scale or all of them, to an extent that only a replay can measure."""
    if ranges.run.precision != "fp16":
        return False
    lost = any(finding.cause == "grad_underflow" for finding in report.findings)
    if report.scaler is not None and report.scaler.change and lost:
        return True
    gradients = ranges.merged("weight_grad")
    return bool(gradients.numel) and gradients.zeros == gradients.numel


@dataclass(slots=True)
class _Replays:
    """The replays behind a recommendation; each is made at most once."""

    session: Session
    start: Snapshot
    taken: Measurement
    shadows: Shadows
    calm: FirstSteps
    progress: Progress | None
    _own: Observed | None = None
    _known: dict[float, Zeroed] = field(default_factory=dict)

    def own(self) -> Observed:
        """Returns the replay with the run's own scaling."""
        if self._own is None:
            self._tell("replaying as it is")
            run = self.taken.ranges.run
            self._own = self._observe(no_change, run.loss_scale, moment=self._moment, calm=self.calm)
        return self._own

    def changed(self, advice: Advice) -> Observed:
        """Returns the replay with the recommended scaler, and with fp32 for the modules that no scale fits."""
        self._tell("replaying with the recommended scaler")
        ranges, scale = self.taken.ranges, advice.recommended.scale
        if ranges.run.base_scale != 1.0:
            return self._observe(both(rescaled(scale / ranges.run.base_scale), _islands(advice)), None)
        change = both(with_scaler(**advice.recommended.arguments()), _islands(advice))
        return self._observe(change, None if advice.choice.fp32_modules else scale, moment=self._moment)

    def ranges(self) -> RangeProfile:
        """Returns the profile with its shadows; a first step that a replay has taken is not run again."""
        if self._moment is not None:
            self.shadows.take(self.session, self._moment, self._known)
        return self.shadows.profile()

    @property
    def _moment(self) -> MeasuredStep | None:
        return next(iter(self.taken.moments), None)

    def _observe(
        self, change: Change, scale: float | None, *, moment: MeasuredStep | None = None, calm: FirstSteps | None = None
    ) -> Observed:
        """Replay under a change; `scale` is the changed loss scale, or None if more than the scale is changed."""
        steps, plan = self.taken.ranges.steps, self.taken.plan
        unlike = self._own.unlike if self._own is not None else None
        seen = observe(self.session, self.start, steps, plan, change, moment=moment, calm=calm, unlike=unlike)
        if seen.first is not None and scale is not None and (scale == seen.scales[0] if seen.scales else scale == 1.0):
            self._known[scale] = seen.first
        return seen

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, 0, None)


def _islands(advice: Advice) -> Change:
    return fp32_modules(advice.choice.fp32_modules) if advice.choice.fp32_modules else no_change


_REFUSED = "a GradScaler refuses fp16 gradients: a pure fp16 model needs autocast, master weights or bf16"


@dataclass(slots=True)
class _Recommendation:
    ranges: RangeProfile
    request: ReplayRequest
    replays: _Replays | None
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    proof: ProofSection | None = None

    def report(self) -> Report:
        """Returns the report without target and run; its proof is that of a change that answers no finding."""
        ranges = self.ranges
        advice = None if ranges.nonfinite_steps else advise(ranges, self.request)
        section, known = self._scaler_section(advice)
        if self.replays is None and ranges.run.scaler is not None:
            self.findings += self._of_the_settings(ranges.run.scaler)
        precision = None if ranges.nonfinite_steps else self._precision(advice, known)
        if precision is not None and self.request.emit is not None:
            section = replace(section, emit=self._emitted(advice, section, precision))
        findings = tuple(sorted(self.findings, key=finding_order))
        return Report(
            command="recommend",
            target={},
            verdict=verdict_of(findings),
            findings=findings,
            checks=(*range_checks(ranges), *self.checks),
            skipped=tuple(self.skipped),
            scaler=section,
            profile=profile_section(
                ranges if self.replays is None else self.replays.ranges(),
                None if advice is None else advice.choice.settings.scale,
                sites=self.replays is not None,
            ),
            precision=precision,
            proof=self.proof,
            thresholds=self.request.thresholds.listed(),
        )

    def _scaler_section(self, advice: Advice | None) -> tuple[ScalerSection, Judgement | None]:
        """Returns the section and, for an fp16 run, what its replays showed."""
        ranges = self.ranges
        current = self._current()
        if ranges.nonfinite_steps:
            self.findings += range_findings(ranges, self.request.thresholds)
            self._say("loss scale", "not derived: the run is not finite in fp32")
            return ScalerSection(current=current), None
        if ranges.run.precision != "fp16":
            self._say("loss scaling", f"not needed in {ranges.run.precision}: its exponents reach as far as fp32's")
            self._say_what_fp16_would_take(advice)
            return ScalerSection(), None
        if advice is None:
            self._say("loss scaling", "nothing to scale: no gradient of a half tensor is nonzero")
            return ScalerSection(current=current), None
        return self._fp16(advice, current)

    def _fp16(self, advice: Advice, current: dict[str, Any] | None) -> tuple[ScalerSection, Judgement]:
        now, then, unusable = self._replayed(advice)
        change = pays(advice, self.request.thresholds, scaled=current is not None, now=now, then=then)
        by_hand = self.ranges.run.base_scale != 1.0
        known = Judgement(now=now, then=then, change=change, unusable=unusable, by_hand=by_hand)
        judgement = judge(self.ranges, self.request.thresholds, advice, known, self.replays)
        self.findings += judgement.findings
        refused = _REFUSED if self._is_pure and current is None else None
        change = judgement.change and refused is None
        no_scale = judgement.no_scale or refused is not None
        keep = "no loss scale helps" if no_scale else "no change needed: a change gains nothing measurable"
        keep = keep if refused is None else refused
        self._say("loss scale", "change" if change else keep)
        if change and then is not None:
            status, _ = then.cures(now, skips=advice.then.skipped)
            status = "intervention" if by_hand and status == "verified" else status  # tried on the backward
            change_made = Prescription(kind="scaler", value=advice.recommended.arguments(), status=status)
            self.proof = proof_section(change_made, then.proof(now))
        shown = then if change else now
        settings = advice.recommended if change else advice.current
        recommended = None if no_scale else ScalerArguments(**settings.arguments())
        if not change and (self.ranges.run.scaler is None or not is_sound(settings)):
            recommended = None  # the kept scaler does not exist, or is not to be recommended
        predicted = advice.then if change else advice.now
        section = ScalerSection(
            current=current,
            recommended=recommended,
            change=change,
            bound_by=f"{advice.choice.bound_by}: at most 2^{advice.choice.exponent}",
            predicted=None if no_scale else outcome_of(predicted),
            before=outcome_of(now) if change and now is not None and now.steps else None,
            observed=outcome_of(shown) if shown is not None and shown.steps else None,
        )
        if not no_scale:
            horizon = self.request.thresholds.horizon
            section = with_simulation(section, advice, self.request.framework, horizon, change=change)
        return section, judgement

    def _replayed(self, advice: Advice) -> tuple[Observed | None, Observed | None, str | None]:
        if self.replays is None:
            return None, None, "ranges alone were given, not the run"
        now = self.replays.own()
        if now.unlike is not None:
            self.skipped.append(Skipped(what="comparison with fp32", reason=not_compared(now.unlike)))
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
        if self._is_pure:
            return _REFUSED
        return None

    @property
    def _is_pure(self) -> bool:
        """Whether the run keeps its weights in the compute format, without autocast and master weights."""
        return not self.ranges.run.autocast and not self.ranges.run.master_weights

    def _precision(self, advice: Advice | None, known: Judgement | None) -> PrecisionAdvice:
        facts = precision_facts(
            self.ranges,
            target_named(self.request.target),
            choice=None if advice is None else advice.choice,
            pure=self._is_pure,
            harm=known.harm if known is not None else None,
            settled=known is not None and known.settled,
            precision_matters=self.request.precision_matters,
        )
        if self._is_pure and self.ranges.run.precision == "bf16":
            stagnant = stagnation_expected(self.ranges.updates, self.request.thresholds)
            self.findings += [] if stagnant is None else [stagnant]
        return advise_precision(facts, self.request.thresholds)

    def _of_the_settings(self, state: Mapping[str, Any]) -> list[Finding]:
        """Returns what is wrong with a scaler known only from the profile, unless a replay has found it already."""
        settings, said = ScalerSettings.of_state(state), {finding.code for finding in self.findings}
        own = ScalerState(
            scale=settings.scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            growth_tracker=settings.growth_tracker,
        )
        return [finding for finding in run_scaler_findings(own, self.request.thresholds) if finding.code not in said]

    def _emitted(self, advice: Advice | None, section: ScalerSection, precision: PrecisionAdvice) -> EmittedSettings:
        """Returns the recommended precision and, for fp16, the settings to use, in a framework's terms."""
        settings = ScalerSettings()
        scaled = advice is not None and precision.precision == "fp16"
        if advice is not None and scaled:
            kept = not section.change and section.recommended is not None
            settings = advice.current if kept else advice.recommended
        otherwise: Literal["bf16", "fp32"] = "fp32" if precision.precision in ("fp32", "tf32") else "bf16"
        made = emit(
            settings,
            self.request.framework,
            fp32_modules=precision.fp32_modules() if scaled else (),
            loss_in_half=self.ranges.run.loss_in_half,
            precision="fp16" if scaled else otherwise,
        )
        if scaled and section.recommended is None:
            none = "the run has no loss scaler that is to be kept or changed; this is one that fits"
            made = replace(made, notes=(none, *made.notes))
        return made

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
