"""Which finding a recommendation makes, and the change that goes with it, replayed where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ampdoctor.diagnosis import range_rules as rules
from ampdoctor.evidence.report import Finding, Prescription, PrescriptionKind
from ampdoctor.workflows.profile import range_findings
from ampdoctor.workflows.shadow import Change, Observed, both, observe, scaler
from ampdoctor.workflows.trials import compute_dtype, first_cure, fp32_modules

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.scaling.measured import Measured
    from ampdoctor.workflows.advising import Advice
    from ampdoctor.workflows.measuring import Measurement

TRIED_STEPS = 8
"""Steps of a replay that only has to show that another precision cures."""


class Replays(Protocol):
    """What a trial needs of the replays: a Protocol, because the workflow that owns them is above this file."""

    @property
    def session(self) -> Session:
        """The run."""

    @property
    def start(self) -> Snapshot:
        """Its state at step 0."""

    @property
    def taken(self) -> Measurement:
        """What was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is known after the replays, and what follows.

    Attributes:
        now: The replay with the run's own scaling; None for a profile file.
        then: The replay with the recommended scaler; None where it cannot be had.
        change: The recommended scaler is better.
        unusable: Why the recommended scaler could not be replayed.
        no_scale: No loss scale is to be recommended at all.
        findings: What is wrong.
    """

    now: Observed | None
    then: Observed | None
    change: bool
    unusable: str | None
    no_scale: bool = False
    findings: list[Finding] = field(default_factory=list)


def judge(measured: Measured, advice: Advice, judgement: Judgement, replays: Replays | None) -> Judgement:
    """Add the findings, the first class that holds: forward, no valid scale, too high, underflow; then what is worth saying."""
    now = judgement.now
    trial = _Trial(advice, judgement, replays)
    forward = now.harmed if now is not None and now.harmed is not None and now.harmed != "scaler" else None
    if forward is not None and not forward.startswith("grad:") and not _backward_first(advice):
        found = rules.forward_range(advice.large, broken=forward, step=now.harmed_at if now else None,
                                    prescription=trial.forward())
        return replace(judgement, change=False, no_scale=True, findings=[found])
    findings = []
    if advice.large:
        findings.append(rules.forward_range(advice.large, broken=None, step=None, prescription=trial.islands()))
    stuck = now is not None and not now.settled
    if advice.choice.exponent < 0 and measured.profile.base_scale == 1.0:
        step = _last_bad(now)
        findings.append(rules.no_valid_scale(advice.recommended.scale, bound_by=advice.choice.bound_by, stuck=stuck,
                                             step=step, prescription=trial.bf16()))
        return replace(judgement, findings=findings, change=judgement.change)
    if stuck:
        findings.append(_too_high(advice, judgement, trial))
    elif now is None:
        findings += _expected(measured, advice, judgement, trial)
    elif judgement.change:
        found_underflow = rules.underflow_seen(now.shares(), _shares(judgement.then), advice.now.scale, trial.scaler())
        findings += [] if found_underflow is None else [found_underflow]
    if advice.choice.fp32_modules:
        choice = advice.choice
        findings.append(rules.no_common_scale(choice.fp32_modules, choice.share, 2.0**choice.exponent, trial.stabbed()))
    return replace(judgement, findings=findings)


def _backward_first(advice: Advice) -> bool:
    """The loss or the state broke because an earlier backward overflowed, unskipped: the profile foresees that."""
    return bool(advice.now.skipped) and not advice.large


def _last_bad(now: Observed | None) -> int | None:
    if now is None:
        return None
    return now.harmed_at if now.harmed_at is not None else max(now.skipped, default=None)


def _shares(then: Observed | None) -> dict[str, float] | None:
    return then.shares() if then is not None and then.relative_error is not None else None


def _too_high(advice: Advice, judgement: Judgement, trial: _Trial) -> Finding:
    now = judgement.now
    step = _last_bad(now) or 0
    scale = now.scales[step] if now is not None and step < len(now.scales) else advice.current.scale
    return rules.scale_too_high(
        scale, advice.recommended.scale, step=step, harmed=now.harmed if now is not None else None,
        bound_by=advice.choice.bound_by, prescription=trial.scaler(),
    )


def _expected(measured: Measured, advice: Advice, judgement: Judgement, trial: _Trial) -> Iterator[Finding]:
    """Without a replay: what the histograms and the simulated scaler say."""
    if not advice.now.settled:
        yield _too_high(advice, judgement, trial)
        return
    for finding in range_findings(measured):
        yield replace(finding, prescription=trial.scaler()) if judgement.change else finding


class _Trial:
    """Prescriptions, each replayed where there is a run to replay."""

    def __init__(self, advice: Advice, judgement: Judgement, replays: Replays | None) -> None:
        self._advice = advice
        self._judgement = judgement
        self._replays = replays

    def scaler(self) -> Prescription:
        """The recommended scaler, as it was replayed; bf16 where that does not cure."""
        settings = self._advice.recommended
        detail = f"GradScaler(init_scale={settings.scale:g})"
        then = self._judgement.then
        fresh = self._advice.current.growth_interval == 0  # no scaler, or a fixed scale
        kind: PrescriptionKind = "scaler" if fresh else "init_scale"
        value = settings.arguments() if fresh else settings.scale
        if then is None:
            return Prescription(kind=kind, value=value, status="not_run", reason=self._judgement.unusable, detail=detail)
        status, reason = then.status(skips=self._advice.then.skipped)
        made = Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail)
        if made.verified:
            return made
        return self._first(iter([lambda: made, self._in_bf16]))

    def bf16(self) -> Prescription:
        """bf16 first; the scale below 1 as the other way."""
        below = replace(self.scaler(), alternatives=())
        first = self._in_bf16()
        return replace(first, alternatives=(below,)) if below.kind != "dtype" else first

    def forward(self) -> Prescription:
        """The modules whose activations are too large in fp32, else everything in bf16."""
        tried: list[Callable[[], Prescription]] = [self.islands] if self._advice.large else []
        return self._first(iter([*tried, self._in_bf16]))

    def islands(self) -> Prescription:
        """The modules with large activations in fp32."""
        names = sorted(name for name in self._advice.large if name)
        if not names:
            return self._in_bf16()
        return self._try("fp32_modules", names, fp32_modules(names), f"run {', '.join(names)} in fp32")

    def stabbed(self) -> Prescription:
        """The modules that no scale serves in fp32, the rest at the best scale; bf16 where they are many."""
        choice = self._advice.choice
        names = [name for name in choice.fp32_modules if name]
        if not names or len(names) < len(choice.fp32_modules) or choice.share > rules.MOSTLY:
            return self._in_bf16()
        detail = f"run {', '.join(names)} in fp32, with GradScaler(init_scale={choice.settings.scale:g})"
        return self._try("fp32_modules", names, both(scaler(choice.settings), fp32_modules(names)), detail)

    def _in_bf16(self) -> Prescription:
        return self._try("dtype", "bfloat16", compute_dtype("bf16"), "train in bf16, without a GradScaler")

    def _try(self, kind: PrescriptionKind, value: object, change: Change, detail: str) -> Prescription:
        replays = self._replays
        if replays is None:
            return Prescription(kind=kind, value=value, status="not_run", reason=self._judgement.unusable, detail=detail)
        steps = min(replays.taken.ranges.steps, TRIED_STEPS)
        status, reason = observe(replays.session, replays.start, steps, replays.taken.plan, change).status()
        return Prescription(kind=kind, value=value, status=status, reason=reason, detail=detail)

    @staticmethod
    def _first(attempts: Iterator[Callable[[], Prescription]]) -> Prescription:
        made = first_cure(attempt() for attempt in attempts)
        if made is None:
            raise AssertionError("there is always bf16 to try")
        return made
