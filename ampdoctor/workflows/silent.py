"""Sickness that stays finite: the same steps in fp32, from the same states, compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
)
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Check, Finding, Prescription, Skipped
from ampdoctor.evidence.trace import Comparison, ModuleUpdate, StepOutcome, Trace
from ampdoctor.evidence.where import Where
from ampdoctor.probes.gradients import GradientProbe, Gradients, relative_error
from ampdoctor.probes.nonfinite import NonFiniteProbe, first_difference
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.workflows import trials as change
from ampdoctor.workflows.prescribing import prescribe, underflow_cure
from ampdoctor.workflows.trials import Trials

if TYPE_CHECKING:
    from ampdoctor.diagnosis.silent_rules import Stagnation
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

State = Mapping[str, torch.Tensor]
Observed = tuple[tuple[str, float], ...]


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


def compare_with_fp32(session: Session, start: Snapshot, seen: Sequence[Observed]) -> ReferencePass:
    """Replay the steps once more, each beside fp32, and stop at the first that is sick.

    Args:
        session: The session, in any state.
        start: The state before step 0.
        seen: What the non-finite probe observed in each step when it was replayed first.
    """
    start.restore()
    steps = len(seen)
    noise: list[Finding] = []
    worst = 0.0
    compared = 0
    for step in range(steps):
        before = session.snapshot()
        try:
            pair = _Pair.replayed(session, before, step)
        except AmpdoctorError as error:
            reason = f"the run cannot be replayed in fp32: {error}"
            return ReferencePass(findings=tuple(noise), skipped=(Skipped(what="comparison with fp32", reason=reason),))
        if pair is None:
            continue
        differs = first_difference(seen[step], pair.observed)
        if differs is not None and not noise:
            noise.append(nondeterministic_finding(step, *differs))
        compared += 1
        worst = max(worst, pair.comparison.gradient_error)
        findings = _examine(session, before, pair, steps)
        if findings:
            return ReferencePass(
                findings=(*findings, *noise), checks=(_check(compared, worst, "found"),), deterministic=not noise
            )
    return ReferencePass(findings=tuple(noise), checks=(_check(compared, worst, "ok"),), deterministic=not noise)


def _check(compared: int, worst: float, result: str) -> Check:
    return Check(
        name="gradients and updates agree with fp32",
        result=result,
        headroom={"steps": compared, "largest_gradient_error": worst},
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A step and its twin in fp32."""

    comparison: Comparison
    after: Snapshot
    observed: Observed

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
        if any(not bool(torch.isfinite(g).all()) for g in wide.gradients.values()):
            return None
        comparison = _compare(session, step, (outcome, reference), (probe.gradients, wide.gradients), (here, there))
        return cls(comparison, after, sentinel.observed)


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
        if severity is not None:
            trace = _traced(session, before, comparison.step, flushes=True)
            findings.append(
                replace(_underflow(comparison, trace, severity), prescription=underflow_cure(trials, session))
            )
        elif deserves_a_look(comparison):
            trace = _traced(session, before, comparison.step)
            births = departing(trace)
            if births:
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


def _underflow(comparison: Comparison, trace: Trace, severity: str) -> Finding:
    """At the first op of the backward that flushes most of its result, else at the one that flushes the most."""
    flushes = trace.flushes
    first = next((f for f in flushes if f.fraction > 0.5), max(flushes, key=lambda f: f.fraction, default=None))
    where = first.where if first is not None else Where(step=comparison.step, phase="backward")
    return underflow_finding(comparison, where, severity, first.fraction if first is not None else None)  # type: ignore[arg-type]


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
