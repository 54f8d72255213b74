"""Compares one step with the same step in fp32: gradients and updates. Sums up all steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ampdoctor.diagnosis.ranges.departs_in_half import unexplained
from ampdoctor.diagnosis.replay.forward_precision import error_of
from ampdoctor.evidence.of_runs.trace import Birth, Comparison, ModuleUpdate, ParameterBeside, StateBeside, StepOutcome
from ampdoctor.evidence.report import Check, Finding, Skipped
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.numerics import Distance, nonfinite_flag
from ampdoctor.numerics.tensors import together
from ampdoctor.probes.cheap.gradients import GradientProbe
from ampdoctor.probes.cheap.nonfinite import Observation
from ampdoctor.workflows.against_fp32.moves import Kept, State, kept_tensors, last_place

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.probes.cheap.nonfinite import NonFiniteProbe
    from ampdoctor.replay.session import Session

Observed = tuple[Observation, ...]

NEGLIGIBLE = 1e-3
"""A gradient of at most this share of the run's largest is the rounding of a converged loss: fp16's own relative
rounding is 2^-11, so a gradient that still teaches something is not that much smaller than what it came from."""


CHAOS = 4.0
"""A gradient error within this factor of that of rounded weights is rounding; activations are rounded too."""


FP32_ROUNDING = 2.0**-20
"""A move of at most this share of a number is fp32's own rounding of a few terms (2^-24 each): none that is missed."""


SOME = 64
"""Elements of a tensor whose course over the steps is kept."""


AS_FAR = 1.5
"""A chaotic step within this factor of one that was looked at closely is not looked at again. Eight steps of a
ResNet-50 with random weights on four images were 0.75 to 0.78 away from fp32; rounding alone moved them by 0.81."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """The result of the comparison with fp32.

    Attributes:
        findings: The findings of the first sick step; () for a healthy run.
        checks: What was compared.
        skipped: Why fp32 could not be run, if it could not.
        deterministic: Every step came back bit by bit.
        steps: Number of compared steps.
        held: Number of steps at the end that the user's own check of the gradients skips and fp32 takes.
        births: The birth behind each finding, by the finding's fingerprint.
    """

    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    deterministic: bool = True
    steps: int = 0
    held: int = 0
    births: Mapping[str, Birth] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the first replay of a step hands to the comparison.

    Attributes:
        observed: What the non-finite probe saw.
        random_state: The generators after the step's batch was drawn, before the step.
        optimizer_steps: How often an optimizer stepped.
        skipped: The scaler skipped it, or a part of its updates.
    """

    observed: Observed
    random_state: RandomState
    optimizer_steps: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """What a step shows beside fp32.

    Attributes:
        comparison: In numbers; None where there is nothing to compare: a scaler skips it, or fp32 is not finite.
        held: The user's own check of the gradients skips it, and fp32 takes it.
    """

    comparison: Comparison | None = None
    held: bool = False


@dataclass(slots=True)
class Known:
    """What steps that were looked at closely, and in which nothing was found, have shown to be no sickness.

    Attributes:
        explained: A gradient error that rounding alone explains.
        alone: How far single parameters' gradients were from fp32's, by name; `AS_FAR` times that.
        warm_up: What stands still does so at the learning rate of a warm-up, and moves at the one that it comes up to.
    """

    explained: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)
    warm_up: bool = False

    def looks(self, far: Sequence[ParameterBeside]) -> None:
        """These parameters are far from fp32, and nothing was found."""
        for one in far:
            self.alone[one.name] = max(self.alone.get(one.name, 0.0), AS_FAR * error_of(one))


class Passing:
    """Gathers the results of the compared steps.

    Args:
        thresholds: How far from fp32 is far (AMP207).
        comes_back: Steps come back from a snapshot, so that nothing hidden tells them from fp32's.

    Attributes:
        compared: The steps so far that have a gradient to speak of.
        known: What was looked at closely.
    """

    def __init__(self, thresholds: Thresholds, *, comes_back: bool = True) -> None:
        self._comes_back = comes_back
        self.known = Known()
        self.compared: list[Comparison] = []
        self._thresholds = thresholds
        self._steps = 0
        self._worst = 0.0
        self._largest = 0.0
        self._chaotic = 0
        self._at_rest = 0
        self._given = False  # an optimizer was given gradients
        self._doubt: Finding | None = None
        self._held = 0
        self._births: dict[str, Birth] = {}

    def rests_on(self, finding: Finding, birth: Birth) -> Finding:
        """Remember the birth that a finding is about; returns the finding."""
        self._births[finding.fingerprint] = birth
        return finding

    def leaves_out(self, outcome: StepOutcome, reference: StepOutcome, sentinel: NonFiniteProbe) -> bool:
        """Does the scaler, or the user's own check of the gradients, skip the step? Then there is no update to compare.

        Args:
            outcome: The step's outcome.
            reference: The outcome of the step in fp32.
            sentinel: The probe that watched the step.
        """
        left_out = outcome.loses_updates
        if overflowed(sentinel) and not left_out and outcome.optimizer_steps < reference.optimizer_steps:
            self._held += 1
            return True
        return left_out

    def passes(self, beside: Beside) -> None:
        """Count a step that was compared while it was replayed, and in which no rule sees anything."""
        self._held += beside.held
        if beside.comparison is not None:
            self.add(beside.comparison)

    def looked_at(self, comparison: Comparison, rounding: float) -> None:
        """Learn from a step that was looked at closely, and in which no rule sees anything.

        Args:
            comparison: The step's comparison.
            rounding: How far rounding alone moves fp32's gradients in it.
        """
        if comparison.gradient_error <= CHAOS * rounding:
            self.known.explained = max(self.known.explained, min(CHAOS * rounding, AS_FAR * comparison.gradient_error))

    def add(self, comparison: Comparison) -> None:
        """Count a step; if its gradients are far from fp32's and not negligible, remember to report it."""
        self._steps += 1
        self._held = 0
        self._largest = max(self._largest, comparison.gradient_norm)
        self._at_rest += is_at_rest(comparison)
        self._given |= bool(comparison.parameters)
        if comparison.gradient_norm < NEGLIGIBLE * self._largest:
            return  # converged: what is left of the gradient is rounding
        self.compared.append(comparison)
        self._worst = max(self._worst, comparison.gradient_error)
        doubt = unexplained(comparison, self._thresholds, comes_back=self._comes_back)
        if comparison.gradient_error > self.known.explained:
            self._doubt = self._doubt or doubt
        elif doubt is not None:
            self._chaotic += 1

    def ended(
        self, findings: tuple[Finding, ...] = (), *, cut: str | None = None, deterministic: bool = True
    ) -> ReferencePass:
        """Returns the result; the doubt is a finding only if nothing clearer was found: a note is about less."""
        clear = any(finding.severity != "note" for finding in findings)
        doubt = (self._doubt,) if self._doubt is not None and not clear else ()
        worst = {"largest_gradient_error": self._worst} if self._steps else {}
        chaotic = {"steps_as_far_by_rounding_alone": self._chaotic} if self._chaotic else {}
        at_rest = {"steps_at_rest_in_fp32": self._at_rest} if self._at_rest else {}  # of updates they show nothing
        rising = {"moves_at_the_full_learning_rate": True} if self.known.warm_up else {}
        check = Check(
            name="gradients and updates agree with fp32",
            result=self._result(sick=bool(findings or doubt)),
            headroom={"steps": self._steps, **worst, **chaotic, **at_rest, **rising},
        )
        skipped = (Skipped(what="comparison with fp32", reason=cut),) if cut is not None else ()
        return ReferencePass(
            findings=(*findings, *doubt),
            checks=(check,),
            skipped=skipped,
            deterministic=deterministic,
            steps=self._steps,
            held=self._held,
            births=self._births,
        )

    def _result(self, *, sick: bool) -> str:
        if sick:
            return "found"
        if not self._steps:
            return "not_run"
        if self._largest:
            return "ok"
        missing = "fp32 has no gradient either" if self._given else "no optimizer was given a gradient"
        return f"nothing to compare: {missing}"


def is_at_rest(comparison: Comparison) -> bool:
    """Does fp32 move no parameter in the step, as with a learning rate of 0?"""
    return bool(comparison.parameters) and not any(p.meant_to_move for p in comparison.parameters)


def overflowed(sentinel: NonFiniteProbe) -> bool:
    """Was a gradient that an optimizer uses not finite?"""
    return any(sink.startswith("grad:") for sink in sentinel.sightings.sinks)


def all_finite(probe: GradientProbe) -> bool:
    """Is every gradient of the step finite?"""
    return all(math.isfinite(float(nonfinite_flag(gradient))) for gradient in probe.gradients.values())


def stepped(session: Session, step: int) -> tuple[GradientProbe, StepOutcome]:
    """Replay a step; returns its gradients and its outcome."""
    probe = GradientProbe()
    with session.watched(probe):
        return probe, session.step(step)


def compared(
    session: Session,
    step: int,
    outcomes: tuple[StepOutcome, StepOutcome],
    apart: Mapping[str, Distance],
    moves: tuple[Kept, Kept, Kept],
) -> Comparison:
    """Returns a step and its twin in fp32 as numbers.

    Args:
        session: The session, after either.
        step: The step's number.
        outcomes: The outcomes of the run and of fp32.
        apart: How far the gradients that the optimizer got are from fp32's, by name.
        moves: What is kept, as it was before the step, and how it moved, in the run and in fp32.
    """
    total, (before, here, there) = together(apart.values()), moves
    return Comparison(
        step=step,
        loss=outcomes[0].loss,
        reference_loss=outcomes[1].loss,
        gradient_error=total.relative,
        gradient_ratio=math.sqrt(total.norm / total.reference) if total.reference else 1.0,
        gradient_norm=math.sqrt(total.reference),
        zeroed=total.flushed / total.nonzero if total.nonzero else 0.0,
        zeroed_share=total.flushed_error / total.error if total.error else 0.0,
        updates=_updates(session, here.half, there.half),
        parameters=tuple(_beside(apart, before.trained, here.trained, there.trained)),
        states=tuple(_states(before, here, there)),
        events=outcomes[0].events,
    )


def _beside(apart: Mapping[str, Distance], before: State, here: State, there: State) -> Iterator[ParameterBeside]:
    """Yields what each parameter that an optimizer holds got, and how it moved, in the order of fp32's gradients."""
    for name, distance in apart.items():
        if name not in here or name not in there:
            continue
        meant, done = there[name], here[name]
        moves, half_units = meant != 0, last_place(before[name]).double() / 2
        still = not bool(done.any())
        yield ParameterBeside(
            name=name,
            gradient=_root(distance.norm),
            expected=_root(distance.reference),
            error=_root(distance.error),
            flushed_error=_root(distance.flushed_error),
            nonzero=distance.nonzero,
            flushed=distance.flushed,
            looked_at=meant.numel(),
            moved=int((done != 0).sum()),
            meant_to_move=int(moves.sum()),
            stalled=int((moves & (done == 0)).sum()),
            beneath=int((moves & (meant.abs() <= half_units)).sum()),
            update=float(done.norm()),
            expected_update=float(meant.norm()),
            rounding=float(half_units.norm()),
            course=_some(meant / half_units) if still else (),
        )


def _states(before: Kept, here: Kept, there: Kept) -> Iterator[StateBeside]:
    """Yields how what no optimizer trains has moved, where it did in fp32."""
    for (kind, name), old in before.states.items():
        named = (kind, name)
        if named not in here.states or named not in there.states:
            continue
        meant = there.states[named]
        moves = meant.abs() > FP32_ROUNDING * old.double().abs()
        if not moves.any():
            continue
        yield StateBeside(
            name=name,
            kind=kind,
            dtype=str(old.dtype).removeprefix("torch."),
            looked_at=meant.numel(),
            moved=int((here.states[named] != 0).sum()),
            meant_to_move=int(moves.sum()),
            value=float(old.abs().max()),
            course=_some(torch.where(moves, meant, 0.0) / (last_place(old).double() / 2)),
        )


def _some(values: torch.Tensor) -> tuple[float, ...]:
    """Returns some of the elements, the same ones each time."""
    return tuple(values[:: max(1, -(-values.numel() // SOME))].tolist())


def _root(squares: float) -> float:
    return math.sqrt(squares) if squares >= 0.0 else math.nan


def _updates(session: Session, here: State, there: State) -> tuple[ModuleUpdate, ...]:
    """Returns the updates of the tensors that are kept in a half format, by owning module."""
    trained = {id(p) for o in session.optimizers.values() for g in o.param_groups for p in g["params"]}
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, tensor in kept_tensors(session):
        if name in there and name in here:
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
