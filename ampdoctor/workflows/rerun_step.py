"""Runs one step again and again from the same state: traced, with other rounding, or under a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.updates import REMEDIES
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Prescription
from ampdoctor.precision.casting import TemporaryCast
from ampdoctor.probes.gradients import DistanceProbe
from ampdoctor.probes.op_overrides import WrittenCasts
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.written_state import Write, WritesProbe
from ampdoctor.workflows import changes as change
from ampdoctor.workflows.step_beside_fp32 import (
    Replayed,
    State,
    StateCopy,
    held,
    kept,
    moved,
    sample,
    states_of,
    stepped,
)

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import Trace
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


# -- the session's place among the steps --

NOISE = 0.5
"""Relative change of a parameter's fp32 gradient, when the last bit of each weight changes, from which the gradient is
noise. The bias of a key projection, whose true gradient is zero, is above 1; others are at 1e-3 and less, in a chaotic
network too: rounding to fp32 is 2^-13 of rounding to fp16."""


@dataclass(slots=True)
class ReplayPosition:
    """Where a session is among its steps."""

    session: Session
    start: Snapshot  # the state before step `begin`
    seen: Sequence[Replayed]  # what the first replay saw, from `begin` on
    step: int | None = None  # the step that the session stands before; None: not yet moved
    begin: int = 0

    @property
    def steps(self) -> int:
        """The number of steps of the run, including those before `start`."""
        return self.begin + len(self.seen)

    def anew(self) -> ReplayPosition:
        """Returns the same place before anything is run again."""
        return replace(self, step=None)

    def comes_to(self, step: int) -> bool:
        """Replay to the start of a step, from the run's start if need be; False where its batch is gone."""
        if self.step is None:
            self.start.restore()
            self.step = self.begin
        for earlier in range(self.step, step):
            if self.session.has_step(earlier):
                self.seen[earlier - self.begin].random_state.restore()
                self.session.step(earlier)
        if not self.session.has_step(step):  # drawn again if the batches were too large to be kept
            return False
        self.session.keep_steps(lambda earlier: earlier >= step)
        self.seen[step - self.begin].random_state.restore()
        return True


def traced(session: Session, before: Snapshot, step: int, *, flushes: bool = False) -> Trace:
    """Replay a step with every op watched (`flushes`: also elements lost to zero); the session is left after it."""
    tracer = OpTraceProbe(flushes=flushes)
    before.restore()
    with session.watched(tracer):
        session.step(step)
    if tracer.trace is None:
        raise AssertionError("a finished step leaves a trace")
    return tracer.trace


def noise(session: Session, before: Snapshot, step: int) -> frozenset[str]:
    """Returns the parameters whose fp32 gradient changes with the weights' last bits; the state is restored."""
    try:
        beside = jolted_beside(session, before, step, torch.float32)
    except AmpdoctorError:
        return frozenset()
    return frozenset(name for name, apart in beside.distances.items() if not apart.relative <= NOISE)


def jolted_beside(session: Session, before: Snapshot, step: int, dtype: torch.dtype) -> DistanceProbe:
    """Run a step in fp32 twice, once with each weight moved by its rounding in `dtype`, and compare the gradients.

    The session is left before the step. Raises AmpdoctorError where the step cannot run so.
    """
    before.restore()
    try:
        with session.reference():
            wide = stepped(session, step)[0]
        beside = DistanceProbe(wide.gradients, wide.times)
        before.restore()
        with session.reference(), change.jolted(dtype)(session), session.watched(beside):
            session.step(step)
    finally:
        before.restore()
    return beside


# -- one step under changes: which ops write what, and how the updates differ --

KEPT_ELSEWHERE = 0.5
"""Relative error up to which optimizer state counts as having moved like its weight should: a compensation in bf16 has
2^-8, while a momentum has quite another size."""
_NESTED = 5
"""Maximum depth: an optimizer's list of groups, of an inner optimizer, of tensors."""
FLUSHED = 0.25
"""Share of a second moment's elements that an op has to flush to explain a step that is twice too long."""
MOST = 0.9
"""Share of the elements that move in fp32 which must move with a change (as in AMP501)."""

Wrong = Callable[[StateCopy], str | None]
"""Says what is wrong with the moves of a step; None where nothing is."""


@dataclass(frozen=True, slots=True)
class StepRerun:
    """A step and the state before it; each method leaves the session at that state."""

    session: Session
    before: Snapshot
    step: int

    @classmethod
    def at(cls, place: ReplayPosition, step: int) -> StepRerun | None:
        """Bring the run from its start to a step; None where its batch is gone."""
        fresh = place.anew()
        return cls(place.session, place.session.snapshot(), step) if fresh.comes_to(step) else None

    def written(self, *, wide: bool = False) -> WritesProbe:
        """Run the step, in fp32 if `wide`, and return the probe that saw which ops write the run's state."""
        probe = WritesProbe(lambda: _all_kept(self.session))
        self.before.restore()
        with ExitStack() as stack:
            if wide:
                stack.enter_context(self.session.reference())
            with self.session.watched(probe):
                self.session.step(self.step)
        self.before.restore()
        return probe

    def kept_elsewhere(self) -> frozenset[str]:
        """Returns the parameters whose lost moves are kept by a compensation (Kahan) or a master, whoever holds it."""
        session = self.session
        self.before.restore()
        values = kept(session)
        with session.reference():
            stepped(session, self.step)
            meant = moved(session, values).trained
        self.before.restore()
        old = {(name, key): sample(tensor).double() for name, key, tensor in _optimizer_state(session)}
        wide = {name: tensor.detach().clone() for name, tensor in _wide_beside(session)}
        session.step(self.step)
        done = moved(session, values).trained
        found = _with_masters(session, wide, values.trained, meant)
        for name, key, tensor in _optimizer_state(session):
            now = sample(tensor).double()
            if name not in meant or now.shape != meant[name].shape:
                continue
            now = now.to(meant[name].device)  # a count of steps lies on the CPU
            gone = now - old.get((name, key), torch.zeros_like(now)).to(now.device)
            # a master has moved so; a compensation holds the part of fp32's move that the weight has not made
            together = (gone, -gone, done[name] + now, done[name] - now)
            apart = min(float((move - meant[name]).norm()) for move in together)
            if apart <= KEPT_ELSEWHERE * float(meant[name].norm()):
                found.add(name)
        self.before.restore()
        return frozenset(found)

    def copies(self) -> frozenset[str]:
        """Returns the states that equal a parameter after the step: as copies they need not move themselves."""
        self.before.restore()
        self.session.step(self.step)
        parameters = [tensor.detach() for _, tensor in held(self.session)]
        found = {
            name
            for (_, name), state in states_of(self.session)  # an average may lie on the CPU
            if any(
                p.dtype == state.dtype and p.shape == state.shape and p.equal(state.to(p.device)) for p in parameters
            )
        }
        self.before.restore()
        return frozenset(found)

    def tried(self, plan: Prescription, tried: change.Change, wrong: Wrong) -> Prescription:
        """Run the step with a change; returns the plan with the result. `wrong` judges the moves."""
        self.before.restore()
        values = kept(self.session)
        try:
            with tried(self.session):
                stepped(self.session, self.step)
                left = wrong(moved(self.session, values))
        except AmpdoctorError as error:
            return replace(plan, reason=f"the replay with the change cannot run: {error}")
        finally:
            self.before.restore()
        return replace(plan, status="verified" if left is None else "failed", reason=left)

    def in_fp32(self, wrong: Wrong) -> Prescription:
        """Try fp32 for everything; where that fails, the same without the casts that the step's code writes."""
        whole = change.compute_dtype("fp32")
        plan = Prescription(kind="dtype", value="float32", status="not_run", detail=REMEDIES[0])
        cure = self.tried(plan, whole, wrong)
        if cure.verified:
            return cure

        plan = in_code("take the casts to half out of the code that updates it, constants as well: 0.999 in bf16 is 1")
        code = self.tried(plan, without_casts(whole), wrong)
        if not code.verified:
            return replace(cure, alternatives=(code,))
        return replace(code, status="intervention", alternatives=(cure,))


def without_casts(wide: change.Change) -> change.Change:
    """Returns the change `wide` without any cast to half that is written in the step's code."""

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        with wide(session), WrittenCasts():
            yield

    return changed


def in_code(said: str) -> Prescription:
    """Returns a plan that only the user can carry out."""
    return Prescription(kind="code", value=said, status="not_run", detail=said)


def tensors_in_fp32(names: frozenset[str], *, casts: bool) -> change.Change:
    """Returns a change: these states in fp32; unless `casts`, no cast to half that is written in the step's code."""

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        swap = TemporaryCast([tensor for (_, name), tensor in states_of(session) if name in names], torch.float32)
        try:
            with nullcontext() if casts else WrittenCasts():
                yield
        finally:
            swap.restore()

    return changed


def too_few(found: Mapping[str, int], wanted: Mapping[str, int]) -> str | None:
    """Returns what is wrong where fewer elements move than in fp32; both maps are counts by name."""
    now, meant = sum(found.values()), sum(wanted.values())
    return None if now > MOST * meant else f"{now} of {meant} elements move with it"


def last_op(writes: WritesProbe, name: str) -> str:
    """Returns the op whose result a tensor holds after the step."""
    written = writes.writes.get(name)
    return f"aten.{written[-1].site.op}" if written else "aten.add_"


def first_wrong_op(here: WritesProbe, there: WritesProbe, parameter: str, ratio: float) -> str | None:
    """Returns the first op that leaves something else in a parameter's optimizer state than it does in fp32.

    `here` watched the step and `there` the step in fp32; `ratio` is the factor by which the parameter's step is wrong.
    """
    prefix = _state_name(parameter, "")
    for name in here.writes:
        mine, wide = (_updates(probe.writes.get(name, ())) for probe in (here, there))
        if not name.startswith(prefix) or [write.site.op for write in mine] != [write.site.op for write in wide]:
            continue
        for one, other in zip(mine, wide, strict=True):
            apart = (one.norm or 0.0) / other.norm if other.norm else 1.0
            flushed = (one.zeros or 0.0) - (other.zeros or 0.0)
            if flushed > FLUSHED or not 1 / ratio**2 <= apart <= ratio**2:  # second moments go as the step's square
                return f"aten.{one.site.op}"
    return None


def _updates(writes: Sequence[Write]) -> list[Write]:
    """Returns the in-place writes since the tensor was last made."""
    made = max((at for at, write in enumerate(writes) if not write.in_place), default=-1)
    return list(writes[made + 1 :])


def _all_kept(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a run keeps, by name: parameters, states, and all state of its optimizers."""
    yield from held(session)
    yield from ((name, tensor) for (_, name), tensor in states_of(session))
    yield from ((_state_name(name, key), tensor) for name, key, tensor in _optimizer_state(session))


def _optimizer_state(session: Session) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields (parameter's name, key, tensor) for the tensors that optimizers keep."""
    names = session.parameter_names()
    for optimizer in session.optimizers.values():
        for parameter, state in list(optimizer.state.items()):
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    yield names.get(id(parameter), ""), str(key), value


def _wide_beside(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the fp32 tensors outside the model's parameters: attributes of optimizers, and the run's own state."""
    known = {id(parameter) for parameter in session.model.parameters()}
    for name, tensor in (*_attributes(session.optimizers), *session.own_state()):
        if tensor.dtype is torch.float32 and id(tensor) not in known:
            yield name, tensor


def _attributes(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _NESTED:
        if isinstance(value, torch.optim.Optimizer):
            value = vars(value)
        listed = enumerate(value) if isinstance(value, list | tuple) else ()
        for key, inner in [*(value.items() if isinstance(value, Mapping) else listed)]:
            yield from _attributes(inner, f"{name}.{key}", depth + 1)


def _with_masters(session: Session, before: Mapping[str, torch.Tensor], start: State, meant: State) -> set[str]:
    """Returns the half parameters whose fp32 master moved as the parameter does in fp32.

    A moving average has the parameter's values as well, but not its moves. In fp32 a parameter begins at the half
    copy's value and may end at the master's. `before` holds the fp32 tensors before the step, `start` samples of the
    parameters before it, and `meant` their moves in fp32.
    """
    weights, found = dict(held(session)), set()
    for name, tensor in _wide_beside(session):
        old = before.get(name)
        if old is None or old.shape != tensor.shape:
            continue
        for parameter, move in meant.items():
            weight = weights[parameter]
            if weight.shape != tensor.shape or not weight.detach().equal(tensor.detach().to(weight)):
                continue
            now, began = sample(tensor).to(move), (sample(old).to(move), start[parameter].to(move))
            apart = min(float((now - one - move).norm()) for one in began)
            if apart <= KEPT_ELSEWHERE * float(move.norm()):
                found.add(parameter)
    return found


def _state_name(parameter: str, key: str) -> str:
    return f"optimizer:{parameter}.{key}"
