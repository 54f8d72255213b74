"""`recommend`: the cause that `bisect-nan` finds, or else advice on loss scaling and precision with its proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from ampdoctor.diagnosis.replay.precision import advise_precision
from ampdoctor.diagnosis.replay.scaler import run_scaler_findings
from ampdoctor.diagnosis.replay.updates import stagnation_expected
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Check, Finding, Prescription, Report, Skipped, finding_order, verdict_of
from ampdoctor.evidence.report_replay import NOT_COMPARED, ProofSection
from ampdoctor.evidence.report_scaler import EmittedSettings, ScalerArguments, ScalerSection
from ampdoctor.evidence.targets import target_named
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.scaling.emit import emit
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.workflows.advice import Advice, advise, is_sound, outcome_of, pays, precision_facts, with_simulation
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.compare_fp32 import CompareDuringReplay
from ampdoctor.workflows.measure import measure, not_compared, with_replay
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.profile import profile_section, range_checks, range_findings, ranges_in, run_of_file
from ampdoctor.workflows.replay_under_change import Observed, Then
from ampdoctor.workflows.requests import keep_all
from ampdoctor.workflows.scale_findings import Judgement, Replays, judge
from ampdoctor.workflows.trials import NO_SCALER, proof_of, proof_section

if TYPE_CHECKING:
    from ampdoctor.evidence.run_facts import PrecisionAdvice
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.workflows.requests import Progress, ReplayRequest, SetAside


SCALING = frozenset({"grad_underflow", "grad_overflow", "scaler_collapse"})
"""Causes that a recommendation derives from ranges and replays itself."""
SEARCHED_STEPS = 8
"""Number of steps that are searched for other causes before the ranges are measured."""
_UNSETTLED = frozenset({"not_replayed", "not_in_half"})
"""Kinds of what a search has left out that forbid to call the run healthy."""
_UNEXPLAINED = frozenset({"AMP206", "AMP207"})
"""Codes of a recommendation's findings if ranges explain nothing."""
_HARM = frozenset({"error", "warning"})
_SCALER = ("init_scale", "scaler")
"""Kinds of changes of the scaler."""
_LOSS_SCALE = "loss scale"
_FORMATS = {"bfloat16": ("bf16",), "float16": ("fp16",), "float32": ("fp32", "tf32")}


def recommend(request: ReplayRequest, *, progress: Progress | None = None, set_aside: SetAside = keep_all) -> Report:
    """Recommend GradScaler settings and precision; first search the first steps for other causes, as `bisect-nan` does.

    Args:
        request: What to replay.
        progress: Called after each step.
        set_aside: As for `bisect_nan`.

    Returns:
        The report; that of the search if it finds a cause that is not the loss scale. Otherwise `scaler.change` says
        whether other settings are better than the present ones.

    Raises:
        AmpdoctorError: The run cannot be replayed; one sentence says why.
    """

    def decided(report: Report) -> Report:
        return set_aside(replace(report, command="recommend"))  # the user's decisions are per command

    notes: dict[str, None] = {}  # some are only told when the user's modules are imported, so the first time

    def noted(report: Report) -> Report:
        notes.update(dict.fromkeys(report.run["notes"]))
        return replace(report, run={**report.run, "notes": list(notes)})

    def searched(steps: int, alongside: CompareDuringReplay | None = None) -> Report:
        asked = replace(request, steps=steps)
        found = noted(bisect_nan(asked, progress=progress, set_aside=decided, alongside=alongside))
        return replace(found, command="recommend", target={**found.target, **request.described_advice()})

    alongside = CompareDuringReplay(request.compare_steps, FormatsProbe())
    search = searched(min(request.steps or SEARCHED_STEPS, SEARCHED_STEPS), alongside)
    if other_cause(search, decided):
        return search
    report = noted(_measured(request, progress, alongside))
    steps = report.run["steps"]
    unexplained = any(finding.code in _UNEXPLAINED for finding in report.findings)
    if steps > SEARCHED_STEPS and (unexplained or search.verdict != report.verdict):
        search = searched(steps)  # what harms the run may come later
        if other_cause(search, decided):
            return search
    findings = combined(report.findings, search.findings)
    also = {NOT_COMPARED} if search.is_not_compared and not report.is_not_compared else set()
    how = {key: value for key, value in search.run.items() if key == "half_products"}  # its steps are the own replay
    kept = [one for one in search.skipped if one.kind in _UNSETTLED or one.what in also]
    report = replace(
        report,
        run={**report.run, **how},
        verdict=search.verdict,
        complete=search.complete,
        findings=findings,
        skipped=(*report.skipped, *kept),
        errors=search.errors,
        proof=proof_of(findings) or report.proof,
    )
    sick = any(finding.severity == "error" for finding in decided(report).found)
    return one_answer(replace(report, verdict="sick") if sick else report)


def other_cause(search: Report, set_aside: SetAside) -> bool:
    """Whether a search has found an error that is not of the loss scale, and that the user has not set aside."""
    own = {finding.fingerprint for finding in search.findings}
    left = [finding for finding in set_aside(search).findings if finding.fingerprint in own]
    return any(finding.severity == "error" and finding.cause not in SCALING for finding in left)


def combined(own: Sequence[Finding], found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns a recommendation's findings with those of a search that has found no error but in the loss scale.

    Of the loss scale the recommendation's own are told; the search's only if there is none and the run is sick. Of
    all else the search's are told, which name the op; an error among them was set aside by the user.
    """
    scaling = [finding for finding in own if _is_of_the_scale(finding)]
    if scaling:
        found = [finding for finding in found if not _is_of_the_scale(finding)]
    if any(finding.severity in _HARM for finding in scaling):
        found = [finding for finding in found if finding.code != "AMP207"]
    added = [finding for finding in found if not _is_of_the_scale(finding) or finding.severity == "error"]
    harmed = any(finding.severity in _HARM and finding.cause not in SCALING for finding in added)
    codes = {finding.code for finding in added} | (_UNEXPLAINED if harmed else frozenset())
    causes = {finding.cause for finding in added} - {None, *SCALING}
    kept = [finding for finding in own if finding.code not in codes and finding.cause not in causes]
    return tuple(sorted([*kept, *added], key=finding_order))


def _is_of_the_scale(finding: Finding) -> bool:
    """Whether it is of the loss scale, not in the run's past (AMP7xx), which only a log shows."""
    return finding.cause in SCALING and not finding.code.startswith("AMP7")


# -- one answer: the change of a finding leads, and no other advice contradicts it --


def one_answer(report: Report) -> Report:
    """Returns the report without the precision and the scaler that are another answer than the findings' own change.

    What was measured with the present scaler stays. A scaler that a finding names untried has the settings that are
    derived from the run.
    """
    fix = _change_of(report.findings)
    if fix is None:
        return report
    advice, scaler, checks = report.precision, report.scaler, report.checks
    if advice is not None and advice.precision not in _formats_after(fix, report.run["precision"]):
        advice = None
    if scaler is None:
        return replace(report, precision=advice)
    findings, derived = report.findings, scaler.recommended if scaler.change else None
    if derived is not None and fix.kind in _SCALER and fix.status == "not_run":
        findings = tuple(_with_settings(finding, asdict(derived)) for finding in findings)
    elif not _is_in(fix, scaler):
        now = scaler.before if scaler.change else scaler.observed
        if scaler.change or fix.kind in _SCALER:
            other = "as the finding's change says"
            checks = tuple(replace(one, result=other) if one.name == _LOSS_SCALE else one for one in checks)
        scaler = ScalerSection(current=scaler.current, observed=now, emit=scaler.emit)
    return replace(report, findings=findings, checks=checks, precision=advice, scaler=scaler)


def _with_settings(finding: Finding, derived: Mapping[str, float]) -> Finding:
    """Returns a finding whose untried scaler has the derived settings."""
    fix = finding.prescription
    if fix is None or fix.kind not in _SCALER or fix.status != "not_run" or finding.severity not in _HARM:
        return finding
    if _init_scale(fix) == derived["init_scale"]:
        return finding
    said = ", ".join(f"{name}={exact(value)}" for name, value in derived.items())
    detail = f"GradScaler({said})" if fix.detail.startswith("GradScaler(") else fix.detail
    return replace(finding, prescription=replace(fix, kind="scaler", value=derived, detail=detail))


def _change_of(findings: Sequence[Finding]) -> Prescription | None:
    """Returns the first verified change of the precision or the scaler for an error or a warning, else the first.

    Not a change of what the optimizer keeps, which goes with any precision of the compute.
    """
    harm = [one for one in findings if one.severity in _HARM and one.cause != "optimizer_precision"]
    made = [one.prescription for one in harm if one.prescription is not None]
    made = [fix for fix in made if fix.kind in {"dtype", "fp32_modules", *_SCALER}]
    return next((fix for fix in made if fix.verified), made[0] if made else None)


def _formats_after(fix: Prescription, own: str) -> tuple[str, ...]:
    """Returns the format in which the run computes after a change; TF32 counts as fp32."""
    return _FORMATS[fix.value] if fix.kind == "dtype" else (own,)


def _init_scale(fix: Prescription) -> float:
    return float(fix.value if fix.kind == "init_scale" else fix.value["init_scale"])


def _is_in(fix: Prescription, scaler: ScalerSection) -> bool:
    """Whether the scaler that the section says goes with the change."""
    if fix.kind == "fp32_modules":
        return not scaler.change or "GradScaler(" in fix.detail
    if fix.kind == "dtype" or not scaler.change or scaler.recommended is None:
        return False
    return scaler.recommended.init_scale == _init_scale(fix)


# -- from ranges: the closed forms and their simulation, then replays with the run's own scaling and the recommended --


def _measured(request: ReplayRequest, progress: Progress | None, alongside: CompareDuringReplay) -> Report:
    """Returns the report from ranges and replays."""
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        try:
            name, known = replay.factory.name, alongside.compared and session.precision.reduced
            half = alongside.formats if known else None  # an fp32 run is measured as if it were in fp16
            taken = measure(session, start, request.steps, progress, factory=name, shadows=False, half=half)
            replays = Replays(session, start, taken, progress, alongside.compared)
            report = _Recommendation(taken.ranges, request, replays).report()
        finally:
            start.restore()
            session.close()
        replay.notes.extend(taken.notes)
        lost = replay.resumed.lost_scaler if replay.resumed is not None else None
        if lost is not None:
            was = "collapsed" if lost.collapsed else "settled"
            said = f"the checkpoint's {was} scale of {lost.scale:g} is not continued by the run"
            report = replace(report, checks=(*report.checks, Check(name="checkpoint's loss scale", result=said)))
        run = {**replay.described(session, taken.ranges.steps), "notes": list(dict.fromkeys(replay.notes))}
        target = {**request.described(replay.factory.name), **request.described_advice()}
    return replace(report, target=target, run=run)


def recommend_from_file(path: str, request: ReplayRequest) -> Report:
    """Recommend settings from a saved profile, or from a run's log, without a run; may raise AmpdoctorError."""
    ranges = ranges_in(path)
    report = _Recommendation(ranges, request, None).report()
    if report.verdict == "healthy" and _loses(ranges, report):
        report = replace(report, verdict="inconclusive")
    skipped = Skipped(what="replay", reason="ranges alone were given, not the run: give the factory for a replay")
    target = {"profile": path, **request.described_advice()}
    skips = (*report.skipped, skipped)
    return one_answer(replace(report, target=target, run=run_of_file(path, ranges), skipped=skips))


def _loses(ranges: RangeProfile, report: Report) -> bool:
    """Whether gradients are lost, at this loss scale or all of them, to an extent that only a replay can measure."""
    if ranges.run.precision != "fp16":
        return False
    lost = any(finding.cause == "grad_underflow" for finding in report.findings)
    if report.scaler is not None and report.scaler.change and lost:
        return True
    gradients = ranges.merged("weight_grad")
    return bool(gradients.numel) and gradients.zeros == gradients.numel


_REFUSED = "a GradScaler refuses fp16 gradients: a pure fp16 model needs autocast, master weights or bf16"


@dataclass(slots=True)
class _Recommendation:
    ranges: RangeProfile
    request: ReplayRequest
    replays: Replays | None
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
        now = None if known is None else known.now
        if now is not None and len(set(now.scales)) < 2:  # each at the run's own scale
            ranges = with_replay(ranges, now.compared, now.found)
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
                ranges, None if advice is None else advice.choice.settings.scale, sites=self.replays is not None
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
            self._say(_LOSS_SCALE, "not derived: the run is not finite in fp32")
            return ScalerSection(current=current), None
        if ranges.run.precision != "fp16":
            self._say("loss scaling", f"not needed in {ranges.run.precision}: its exponents reach as far as fp32's")
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
        self._say(_LOSS_SCALE, "change" if change else keep)
        changed = then() if change else None
        if changed is not None:
            status, _ = changed.cures(now, skips=advice.then.skipped)
            status = "intervention" if by_hand and status == "verified" else status  # tried on the backward
            change_made = Prescription(kind="scaler", value=advice.recommended.arguments(), status=status)
            self.proof = proof_section(change_made, changed.proof(now))
        shown = changed if change else now
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

    def _replayed(self, advice: Advice) -> tuple[Observed | None, Then, str | None]:
        if self.replays is None:
            return None, lambda: None, "ranges alone were given, not the run"
        now = self.replays.own()
        if now.unlike is not None:
            self.skipped.append(Skipped(what=NOT_COMPARED, reason=not_compared(now.unlike)))
        unusable = self._unusable()
        if unusable is None:
            then = cache(partial(self.replays.changed, advice))
            scales = now.scaled or self.replays.session.run.step is None  # our own step scales
            if scales or self.ranges.run.base_scale != 1.0 or then().scaled or then().failure is not None:
                return now, then, None
            unusable = NO_SCALER
        self.skipped.append(Skipped(what="replay with the recommended scaler", reason=unusable))
        return now, lambda: None, unusable

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
        names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker")
        own = ScalerState(**{name: getattr(settings, name) for name in names})
        return [finding for finding in run_scaler_findings(own, self.request.thresholds) if finding.code not in said]

    def _emitted(self, advice: Advice | None, section: ScalerSection, precision: PrecisionAdvice) -> EmittedSettings:
        """Returns the recommended precision and, for fp16, the settings to use, in a framework's terms."""
        settings, fix = ScalerSettings(), _change_of(self.findings)
        chosen = precision.precision if fix is None else _formats_after(fix, self.ranges.run.precision)[0]
        scaled = advice is not None and chosen == "fp16"
        if advice is not None and scaled:
            kept = not section.change and section.recommended is not None
            settings = advice.current if kept else advice.recommended
        otherwise: Literal["bf16", "fp32"] = "fp32" if chosen in ("fp32", "tf32") else "bf16"
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

    def _say(self, name: str, result: str) -> None:
        self.checks.append(Check(name=name, result=result))
