"""Sickness that stays finite: the same steps in fp32, from the same states, compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ampdoctor.diagnosis.causes import departing
from ampdoctor.diagnosis.findings import finding_of_birth, nondeterministic_finding
from ampdoctor.diagnosis.silent_rules import (
    deserves_a_look,
    misuse,
    stagnation_finding,
    stagnations,
    underflow,
    underflow_finding,
    unexplained,
)
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Check, Finding, Prescription, Severity, Skipped
from ampdoctor.evidence.trace import Comparison, ModuleUpdate, StepOutcome, Trace
from ampdoctor.probes.gradients import GradientProbe, Gradients, relative_error
from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.snapshot import RandomState, adopt_state
from ampdoctor.workflows import trials as change
from ampdoctor.workflows.prescribing import prescribe, underflow_cure
from ampdoctor.workflows.trials import Trials

if TYPE_CHECKING:
    from ampdoctor.diagnosis.silent_rules import Stagnation
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

State = Mapping[str, torch.Tensor]
Observed = tuple[tuple[str, float], ...]

NEGLIGIBLE = 1e-3
"""A gradient that is this share of the run's largest is what rounding leaves of a converged loss: fp16's own relative
rounding is 2^-11, so nothing that is still learned is as small beside what it came from."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """What the comparison with fp32 gave.

    Attributes:
        findings: Of the first step that is sick; () for a healthy run.
        checks: What was compared.
        skipped: Why fp32 could not be run, where it could not.
        deterministic: Every step came back bit by bit.
    """

    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the first replay of a step left for the comparison.

    Attributes:
        observed: What the non-finite probe saw.
        random_state: The generators after the step's batch was drawn, before the step.
        optimizer_steps: How often an optimizer stepped.
    """

    observed: Observed
    random_state: RandomState
    optimizer_steps: int


def compare_with_fp32(
    session: Session, start: Snapshot | None, seen: Sequence[Replayed], fresh: Callable[[], Session]
) -> ReferencePass:
    """Replay the steps once more, each beside fp32, and stop at the first that is sick.

    Where a step does not come back from a snapshot (a counter or a generator of the user's own), two fresh runs are
    stepped side by side instead.

    Args:
        session: The session, in any state.
        start: The state before step 0; None where it is known that snapshots do not bring a step back.
        seen: The steps as they were replayed first.
        fresh: Makes another session from the factory.
    """
    if start is None:
        return _compare_fresh_runs(session, seen, fresh)
    start.restore()
    passing = _Passing()
    for step, first in enumerate(seen):
        if not session.has_step(step):  # drawn anew where the batches were too large to be kept
            break
        session.keep_steps(lambda earlier, now=step: earlier >= now)  # type: ignore[misc]
        first.random_state.restore()
        before = session.snapshot()
        try:
            pair = _Pair.replayed(session, before, step)
        except AmpdoctorError as error:
            return passing.ended(cut=f"from step {step} on the run cannot be replayed in fp32: {error}")
        if pair is None:
            continue
        if first_difference(first.observed, pair.observed) is not None or pair.steps != (first.optimizer_steps,) * 2:
            return _compare_fresh_runs(session, seen, fresh)
        passing.add(pair.comparison)
        findings = _examine(session, before, pair, len(seen))
        if findings:
            return passing.ended(findings)
    return passing.ended()


def _compare_fresh_runs(session: Session, seen: Sequence[Replayed], fresh: Callable[[], Session]) -> ReferencePass:
    """One fresh run steps as the user's does; another takes each step in fp32, from the first one's state.

    What no snapshot holds moves on once a step in both. Nothing is traced or tried here: no step can be run again.
    """
    passing = _Passing()
    sentinel = NonFiniteProbe()
    with ExitStack() as stack:
        here, there = (stack.enter_context(_counted(session, fresh())) for _ in range(2))
        there.tape = here.tape
        with here.watched(sentinel):
            for step, first in enumerate(seen):
                if not here.has_step(step):
                    break
                here.keep_steps(lambda earlier, now=step: earlier >= now)  # type: ignore[misc]
                first.random_state.restore()
                try:
                    comparison = _side_by_side(here, there, step)
                except AmpdoctorError as error:
                    return passing.ended(cut=f"from step {step} on the run cannot be replayed in fp32: {error}")
                differs = first_difference(first.observed, sentinel.observed)
                if differs is not None:
                    return passing.ended((nondeterministic_finding(step, *differs),), deterministic=False)
                if comparison is not None:
                    passing.add(comparison)
                    wrong_use = misuse(comparison)
                    stuck = [stagnation_finding(step, stagnation) for stagnation in stagnations(comparison)]
                    if wrong_use is not None or stuck:
                        return passing.ended((wrong_use,) if wrong_use is not None else tuple(stuck))
    return passing.ended()


@contextmanager
def _counted(session: Session, other: Session) -> Iterator[Session]:
    """A session that is closed afterwards, and whose replays count as those of the first."""
    try:
        yield other
    finally:
        session.replays += other.replays
        other.close()


def _side_by_side(here: Session, there: Session, step: int) -> Comparison | None:
    adopt_state(there, here)
    values = _state(here)
    random_state = RandomState.capture()
    probe, outcome = _step(here, step)
    moved = _moved(here, values)
    after = RandomState.capture()
    random_state.restore()
    with there.reference():
        wide, reference = _step(there, step)
        meant = _moved(there, values)
    after.restore()
    if outcome.skipped or not _all_finite(wide):
        return None
    return _compare(here, step, (outcome, reference), (probe.gradients, wide.gradients), (moved, meant))


class _Passing:
    """Gathers what the comparison of the steps gives."""

    def __init__(self) -> None:
        self._steps = 0
        self._worst = 0.0
        self._largest = 0.0
        self._doubt: Finding | None = None

    def add(self, comparison: Comparison) -> None:
        """Count a step; where its gradients are far from fp32's and not negligible, remember to say so."""
        self._steps += 1
        self._largest = max(self._largest, comparison.gradient_norm)
        if comparison.gradient_norm < NEGLIGIBLE * self._largest:
            return  # converged: what is left of the gradient is rounding
        self._worst = max(self._worst, comparison.gradient_error)
        self._doubt = self._doubt or unexplained(comparison)

    def ended(
        self, findings: tuple[Finding, ...] = (), *, cut: str | None = None, deterministic: bool = True
    ) -> ReferencePass:
        """The pass, with a doubt only where nothing clearer was found."""
        doubt = (self._doubt,) if self._doubt is not None and not findings else ()
        check = Check(
            name="gradients and updates agree with fp32",
            result="found" if findings or doubt else "ok" if self._steps else "not_run",
            headroom={"steps": self._steps, "largest_gradient_error": self._worst},
        )
        skipped = (Skipped(what="comparison with fp32", reason=cut),) if cut is not None else ()
        return ReferencePass(
            findings=(*findings, *doubt), checks=(check,), skipped=skipped, deterministic=deterministic
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A step and its twin in fp32."""

    comparison: Comparison
    after: Snapshot
    observed: Observed
    steps: tuple[int, int]
    """How often an optimizer stepped, here and in fp32."""

    @classmethod
    def replayed(cls, session: Session, before: Snapshot, step: int) -> _Pair | None:
        """Run both; the session is left after the step. None where the scaler skips it, or fp32 is not finite."""
        values = _state(session)
        sentinel = NonFiniteProbe()
        with session.watched(sentinel):
            probe, outcome = _step(session, step)
        after = session.snapshot()
        if outcome.skipped:
            return None
        here = _moved(session, values)
        before.restore()
        with session.reference():
            wide, reference = _step(session, step)
            there = _moved(session, values)
        after.restore()
        if not _all_finite(wide):
            return None
        comparison = _compare(session, step, (outcome, reference), (probe.gradients, wide.gradients), (here, there))
        return cls(comparison, after, sentinel.observed, (outcome.optimizer_steps, reference.optimizer_steps))


def _all_finite(probe: GradientProbe) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in probe.gradients.values())


def _step(session: Session, step: int) -> tuple[GradientProbe, StepOutcome]:
    probe = GradientProbe()
    with session.watched(probe):
        return probe, session.step(step)


def _state(session: Session) -> dict[str, torch.Tensor]:
    names = session.parameter_names()
    state = {names[id(p)]: p.detach().clone() for p in session.model.parameters()}
    state.update({name: b.detach().clone() for name, b in session.model.named_buffers() if b.is_floating_point()})
    return state


def _moved(session: Session, before: State) -> dict[str, torch.Tensor]:
    return {name: now.double() - before[name].double() for name, now in _state(session).items() if name in before}


def _compare(
    session: Session,
    step: int,
    outcomes: tuple[StepOutcome, StepOutcome],
    gradients: tuple[Gradients, Gradients],
    moves: tuple[State, State],
) -> Comparison:
    got, expected = gradients
    error = zeroed_error = norm = reference_norm = 0.0
    zeroed = nonzero = 0
    for name, gradient in expected.items():
        reference = gradient.double()
        actual = got[name].double() if name in got else torch.zeros_like(reference)
        flushed = (actual == 0) & (reference != 0)
        error += float((actual - reference).square().sum())
        zeroed_error += float(reference[flushed].square().sum())
        norm += float(actual.square().sum())
        reference_norm += float(reference.square().sum())
        zeroed += int(flushed.sum())
        nonzero += int((reference != 0).sum())
    return Comparison(
        step=step,
        loss=outcomes[0].loss,
        reference_loss=outcomes[1].loss,
        gradient_error=relative_error(got, expected),
        gradient_ratio=math.sqrt(norm / reference_norm) if reference_norm else 1.0,
        gradient_norm=math.sqrt(reference_norm),
        zeroed=zeroed / nonzero if nonzero else 0.0,
        zeroed_share=zeroed_error / error if error else 0.0,
        updates=_updates(session, *moves),
        events=outcomes[0].events,
    )


def _updates(session: Session, here: State, there: State) -> tuple[ModuleUpdate, ...]:
    """By owning module, of the tensors that are kept in a half format."""
    trained = {id(p) for o in session.optimizers.values() for g in o.param_groups for p in g["params"]}
    names = session.parameter_names()
    tensors = [(names[id(p)], p) for p in session.model.parameters()] + list(session.model.named_buffers())
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, tensor in tensors:
        if tensor.dtype in (torch.float16, torch.bfloat16) and name in there and name in here:
            groups[name.rpartition(".")[0], id(tensor) in trained].append(name)
    updates = []
    for (module, is_trained), members in groups.items():
        moved = sum(int((there[n] != 0).sum()) for n in members)
        stalled = sum(int(((there[n] != 0) & (here[n] == 0)).sum()) for n in members)
        norm = sum(float(there[n].square().sum()) for n in members)
        lost = sum(float((there[n] - here[n]).square().sum()) for n in members)
        updates.append(
            ModuleUpdate(
                module=module,
                tensors=tuple(members),
                moved=moved,
                stalled=stalled,
                size=math.sqrt(norm),
                lost=math.sqrt(lost / norm) if norm else 0.0,
                trained=is_trained,
            )
        )
    return tuple(updates)


def _examine(session: Session, before: Snapshot, pair: _Pair, steps: int) -> tuple[Finding, ...]:
    """The rules, the first that holds; the session is left after the step."""
    comparison = pair.comparison
    wrong_use = misuse(comparison)
    if wrong_use is not None:
        return (wrong_use,)
    findings: list[Finding] = []
    try:
        severity = underflow(comparison)
        trials = Trials(session, before, comparison.step, steps)
        if deserves_a_look(comparison):
            trace = _traced(session, before, comparison.step, flushes=severity is not None)
            births = departing(trace)
            if severity is not None and trace.flushes:
                findings.append(
                    replace(_underflow(comparison, trace, severity), prescription=underflow_cure(trials, session))
                )
            elif births:
                cure = prescribe(births[0], "forward_overflow", trials, session)
                findings.append(
                    finding_of_birth(births[0], cause="forward_overflow", prescription=cure, others=births[1:])
                )
        for stagnation in stagnations(comparison):
            cure = _stagnation_cure(session, before, comparison.step, stagnation)
            findings.append(replace(stagnation_finding(comparison.step, stagnation), prescription=cure))
    finally:
        pair.after.restore()
    return tuple(findings)


def _traced(session: Session, before: Snapshot, step: int, *, flushes: bool = False) -> Trace:
    tracer = OpTraceProbe(flushes=flushes)
    before.restore()
    with session.watched(tracer):
        session.step(step)
    if tracer.trace is None:
        raise AssertionError("a finished step leaves a trace")
    return tracer.trace


def _underflow(comparison: Comparison, trace: Trace, severity: Severity) -> Finding:
    """At the first op of the backward that flushes most of its result, else at the one that flushes the most."""
    flushes = trace.flushes
    first = next((f for f in flushes if f.fraction > 0.5), max(flushes, key=lambda f: f.fraction))
    return underflow_finding(comparison, first.where, severity, first.fraction)


def _stagnation_cure(session: Session, before: Snapshot, step: int, stagnation: Stagnation) -> Prescription:
    """fp32 for the modules that stagnate: does what moves in fp32 move now?"""
    modules = [stagnation.module] if stagnation.module else [update.module for update in stagnation.updates]
    whole = stagnation.trained
    tried = change.compute_dtype("fp32") if whole else change.fp32_modules(modules)
    detail = "keep fp32 master weights" if whole else f"keep {', '.join(modules)} in fp32"
    before.restore()
    values = _state(session)
    with tried(session):
        _step(session, step)
        moved = _moved(session, values)
    names = [name for update in stagnation.updates for name in update.tensors]
    expected = sum(update.moved for update in stagnation.updates)
    now = sum(int((moved[name] != 0).sum()) for name in names)
    cured = now > 0.9 * expected
    return Prescription(
        kind="dtype" if whole else "fp32_modules",
        value="float32" if whole else modules,
        status="verified" if cured else "failed",
        detail=detail,
        reason=None if cured else f"{now} of {expected} elements move with it",
    )
