"""Changes dtypes and other values of a user's training until the changes are undone."""

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


# -- holds: several changes of one value, undone in any order, restore the original --


@dataclass(slots=True, eq=False)
class _Hold:
    """One change of one value, for example of a parameter's dtype."""

    before: Any  # the value of the hold beneath it, or the original value
    value: Any  # the new value
    rank: int  # it covers holds of a lower rank, and earlier ones of the same rank


_HOLDS = WeakIdKeyDictionary()
"""Object -> key -> its holds, the active one last. They live as long as the object: a change without a handle is
permanent, and others may be added and removed above and beneath it."""


def holds(owner: object, key: Hashable) -> tuple[_Hold, ...]:
    """Returns the holds on one value of `owner`, the active one last."""
    return tuple(_HOLDS.get(owner, {}).get(key, ()))


def original(owner: object, key: Hashable, now: Any) -> Any:
    """Returns the value before the first hold; without a hold `now`, the present value."""
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
    """Holds one value of `owner` at `value` until `undo` is closed.

    `key` names the value within the owner, which is not kept alive: neither `value` nor the original may refer to it.
    `read` and `write` access the value; `rank` is as in `_Hold`.
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
"""Ranks of holds: an fp32 island stays fp32 in a model of any dtype."""


@dataclass(slots=True)
class _Followers:
    """The optimizers whose moments follow a parameter."""

    optimizers: list[weakref.ref[Any]] = field(default_factory=list)  # those given to any change
    apart: set[Any] = field(default_factory=set)  # moments whose dtype differs from their parameter's; they keep it

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
    """Returns the module's parameters and buffers (also its children's) that are fp16 or bf16 without any change."""
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
    """Casts tensors, their gradients and moments in place until `undo` is closed; values are rounded on the way back.

    `tensors` are floating-point parameters and buffers of the model. The moments of `optimizers`, and of those of
    earlier changes, follow. `rank` is `WHOLE_MODEL` or `ISLAND`.
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
    """Raises UsageError where a wrapper or optimizer relies on parameters' dtypes and would not notice their change.

    Such are a model that is already wrapped for several processes, and an optimizer with state that was not given.
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


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a user's training that `apply` was given."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
