"""Compares one step with the same step in fp32: gradients, updates, and the state that the run keeps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.forward import error_of, unexplained
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Check, Finding, Skipped
from ampdoctor.evidence.report_replay import FP32_CHECK, NOT_COMPARED, ReplayedStep
from ampdoctor.evidence.trace import (
    Comparison,
    ModuleUpdate,
    NonFiniteOrigin,
    ParameterVsFp32,
    StateVsFp32,
    StepOutcome,
)
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.numerics.tensors import Distance, extremes_of_all, to_host, together
from ampdoctor.precision.casting import REDUCED
from ampdoctor.probes.gradients import DistanceProbe, GradientProbe
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.probes.nonfinite import Observation
from ampdoctor.probes.ops import Probe
from ampdoctor.probes.ranges import ReferenceGradients, ZeroedProbe
from ampdoctor.workflows.changes import Change, no_change
from ampdoctor.workflows.trials import replayed

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import StateKind
    from ampdoctor.probes.formats_seen import FormatsProbe
    from ampdoctor.probes.nonfinite import NonFiniteProbe
    from ampdoctor.probes.ranges import Zeroed
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


State = Mapping[str, torch.Tensor]
Named = tuple["StateKind", str]
"""Kind of state, and its name."""

SAMPLE = 1 << 16
"""Elements of a tensor whose moves are measured; of a larger tensor, evenly spread blocks."""
_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class StateCopy:
    """What a run keeps from step to step, or how far it has moved; tensors by name."""

    half: State = field(default_factory=dict)  # parameters and buffers in a half format, which may stand still
    trained: State = field(default_factory=dict)  # a flat sample of each parameter that an optimizer holds
    states: Mapping[Named, torch.Tensor] = field(default_factory=dict)  # flat samples of untrained half state


def kept(session: Session) -> StateCopy:
    """Returns copies of what a run keeps."""
    half = {n: t.detach().clone() for n, t in kept_tensors(session) if t.dtype in REDUCED}
    states = {named: sample(t).clone() for named, t in states_of(session) if t.dtype in REDUCED}
    return StateCopy(half, {name: sample(t).clone() for name, t in held(session)}, states)


def moved(session: Session, before: StateCopy) -> StateCopy:
    """Returns how far each tensor has moved since `before`, in float64."""
    now, trained = dict(kept_tensors(session)), dict(held(session)) if before.trained else {}
    states = dict(states_of(session)) if before.states else {}
    return StateCopy(
        {name: now[name].detach().double() - old.double() for name, old in before.half.items() if name in now},
        {n: sample(trained[n]).double() - old.double() for n, old in before.trained.items() if n in trained},
        {n: sample(states[n]).double() - old.double() for n, old in before.states.items() if _same(states, n, old)},
    )


def states_of(session: Session) -> Iterator[tuple[Named, torch.Tensor]]:
    """Yields untrained state: the model's, optimizer state of one element, and that of the run's own code."""
    trained = {id(p) for _, p in held(session)}
    known = {id(p) for p in session.model.parameters()} | {id(b) for b in session.model.buffers()}
    for name, tensor in kept_tensors(session):
        if id(tensor) in known and id(tensor) not in trained:
            yield ("buffer", name), tensor
    names = session.parameter_names()
    for optimizer in session.optimizers.values():
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    yield ("counter", f"optimizer:{names.get(id(parameter), '')}.{key}"), value
    known |= trained
    yield from ((("own", name), tensor) for name, tensor in session.own_state() if id(tensor) not in known)


def _same(states: Mapping[Named, torch.Tensor], name: Named, old: torch.Tensor) -> bool:
    return name in states and sample(states[name]).shape == old.shape


def kept_tensors(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for what a run keeps; an fp32 master counts in place of its half copy."""
    names = session.parameter_names()
    master = session.master_weights.of if session.master_weights else _master_weights_by_hand(session)
    yield from ((names[id(p)], master(p)) for p in session.model.parameters())
    for name, buffer in session.model.named_buffers():
        if buffer.is_floating_point():
            yield session.clean_name(name), buffer


def _master_weights_by_hand(session: Session) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from a half parameter to the fp32 master, or its part of a flat one, or to itself."""
    own = {id(p) for p in session.model.parameters()}
    held = [*optimizer_parameters(session)]
    others, trained = [p for p in held if id(p) not in own], {id(p) for p in held}
    flat: list[torch.Tensor] = [p for p in others if p.dim() == 1]
    at: dict[int, int] = dict(_places(p for p in session.model.parameters() if id(p) not in trained)) if flat else {}

    def master(half: torch.Tensor) -> torch.Tensor:
        if id(half) in trained:
            return half
        parts = (p[at[id(half)] :][: half.numel()] for p in flat if at[id(half)] + half.numel() <= p.numel())
        for one in (*(p for p in others if p.shape == half.shape), *(p.view(half.shape) for p in parts)):
            if half.detach().equal(one.detach().to(half)):  # master weights may lie on the CPU
                return one
        return half

    return master


def _places(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    at = 0
    for parameter in parameters:
        yield id(parameter), at
        at += parameter.numel()


def held(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for the parameters that an optimizer holds."""
    names = session.parameter_names()
    yield from ((names[id(p)], p) for p in optimizer_parameters(session) if id(p) in names)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view or copy of a tensor's elements: all of them, or `SAMPLE`, the same ones each time."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= SAMPLE:
        return flat
    size = SAMPLE // _BLOCKS
    return torch.stack([flat[at : at + size] for at in _starts(flat.numel(), size)]).reshape(-1)


def _starts(elements: int, size: int) -> Iterator[int]:
    return ((elements - size) * block // (_BLOCKS - 1) for block in range(_BLOCKS))


def last_place(values: torch.Tensor) -> torch.Tensor:
    """Returns the unit in the last place of each element in its own format, as fp32."""
    info = torch.finfo(values.dtype)
    exponent = torch.frexp(values.float()).exponent
    unit = torch.ldexp(torch.full_like(exponent, info.eps, dtype=torch.float32), exponent - 1)
    return unit.clamp_min(info.smallest_normal * info.eps)


# -- one step beside fp32, and the sum over all steps --

Observed = tuple[Observation, ...]

NEGLIGIBLE = 1e-3
"""A gradient of at most this share of the run's largest is the rounding of a converged loss: fp16's own relative
rounding is 2^-11, so a gradient that still teaches something is not that much smaller than what it came from."""

CHAOS = 4.0
"""A gradient error up to this factor times that of rounded weights is rounding; activations are rounded too."""

FP32_ROUNDING = 2.0**-20
"""A move of at most this share of a number is fp32's own rounding of a few terms (2^-24 each), so it does not count."""

SOME = 64
"""Elements of a tensor whose course over the steps is kept."""

AS_FAR = 1.5
"""A chaotic step within this factor of one that was examined is not examined again. Eight steps of a ResNet-50 with
random weights on four images were 0.75 to 0.78 away from fp32; rounding alone moved them by 0.81."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """The result of the comparison with fp32."""

    findings: tuple[Finding, ...] = ()  # of the first sick step; () for a healthy run
    checks: tuple[Check, ...] = ()
    skipped: tuple[Skipped, ...] = ()  # why fp32 could not be run
    deterministic: bool = True  # each step that was run again was the same bit by bit
    steps: int = 0  # number of compared steps
    at_rest: int = 0  # of these, in which fp32 moves nothing
    held: int = 0  # steps at the end that the user's own gradient check skips and fp32 takes
    origins: Mapping[str, NonFiniteOrigin] = field(default_factory=dict)  # by the finding's fingerprint


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A step beside fp32; `comparison` is None where a scaler skips the step or fp32 is not finite."""

    comparison: Comparison | None = None
    own: ReplayedStep | None = None  # the step as it is; None without a comparison
    zeroed: Zeroed | None = None  # what it flushes; None where that is not asked for
    held: bool = False  # the user's own gradient check skips the step, and fp32 takes it
    only_fp32_fails: bool = False  # its gradients are not finite
    cut: str | None = None  # why neither this step nor a later one can be compared
    raises: bool = False  # because it cannot run in fp32


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the first replay of a step leaves for the comparison."""

    observed: Observed
    random_state: RandomState  # after the batch was drawn, before the step
    optimizer_steps: int
    skipped: bool = False  # the scaler skipped the step, or a part of its updates
    beside: StepComparison | None = None  # None where the step was not run in fp32


@dataclass(slots=True)
class Known:
    """What examined steps without a finding have shown to be harmless."""

    explained: float = 0.0  # a gradient error that rounding alone explains
    alone: dict[str, float] = field(default_factory=dict)  # by parameter: its gradient's error, times `AS_FAR`
    warm_up: bool = False  # what stands still at a warm-up's learning rate moves at the full rate

    def looks(self, far: Sequence[ParameterVsFp32]) -> None:
        """Record parameters that are far from fp32 although nothing was found."""
        for one in far:
            self.alone[one.name] = max(self.alone.get(one.name, 0.0), AS_FAR * error_of(one))


@dataclass(slots=True)
class ComparisonSummary:
    """Collects the results of the compared steps."""

    thresholds: Thresholds
    known: Known = field(default_factory=Known)
    compared: list[Comparison] = field(default_factory=list)  # those whose gradient is not negligible
    _all: list[Comparison] = field(default_factory=list)
    origins: dict[str, NonFiniteOrigin] = field(default_factory=dict)  # by the finding's fingerprint
    _chaotic: int = 0
    _doubt: Finding | None = None
    held: int = 0  # steps in a row that the user's own gradient check skips

    def looked_at(self, comparison: Comparison, rounding: float) -> None:
        """Record an examined step in which no rule fires; `rounding` is the gradient error of rounded weights."""
        if comparison.gradient_error <= CHAOS * rounding:
            self.known.explained = max(self.known.explained, min(CHAOS * rounding, AS_FAR * comparison.gradient_error))

    def add(self, comparison: Comparison) -> None:
        """Count a step; if its gradients are far from fp32's and not negligible, remember to report it."""
        self.held = 0
        self._all.append(comparison)
        if comparison.gradient_norm < NEGLIGIBLE * self._largest:
            return  # converged: the rest of the gradient is rounding
        self.compared.append(comparison)
        doubt = unexplained(comparison, self.thresholds)
        if comparison.gradient_error > self.known.explained:
            self._doubt = self._doubt or doubt
        elif doubt is not None:
            self._chaotic += 1

    def ended(self, findings: tuple[Finding, ...] = (), *, cut: str | None = None) -> ReferencePass:
        """Returns the result; the doubt is a finding only if nothing clearer than a note was found."""
        clear = any(finding.severity != "note" for finding in findings)
        doubt = (self._doubt,) if self._doubt is not None and not clear else ()
        steps, trained = len(self._all), [one.parameters for one in self._all if one.parameters]
        rests = sum(not any(p.meant_to_move for p in parameters) for parameters in trained)  # learning rate 0
        worst = {"largest_gradient_error": max([0.0, *(one.gradient_error for one in self.compared)])} if steps else {}
        chaotic = {"steps_as_far_by_rounding_alone": self._chaotic} if self._chaotic else {}
        at_rest = {"steps_at_rest_in_fp32": rests} if rests else {}  # these show nothing about updates
        rising = {"moves_at_the_full_learning_rate": True} if self.known.warm_up else {}
        check = Check(
            name=FP32_CHECK,
            result=self._result(sick=bool(findings or doubt)),
            headroom={"steps": steps, **worst, **chaotic, **at_rest, **rising},
        )
        skipped = (Skipped(what=NOT_COMPARED, reason=cut),) if cut is not None else ()
        return ReferencePass(
            findings=(*findings, *doubt),
            checks=(check,),
            skipped=skipped,
            steps=steps,
            at_rest=rests,
            held=self.held,
            origins=self.origins,
        )

    @property
    def _largest(self) -> float:
        return max([0.0, *(one.gradient_norm for one in self._all)])

    def _result(self, *, sick: bool) -> str:
        if sick:
            return "found"
        if not self._all:
            return "not_run"
        if self._largest:
            return "ok"
        given = any(one.parameters for one in self._all)
        missing = "fp32 has no gradient either" if given else "no optimizer was given a gradient"
        return f"nothing to compare: {missing}"


def run_step(
    session: Session, step: int, *probes: Probe, fp32: bool = False, change: Change = no_change
) -> StepOutcome:
    """Run a step from the session's state, as it is or in fp32, with probes and under a change."""
    with session.reference() if fp32 else nullcontext(), change(session), session.watched(*probes):
        return session.step(step)


class MovesProbe(Probe):
    """Measures how far the run's state moves in a step, in its own formats; made before the step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.before = kept(session)
        self.moves = StateCopy()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Measure the moves."""
        self.moves = moved(self._session, self.before)


@dataclass(slots=True)
class Fp32Step:
    """A step in fp32, for the step that follows from the same state."""

    probe: DistanceProbe  # compares the step's gradients with fp32's
    before: StateCopy  # what the run keeps, before the step
    moved: StateCopy  # how that moved in fp32
    outcome: StepOutcome  # of fp32
    finite: bool  # fp32's gradients are finite

    @classmethod
    def run(cls, session: Session, step: int, *probes: Probe, change: Change = no_change) -> Fp32Step:
        """Run the step in fp32, with a change inside; the session is left after the step."""
        gradients, moves = GradientProbe(), MovesProbe(session)
        outcome = run_step(session, step, *probes, gradients, moves, fp32=True, change=change)
        ends = to_host(extremes_of_all(gradients.gradients.values()))
        finite = all(math.isfinite(end) for pair in ends for end in pair)
        return cls(DistanceProbe(gradients.gradients, gradients.times), moves.before, moves.moves, outcome, finite)

    def compared(self, session: Session, outcome: StepOutcome) -> Comparison:
        """Returns the numbers of the run's own step, which has just been made with `probe` attached."""
        before, here, there = self.before, moved(session, self.before), self.moved
        apart = self.probe.distances
        total = together(apart.values())
        return Comparison(
            step=outcome.step,
            loss=outcome.loss,
            reference_loss=self.outcome.loss,
            gradient_error=total.relative,
            gradient_ratio=math.sqrt(total.norm / total.reference) if total.reference else 1.0,
            gradient_norm=math.sqrt(total.reference),
            zeroed=total.flushed / total.nonzero if total.nonzero else 0.0,
            zeroed_share=total.flushed_error / total.error if total.error else 0.0,
            updates=_updates(session, here.half, there.half),
            parameters=tuple(_beside(apart, before.trained, here.trained, there.trained)),
            states=tuple(_states(before, here, there)),
            events=outcome.events,
        )


def beside_fp32(
    session: Session, before: Snapshot, step: int, nonfinite_probe: NonFiniteProbe, formats: FormatsProbe | None = None
) -> tuple[StepOutcome, StepComparison]:
    """Run a step in fp32 and then as it is, each from the state `before` it; the session is left after the step.

    With `formats`, which knows what is half, the comparison also says what the step flushes.
    """
    wide: Fp32Step | None = None
    raised = StepComparison()
    wide_gradients = [] if formats is None else [ReferenceGradients(formats.plan)]
    zeroed = [*map(ZeroedProbe, wide_gradients)]
    try:
        wide = Fp32Step.run(session, step, *wide_gradients)
    except AmpdoctorError as error:
        raised = StepComparison(cut=f"from step {step} on the run cannot be replayed in fp32: {error}", raises=True)
    finally:
        before.restore()
    with session.watched(nonfinite_probe, *zeroed, *([] if wide is None else [wide.probe])):
        outcome = session.attempt(step)
    if wide is None or outcome.raised is not None:
        return outcome, raised
    found = _side_by_side(session, outcome, wide, nonfinite_probe)
    return outcome, replace(found, zeroed=zeroed[0].zeroed) if zeroed else found


def _side_by_side(
    session: Session, outcome: StepOutcome, wide: Fp32Step, nonfinite_probe: NonFiniteProbe
) -> StepComparison:
    affected, own, updates = nonfinite_probe.report.affected, outcome.optimizer_steps, wide.outcome.optimizer_steps
    if outcome.loses_updates:
        return StepComparison()
    if own < updates and any(target.startswith("grad:") for target in affected):
        return StepComparison(held=True)
    if not wide.finite:
        return StepComparison(only_fp32_fails=True)
    if own != updates:
        said = f"step {outcome.step} makes {own} updates, and in fp32 {updates}: the loop's code decides so"
        return StepComparison(cut=said)
    row = replace(replayed(outcome, affected), gradient_norm=math.sqrt(wide.probe.distance.norm))
    return StepComparison(wide.compared(session, outcome), row)


def _beside(apart: Mapping[str, Distance], before: State, here: State, there: State) -> Iterator[ParameterVsFp32]:
    for name, distance in apart.items():
        if name not in here or name not in there:
            continue
        meant, done = there[name], here[name]
        moves, half_units = meant != 0, last_place(before[name]).double() / 2
        still = not bool(done.any())
        yield ParameterVsFp32(
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
            below_half_ulp=int((moves & (meant.abs() <= half_units)).sum()),
            update=float(done.norm()),
            expected_update=float(meant.norm()),
            rounding=float(half_units.norm()),
            course=_some(meant / half_units) if still else (),
        )


def _states(before: StateCopy, here: StateCopy, there: StateCopy) -> Iterator[StateVsFp32]:
    for (kind, name), old in before.states.items():
        named = (kind, name)
        if named not in here.states or named not in there.states:
            continue
        meant = there.states[named]
        moves = meant.abs() > FP32_ROUNDING * old.double().abs()
        if not moves.any():
            continue
        yield StateVsFp32(
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
    return tuple(values[:: max(1, -(-values.numel() // SOME))].tolist())


def _root(squares: float) -> float:
    return math.sqrt(squares) if squares >= 0.0 else math.nan


def _updates(session: Session, here: State, there: State) -> tuple[ModuleUpdate, ...]:
    trained = set(map(id, optimizer_parameters(session)))
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
