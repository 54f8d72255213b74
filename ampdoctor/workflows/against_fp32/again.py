"""One step, run again and again from the same state: which ops write what, and what a change makes of the moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.optimizer_precision import REMEDIES
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Prescription
from ampdoctor.precision import Swap
from ampdoctor.probes.altering.intervene import WrittenCasts
from ampdoctor.probes.trace.writes import Write, WritesProbe
from ampdoctor.workflows.against_fp32.moves import Kept, State, held, kept, moved, sample, states_of
from ampdoctor.workflows.against_fp32.place import Place
from ampdoctor.workflows.against_fp32.side_by_side import stepped
from ampdoctor.workflows.proving import changes as change

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

KEPT_ELSEWHERE = 0.5
"""Relative error up to which a tensor of optimizer state has moved by what its weight should have: a compensation in
bf16 has 2^-8, a momentum another size altogether."""
_NESTED = 5
"""An optimizer's list of groups, of an inner optimizer, of tensors: no deeper."""
FLUSHED = 0.25
"""Share of the elements of a second moment that an op has to flush to be what makes a step twice too long."""
MOST = 0.9
"""Share of the elements that have to move with a change, of those that move in fp32 (as in AMP501)."""

Wrong = Callable[[Kept], str | None]
"""Says what is wrong with the moves of a step; None where nothing is."""


@dataclass(frozen=True, slots=True)
class Again:
    """A step and the state before it; every method leaves the session at that state.

    Attributes:
        session: The session.
        before: The state before the step.
        step: The step.
    """

    session: Session
    before: Snapshot
    step: int

    @classmethod
    def at(cls, place: Place, step: int) -> Again | None:
        """Lead the run from its start to a step; None where its batch is gone."""
        fresh = place.anew()
        return cls(place.session, place.session.snapshot(), step) if fresh.comes_to(step) else None

    def written(self, *, wide: bool = False) -> WritesProbe:
        """Returns what has seen which ops write what the run keeps.

        Args:
            wide: Of the step in fp32.
        """
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
        """Returns the parameters whose lost moves are kept: by a compensation (Kahan) or a master, whoever holds it."""
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
            # a master has moved so; a compensation holds what fp32, which adds it up, has moved and the weight has not
            together = (gone, -gone, done[name] + now, done[name] - now)
            apart = min(float((move - meant[name]).norm()) for move in together)
            if apart <= KEPT_ELSEWHERE * float(meant[name].norm()):
                found.add(name)
        self.before.restore()
        return frozenset(found)

    def copies(self) -> frozenset[str]:
        """Returns the states that are, after the step, what a parameter is: they have nowhere to go."""
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
        """The plan, with what the step shows with its change.

        Args:
            plan: What is prescribed.
            tried: Its change.
            wrong: What is asked of the moves.
        """
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
        """fp32 for everything; where that is not it, the same without the casts that the step's code writes.

        Args:
            wrong: What is asked of the moves.
        """
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
    """Returns a change with another: no cast to half that is written in the step's code.

    Args:
        wide: The other.
    """

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        with wide(session), WrittenCasts():
            yield

    return changed


def in_code(said: str) -> Prescription:
    """Returns a plan that only the user can carry out.

    Args:
        said: What to do.
    """
    return Prescription(kind="code", value=said, status="not_run", detail=said)


def tensors_in_fp32(names: frozenset[str], *, casts: bool) -> change.Change:
    """Returns a change: these states in fp32; unless `casts`, no cast to half that is written in the step's code.

    Args:
        names: Of the states.
        casts: Casts in the step's code stay.
    """

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        swap = Swap([tensor for (_, name), tensor in states_of(session) if name in names], torch.float32)
        try:
            with nullcontext() if casts else WrittenCasts():
                yield
        finally:
            swap.restore()

    return changed


def too_few(found: Mapping[str, int], wanted: Mapping[str, int]) -> str | None:
    """Returns what is wrong where fewer elements move than should.

    Args:
        found: How many move, by name.
        wanted: How many move in fp32, by name.
    """
    now, meant = sum(found.values()), sum(wanted.values())
    return None if now > MOST * meant else f"{now} of {meant} elements move with it"


def last_op(writes: WritesProbe, name: str) -> str:
    """Returns the op whose result a tensor holds after the step.

    Args:
        writes: What has seen the step.
        name: Of the tensor.
    """
    written = writes.writes.get(name)
    return f"aten.{written[-1].site.op}" if written else "aten.add_"


def first_wrong_op(here: WritesProbe, there: WritesProbe, parameter: str, ratio: float) -> str | None:
    """Returns the first op that leaves something else in a parameter's optimizer state than it does in fp32.

    Args:
        here: What has seen the step.
        there: What has seen it in fp32.
        parameter: Name of the parameter.
        ratio: By which factor its step is wrong.
    """
    prefix = _state_name(parameter, "")
    for name in here.writes:
        mine, wide = (_updates(probe.writes.get(name, ())) for probe in (here, there))
        if not name.startswith(prefix) or [write.site.op for write in mine] != [write.site.op for write in wide]:
            continue
        for one, other in zip(mine, wide, strict=True):
            apart = (one.norm or 0.0) / other.norm if other.norm else 1.0
            flushed = (one.zeros or 0.0) - (other.zeros or 0.0)
            if flushed > FLUSHED or not 1 / ratio**2 <= apart <= ratio**2:  # second moments go with the step's square
                return f"aten.{one.site.op}"
    return None


def _updates(writes: Sequence[Write]) -> list[Write]:
    """Returns the last writes that change a tensor in place: what came before made it, or was there before it."""
    made = max((at for at, write in enumerate(writes) if not write.in_place), default=-1)
    return list(writes[made + 1 :])


def _all_kept(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a run keeps, by name: parameters, states, and all that its optimizers keep."""
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
    """Yields the fp32 tensors beside the model's parameters: what optimizers hold as attributes, and the run's own."""
    known = {id(parameter) for parameter in session.model.parameters()}
    for name, tensor in (*_attributes(session.optimizers), *session.own_state()):
        if tensor.dtype is torch.float32 and id(tensor) not in known:
            yield name, tensor


def _attributes(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in an optimizer's attributes, its inner optimizers' among them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _NESTED:
        if isinstance(value, torch.optim.Optimizer):
            value = vars(value)
        listed = enumerate(value) if isinstance(value, list | tuple) else ()
        for key, inner in [*(value.items() if isinstance(value, Mapping) else listed)]:
            yield from _attributes(inner, f"{name}.{key}", depth + 1)


def _with_masters(session: Session, before: Mapping[str, torch.Tensor], start: State, meant: State) -> set[str]:
    """Returns the parameters that are the half copies of fp32 tensors which moved as fp32's parameters do.

    A moving average has the parameter's values as well, but not its moves. In fp32 a parameter begins at the half
    copy's value and may end at the master's.

    Args:
        session: The session, after the step.
        before: The fp32 tensors before it, by name.
        start: Samples of the parameters before it.
        meant: How they move in fp32.
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
