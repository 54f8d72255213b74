"""Changes dtypes and other values of a user's training until the changes are undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ampdoctor.errors import UsageError
from ampdoctor.precision.casting import cast_in_place, moments

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import ExitStack

    from torch import Tensor, nn


def put(undo: ExitStack, value: Any, *, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Writes a value, and writes the former one again when `undo` is closed."""
    undo.callback(write, read())
    write(value)


def hold_dtype(
    tensors: Iterable[Tensor], dtype: torch.dtype, model: nn.Module, optimizers: Iterable[Any], *, undo: ExitStack
) -> None:
    """Casts a model's tensors, their gradients and moments in place until `undo` is closed, which may round."""
    chosen = {id(tensor): tensor for tensor in tensors}
    if not chosen:
        return
    undo.callback(_flatten, model)
    for tensor in chosen.values():
        found = [moments(optimizer.state.get(tensor, {})) for optimizer in optimizers]
        apart = {key for one in found for key, moment in one.items() if moment.dtype is not tensor.dtype}
        undo.callback(_cast, tensor, tensor.dtype, optimizers, apart)
        _cast(tensor, dtype, optimizers, apart)
    _flatten(model)


def refuse_wrapped(tensors: Iterable[Tensor], dtype: torch.dtype, model: nn.Module) -> None:
    """Raises UsageError where a wrapper for several processes has laid out the parameters and would not notice."""
    if all(tensor.dtype is dtype for tensor in tensors):
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UsageError(
                f"the change turns half parameters into others, which {kind} has laid out already: apply it before "
                f"the model is wrapped"
            )


def _cast(tensor: Tensor, dtype: torch.dtype, optimizers: Iterable[Any], apart: set[Any]) -> None:
    if tensor.dtype is dtype:
        return
    moved = []
    for optimizer in optimizers:
        state = optimizer.state.get(tensor, {})
        moved.append((state, {key: m.to(dtype) for key, m in moments(state).items() if key not in apart}))
    cast_in_place(tensor, dtype)
    for state, cast in moved:
        state.update(cast)


def _flatten(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants an RNN's weights side by side in memory


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a user's training that `apply` was given."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
