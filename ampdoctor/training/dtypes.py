"""Values of a user's training in another dtype, or another value, for as long as changes hold them there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampdoctor.errors import UsageError
from ampdoctor.precision import REDUCED, InPlaceCast, moments, parameters_and_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import ExitStack

    from torch import Tensor, nn


# Several changes may hold one value: taken back in any order, they leave what was there before the first.


@dataclass(slots=True, eq=False)
class _Hold:
    """One change of one value, for example of a parameter's dtype.

    Attributes:
        before: What the change covers: the value of the hold beneath it, or the original value.
        value: The value that it sets.
        rank: It is in force over holds of a lower rank, and over earlier ones of the same rank.
    """

    before: Any
    value: Any
    rank: int


_HOLDS = WeakIdKeyDictionary()
"""Object -> key -> its holds, the one in force last. They live as long as the object: a change without a handle stays
for good, and others may come and go above and beneath it."""


def holds(owner: object, key: Hashable) -> tuple[_Hold, ...]:
    """Returns the holds on one value of `owner`, the one in force last."""
    return tuple(_HOLDS.get(owner, {}).get(key, ()))


def original(owner: object, key: Hashable, now: Any) -> Any:
    """Returns the value before the first hold; `now`, the present value, if nothing holds it."""
    return next((hold.before for hold in holds(owner, key)), now)


def put(
    undo: ExitStack,
    owner: object,
    key: Hashable,
    value: Any,
    *,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    rank: int = 0,
) -> None:
    """Hold one value of `owner` at `value` until `undo` is closed.

    Args:
        undo: The stack that releases the hold when it is closed.
        owner: The object that is changed; it is not kept alive.
        key: Names the value within the owner.
        value: The new value; neither it nor the original one may refer to the owner.
        read: Reads the present value.
        write: Writes a value.
        rank: See `_Hold`.
    """
    stack = _HOLDS.setdefault(owner, {}).setdefault(key, [])
    at = sum(hold.rank <= rank for hold in stack)
    above = stack[at] if at < len(stack) else None
    hold = _Hold(before=read() if above is None else above.before, value=value, rank=rank)
    if above is None:
        write(value)
    else:
        above.before = value
    stack.insert(at, hold)
    undo.callback(partial(_release, stack, hold, write))


def _release(stack: list[_Hold], hold: _Hold, write: Callable[[Any], None]) -> None:
    at = stack.index(hold)
    del stack[at]
    if at < len(stack):
        stack[at].before = hold.before
    else:
        write(hold.before)


_DTYPE = "dtype"
WHOLE_MODEL, ISLAND = 0, 1
"""Ranks of holds: an fp32 island stays fp32 whatever becomes of the model around it."""


@dataclass(slots=True)
class _Followers:
    """The optimizers whose moments follow a parameter.

    Attributes:
        optimizers: The optimizers that any change was given; they are not kept alive.
        apart: Moments whose dtype was not their parameter's; they keep it.
    """

    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    apart: set[Any] = field(default_factory=set)

    def add(self, optimizer: Any, parameter: Tensor) -> None:
        if all(known is not optimizer for known in self.alive()):
            self.optimizers.append(weakref.ref(optimizer))
            found = moments(optimizer.state.get(parameter, {})).items()
            self.apart |= {key for key, moment in found if moment.dtype is not parameter.dtype}

    def alive(self) -> Iterator[Any]:
        return (optimizer for known in self.optimizers if (optimizer := known()) is not None)


_FOLLOWERS = WeakIdKeyDictionary()
"""Parameter -> its followers."""


def half_by_nature(module: nn.Module) -> list[Tensor]:
    """Returns the module's parameters and buffers (its children's too) that are fp16 or bf16 without any change."""
    return [t for t in parameters_and_buffers(module) if original(t, _DTYPE, t.dtype) in REDUCED]


def to_change(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the tensors that a change of the whole model to `dtype` affects: all that do not have it by nature."""
    return [t for t in tensors if t.dtype is not dtype or holds(t, _DTYPE)]


def hold_dtype(
    tensors: Iterable[Tensor],
    dtype: torch.dtype,
    model: nn.Module,
    optimizers: Iterable[Any],
    *,
    undo: ExitStack,
    rank: int,
) -> None:
    """Cast tensors, their gradients and moments in place until `undo` is closed; values are rounded on the way back.

    Args:
        tensors: Floating-point parameters and buffers.
        dtype: Their new dtype.
        model: The model that they belong to.
        optimizers: The optimizers whose moments follow, besides those of earlier changes.
        undo: The stack that takes back the cast when it is closed.
        rank: `WHOLE_MODEL` or `ISLAND`.
    """
    chosen = {id(tensor): tensor for tensor in tensors}
    if not chosen:
        return
    undo.callback(_flatten, model)
    for tensor in chosen.values():
        followers = _FOLLOWERS.setdefault(tensor, _Followers())
        for optimizer in optimizers:
            followers.add(optimizer, tensor)
        put(undo, tensor, _DTYPE, dtype, read=partial(_dtype_of, tensor), write=partial(_cast, tensor), rank=rank)
    _flatten(model)


def refuse_unseen(tensors: Iterable[Tensor], dtype: torch.dtype, training: Training, rank: int) -> None:
    """Refuse to change the dtype of parameters if a wrapper or optimizer that relies on it would not notice.

    Raises:
        UsageError: The model is already wrapped for several processes, or an optimizer not given has state.
    """
    beneath = (t for t in tensors if t.dtype is not dtype and all(hold.rank <= rank for hold in holds(t, _DTYPE)))
    changed = {id(tensor) for tensor in beneath}
    if not changed:
        return
    for module in training.model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UsageError(
                f"the change turns half parameters into others, which {kind} has laid out already: apply it before "
                f"the model is wrapped"
            )
    given = {id(optimizer) for optimizer in training.optimizers}
    for optimizer in _optimizers_alive():
        if id(optimizer) in given:
            continue
        for parameter, state in optimizer.state.items():
            if id(parameter) in changed and any(m.dtype is parameter.dtype for m in moments(state).values()):
                raise UsageError(
                    f"the change gives half parameters another dtype, and the {type(optimizer).__name__} that steps "
                    f"them has half moments already: apply it before the first step, or pass optimizer=..."
                )


def _dtype_of(tensor: Tensor) -> torch.dtype:
    return tensor.dtype


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is dtype:
        return
    followers = _FOLLOWERS[tensor]
    moved = []
    for optimizer in followers.alive():
        state = optimizer.state.get(tensor, {})
        moved.append((state, {k: m.to(dtype) for k, m in moments(state).items() if k not in followers.apart}))
    InPlaceCast([tensor], dtype)
    for state, cast in moved:
        state.update(cast)


def _flatten(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants an RNN's weights side by side in memory


def _optimizers_alive() -> list[Optimizer]:
    # torch keeps no list of optimizers; type() because isinstance() asks proxies and lazy objects for their __class__
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]


# The parts of a user's training that `apply` was given.


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a user's training that `apply` was given.

    Attributes:
        model: The model.
        optimizers: Its optimizers; () where none was given.
        scaler: Its loss scaler, if one was given.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
