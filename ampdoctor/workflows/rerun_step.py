"""Runs one step again and again from the same state: traced, with other rounding, or under a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.updates import REMEDIES
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Prescription
from ampdoctor.precision.casting import TemporaryCast
from ampdoctor.probes.gradients import DistanceProbe, GradientProbe, LastBitsProbe
from ampdoctor.probes.op_overrides import WrittenCasts
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.written_state import Write, WritesProbe
from ampdoctor.workflows import changes
from ampdoctor.workflows.changes import Change, no_change
from ampdoctor.workflows.step_beside_fp32 import (
    MovesProbe,
    Replayed,
    State,
    StateCopy,
    held,
    run_step,
    sample,
    states_of,
)
from ampdoctor.workflows.trials import Trials

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import StepOutcome, Trace
    from ampdoctor.probes.ops import Probe
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


NOISE = 0.5
"""Relative change of a parameter's fp32 gradient, when the last bit of each weight and result changes, from which the
gradient is noise. The bias of a key projection, whose true gradient is zero, is above 1; others are at 1e-3 and less,
in a chaotic network too: rounding to fp32 is 2^-13 of rounding to fp16. Without the results, a saturated attention's
key bias stays within half of what it was in a third of the cases: few scores have a derivative, rounded alike."""


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
    """A step and the state before it, from which each method runs it; the session is left in any state."""

    session: Session
    before: Snapshot
    step: int

    def run(self, *probes: Probe, fp32: bool = False, change: Change = no_change) -> StepOutcome:
        """Run the step, as it is or in fp32, with probes and under a change."""
        self.before.restore()
        return run_step(self.session, self.step, *probes, fp32=fp32, change=change)

    def gradients(self, *, fp32: bool = False, change: Change = no_change) -> DistanceProbe:
        """Returns a probe that compares another run of the step with this one, gradient by gradient."""
        probe = GradientProbe()
        self.run(probe, fp32=fp32, change=change)
        return DistanceProbe(probe.gradients, probe.times)

    def moves(self, *, fp32: bool = False, change: Change = no_change) -> StateCopy:
        """Returns how far the run's state moves in the step."""
        self.before.restore()
        probe = MovesProbe(self.session)
        run_step(self.session, self.step, probe, fp32=fp32, change=change)
        return probe.moves

    def traced(self, *, flushes: bool = False) -> Trace:
        """Returns the step's trace, every op watched (`flushes`: also elements lost to zero)."""
        tracer = OpTraceProbe(flushes=flushes)
        self.run(tracer)
        if tracer.trace is None:
            raise AssertionError("a finished step leaves a trace")
        return tracer.trace

    def perturbed_weights(self, dtype: torch.dtype, *probes: Probe) -> DistanceProbe:
        """Returns how far the gradients in fp32 move when each weight moves by its rounding in `dtype`."""
        beside = self.gradients(fp32=True)
        self.run(beside, *probes, fp32=True, change=changes.perturbed_weights(dtype))
        return beside

    def noise(self) -> frozenset[str]:
        """Returns the parameters whose fp32 gradient changes with the last bits of weights and results."""
        try:
            apart = self.perturbed_weights(torch.float32, LastBitsProbe()).distances
        except AmpdoctorError:
            return frozenset()
        return frozenset(name for name, one in apart.items() if not one.relative <= NOISE)

    def written(self, *, fp32: bool = False) -> WritesProbe:
        """Returns the probe that saw which ops write the run's state."""
        probe = WritesProbe(lambda: _all_kept(self.session))
        self.run(probe, fp32=fp32)
        return probe

    def kept_elsewhere(self) -> frozenset[str]:
        """Returns the parameters whose lost moves are kept by a compensation (Kahan) or a master, whoever holds it."""
        session = self.session
        meant = self.moves(fp32=True).trained
        self.before.restore()
        own = MovesProbe(session)
        old = {(name, key): sample(tensor).double() for name, key, tensor in _optimizer_state(session)}
        wide = {name: tensor.detach().clone() for name, tensor in _wide_beside(session)}
        run_step(session, self.step, own)
        done = own.moves.trained
        found = _with_master_weights(session, wide, own.before.trained, meant)
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
        return frozenset(found)

    def copies(self) -> frozenset[str]:
        """Returns the states that equal a parameter after the step: as copies they need not move themselves."""
        self.run()
        parameters = [tensor.detach() for _, tensor in held(self.session)]
        found = {
            name
            for (_, name), state in states_of(self.session)  # an average may lie on the CPU
            if any(
                p.dtype == state.dtype and p.shape == state.shape and p.equal(state.to(p.device)) for p in parameters
            )
        }
        return frozenset(found)

    def trials(self, steps: int, **settings: Any) -> Trials:
        """Returns trials of the step, in a run of so many `steps`."""
        return Trials(session=self.session, snapshot=self.before, step=self.step, steps=steps, **settings)

    def tried(self, plan: Prescription, change: Change, wrong: Wrong) -> Prescription:
        """Run the step with a change; returns the plan with the result. `wrong` judges the moves."""
        try:
            left = wrong(self.moves(change=change))
        except AmpdoctorError as error:  # the user's code may allow no update over tensors of two formats
            return replace(plan, reason=f"the replay with the change cannot run: {error}")
        return replace(plan, status="verified" if left is None else "failed", reason=left)

    def in_fp32(self, wrong: Wrong) -> Prescription:
        """Try fp32 for everything; where that fails, the same without the casts that the step's code writes."""
        whole = changes.compute_dtype("fp32")
        plan = Prescription(kind="dtype", value="float32", status="not_run", detail=REMEDIES[0])
        cure = self.tried(plan, whole, wrong)
        if cure.verified:
            return cure

        plan = in_code("take the casts to half out of the code that updates it, constants as well: 0.999 in bf16 is 1")
        code = self.tried(plan, without_casts(whole), wrong)
        if not code.verified:
            return replace(cure, alternatives=(code,))
        return replace(code, status="intervention", alternatives=(cure,))


@dataclass(slots=True)
class ReplayPosition:
    """The way to a step of a run that was replayed."""

    session: Session
    start: Snapshot  # the state before step `begin`
    seen: Sequence[Replayed]  # what the first replay saw, from `begin` on
    begin: int = 0
    at: int | None = None  # the step that the session stands before; None where it may stand anywhere
    _last: StepRerun | None = None

    @property
    def steps(self) -> int:
        """The number of steps of the run, including those before `start`."""
        return self.begin + len(self.seen)

    def to(self, step: int) -> StepRerun | None:
        """Replay to the start of a step, from the nearest known state before it; None where its batch is gone."""
        if self._last is not None and self._last.step == step:
            self.at = None
            return self._last
        if self.at is None or self.at > step:
            near = self._last if self._last is not None and self._last.step <= step else None
            (self.start if near is None else near.before).restore()
            self.at = self.begin if near is None else near.step
        for earlier in range(self.at, step):
            if self.session.has_step(earlier):
                self.seen[earlier - self.begin].random_state.restore()
                self.session.step(earlier)
        self.at = None
        if not self.session.has_step(step):  # drawn again if the batches were too large to be kept
            return None
        self.session.keep_steps(lambda earlier: earlier >= step)
        self.seen[step - self.begin].random_state.restore()
        self._last = StepRerun(self.session, self.session.snapshot(), step)
        return self._last


def without_casts(wide: Change) -> Change:
    """Returns the change `wide` without any cast to half that is written in the step's code."""

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        with wide(session), WrittenCasts():
            yield

    return changed


def in_code(said: str) -> Prescription:
    """Returns a plan that only the user can carry out."""
    return Prescription(kind="code", value=said, status="not_run", detail=said)


def tensors_in_fp32(names: frozenset[str], *, casts: bool) -> Change:
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
    """Returns the first op that leaves something else in a parameter's optimizer state than it does in fp32."""
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
    made = max((at for at, write in enumerate(writes) if not write.in_place), default=-1)
    return list(writes[made + 1 :])


def _all_kept(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    yield from held(session)
    yield from ((name, tensor) for (_, name), tensor in states_of(session))
    yield from ((_state_name(name, key), tensor) for name, key, tensor in _optimizer_state(session))


def _optimizer_state(session: Session) -> Iterator[tuple[str, str, torch.Tensor]]:
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


def _with_master_weights(session: Session, before: Mapping[str, torch.Tensor], start: State, meant: State) -> set[str]:
    """Returns the half parameters whose fp32 master moved as the parameter does in fp32."""
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
