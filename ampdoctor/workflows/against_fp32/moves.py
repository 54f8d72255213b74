"""How what a run keeps moves in a step: what it keeps in half as a whole, what an optimizer holds by a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StateKind
    from ampdoctor.replay.session import Session

State = Mapping[str, torch.Tensor]
Named = tuple["StateKind", str]
"""What kind of state, and its name."""
HALVES = (torch.float16, torch.bfloat16)

SAMPLE = 1 << 16
"""Elements of a tensor whose moves are looked at; of a larger one blocks that lie evenly over it."""
_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run keeps from step to step, or how far it has moved.

    Attributes:
        half: Parameters and buffers in a half format, by name; those may stand still.
        trained: A sample of each parameter that an optimizer holds, by name; flat.
        states: A sample of what no optimizer trains and that is kept in half, by kind and name; flat.
    """

    half: State = field(default_factory=dict)
    trained: State = field(default_factory=dict)
    states: Mapping[Named, torch.Tensor] = field(default_factory=dict)


def kept(session: Session, *, trained: bool = True) -> Kept:
    """Returns copies of what a run keeps.

    Args:
        session: The session.
        trained: Take samples of what the optimizers hold, and of other state, as well.
    """
    half = {n: t.detach().clone() for n, t in kept_tensors(session) if t.dtype in HALVES}
    if not trained:
        return Kept(half)
    states = {named: sample(t).clone() for named, t in states_of(session) if t.dtype in HALVES}
    return Kept(half, {name: sample(t).clone() for name, t in held(session)}, states)


def moved(session: Session, before: Kept) -> Kept:
    """Returns how far each has moved since, in float64."""
    now, trained = dict(kept_tensors(session)), dict(held(session)) if before.trained else {}
    states = dict(states_of(session)) if before.states else {}
    return Kept(
        {name: now[name].detach().double() - old.double() for name, old in before.half.items() if name in now},
        {n: sample(trained[n]).double() - old.double() for n, old in before.trained.items() if n in trained},
        {n: sample(states[n]).double() - old.double() for n, old in before.states.items() if _same(states, n, old)},
    )


def states_of(session: Session) -> Iterator[tuple[Named, torch.Tensor]]:
    """Yields what no optimizer trains: of the model, optimizer state of one element, what the run's own code keeps.

    A half copy of an fp32 master is none: it moves once the master has moved far enough.
    """
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
    """Yields (name, tensor) for what a run keeps from step to step.

    A parameter with an fp32 master counts as its master. Its half copy is made anew from the master after each step: it
    moves only once the master has moved half a unit in the copy's last place, and nothing is lost.
    """
    names = session.parameter_names()
    master = session.masters.of if session.masters else _masters_by_hand(session)
    yield from ((names[id(p)], master(p)) for p in session.model.parameters())
    for name, buffer in session.model.named_buffers():
        if buffer.is_floating_point():
            yield session.clean_name(name), buffer


def _masters_by_hand(session: Session) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what gives a half parameter's fp32 master, where the run's own code keeps one; else the parameter.

    A master is a parameter of an optimizer that the model does not have, and that is the half one when it is cast; or
    the half one's part of a flat one, which has the model's parameters one behind the other.
    """
    own = {id(p) for p in session.model.parameters()}
    held: list[torch.Tensor] = [
        p for optimizer in session.optimizers.values() for g in optimizer.param_groups for p in g["params"]
    ]
    others, trained = [p for p in held if id(p) not in own], {id(p) for p in held}
    flat: list[torch.Tensor] = [p for p in others if p.dim() == 1]
    at: dict[int, int] = dict(_places(p for p in session.model.parameters() if id(p) not in trained)) if flat else {}

    def master(half: torch.Tensor) -> torch.Tensor:
        if id(half) in trained:
            return half
        parts = (p[at[id(half)] :][: half.numel()] for p in flat if at[id(half)] + half.numel() <= p.numel())
        for one in (*(p for p in others if p.shape == half.shape), *(p.view(half.shape) for p in parts)):
            if half.detach().equal(one.detach().to(half)):  # masters may lie on the CPU
                return one
        return half

    return master


def _places(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yields each parameter's id, and where it begins when they lie one behind the other."""
    at = 0
    for parameter in parameters:
        yield id(parameter), at
        at += parameter.numel()


def held(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for the parameters that an optimizer holds."""
    names = session.parameter_names()
    for optimizer in session.optimizers.values():
        for group in optimizer.param_groups:
            yield from ((names[id(p)], p) for p in group["params"] if id(p) in names)


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
    """Returns the unit in the last place of each element in its own format, in fp32."""
    info = torch.finfo(values.dtype)
    exponent = torch.frexp(values.float()).exponent
    unit = torch.ldexp(torch.full_like(exponent, info.eps, dtype=torch.float32), exponent - 1)
    return unit.clamp_min(info.smallest_normal * info.eps)
