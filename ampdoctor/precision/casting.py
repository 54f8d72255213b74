"""Parameters and buffers temporarily in another dtype: pure half, the fp32 reference, modules in fp32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# -- tensors inside nested values --

HALVES: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}
REDUCED: Final = frozenset(HALVES)  # the dtypes that mixed precision computes in


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply `fn` to every tensor in lists, tuples, mappings and dataclasses, which are rebuilt with their own type.

    Other objects are passed on unchanged. A container in which nothing changes is returned itself.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, fn) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(items)  # a named tuple's constructor takes single fields
    if isinstance(value, MutableMapping):
        parts = dict(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
    else:
        return value
    changed = {key: new for key, old in parts.items() if (new := map_tensors(old, fn)) is not old}
    if not changed:
        return value
    rebuilt = copy.copy(value)  # keeps the instance's other attributes: a default factory, an encoding
    for key, new in changed.items():
        if isinstance(value, MutableMapping):
            rebuilt[key] = new
        else:
            object.__setattr__(rebuilt, key, new)  # works on frozen ones too
    return rebuilt


def cast_up(value: Any) -> Any:
    """Every fp16 and bf16 tensor of a nested structure in fp32, differentiably."""
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in REDUCED else tensor)


class _Swapped:
    """One tensor whose `.data` is replaced by a cast of it; the tensor object, and so the optimizer's key, stays."""

    __slots__ = ("gradient_dtype", "original", "start", "tensor")

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.original = tensor.data
        self.start = tensor.data.to(dtype)
        gradient = tensor.grad
        self.gradient_dtype = None if gradient is None else gradient.dtype
        tensor.grad = None  # a gradient must have its tensor's dtype at every moment
        # A clone: the optimizer must not write into `start`, which is compared later to find changes.
        tensor.data = self.start.clone()
        if gradient is not None:
            tensor.grad = gradient.to(dtype)

    def restore(self) -> None:
        now, gradient = self.tensor.data, self.tensor.grad
        self.tensor.grad = None
        # Written only where it changed: bits that no rounding reproduces (a NaN's payload) survive.
        if now.dtype != self.start.dtype or now.shape != self.start.shape:
            self.tensor.data = now.to(self.original.dtype)
        else:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[now.element_size()]
            changed = now.view(bits) != self.start.view(bits)
            self.original.copy_(torch.where(changed, now.to(self.original.dtype), self.original))
            self.tensor.data = self.original
        if gradient is not None:
            self.tensor.grad = gradient.to(self.tensor.dtype)


class TemporaryCast:
    """Parameters and buffers (and the optimizers' state for them) cast to another dtype until `restore()`.

    The tensor objects and their memory stay: restored values are rounded where they changed, and else bit for bit.
    """

    __slots__ = ("_state", "_swapped")

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype, optimizers: Iterable[Optimizer] = ()) -> None:
        self._swapped: list[_Swapped] = []
        self._state: list[tuple[dict[Any, Any], Any, torch.dtype]] = []
        given = {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
        chosen = {key: tensor for key, tensor in given.items() if tensor.dtype is not dtype}
        try:
            with torch.no_grad():
                for tensor in chosen.values():
                    self._swapped.append(_Swapped(tensor, dtype))
                for optimizer in optimizers:
                    self._cast_state(optimizer, given, dtype)
        except BaseException:
            self.restore()
            raise

    def _cast_state(self, optimizer: Optimizer, given: dict[int, Tensor], dtype: torch.dtype) -> None:
        for parameter, state in optimizer.state.items():
            if id(parameter) not in given:
                continue
            for key, value in state.items():
                # moments, also factored ones (Adafactor) of another shape, and those of fp32 weights; a step counter
                # is no moment, and in half it would stop counting
                counts = key == "step" and dtype is not torch.float32
                if isinstance(value, torch.Tensor) and value.dtype in REDUCED and not counts:
                    self._state.append((state, key, value.dtype))
                    state[key] = value.to(dtype)

    def restore(self) -> None:
        """Restore the dtypes; a second call does nothing."""
        with torch.no_grad():
            while self._state:
                state, key, dtype = self._state.pop()
                if key in state:
                    state[key] = state[key].to(dtype)
            while self._swapped:
                self._swapped.pop().restore()


def cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """A tensor's values and gradient in another dtype permanently, as `Module.to` casts them; the object stays."""
    values = tensor.data.to(dtype)
    gradient = None if tensor.grad is None else tensor.grad.to(dtype)
    tensor.grad = None  # a gradient must have its tensor's dtype at every moment
    tensor.data = values
    tensor.grad = gradient


def moments(state: Mapping[Any, Any]) -> dict[Any, Tensor]:
    """The floating-point tensors of a parameter's optimizer state, without the step counter."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step"
    }


def parameters_and_buffers(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers, those of children too, each once."""
    return [*module.parameters(), *module.buffers()]


@contextmanager
def cast_model(model: nn.Module, dtype: torch.dtype, optimizers: Iterable[Optimizer] = ()) -> Iterator[TemporaryCast]:
    """Run a model with all its floating parameters and buffers in `dtype`; fp64 is left alone when widening to fp32."""
    tensors = parameters_and_buffers(model)
    if dtype is torch.float32:
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.float64]
    swap = TemporaryCast(tensors, dtype, optimizers)
    try:
        yield swap
    finally:
        swap.restore()


class CastInputs:
    """A pre-hook that casts half inputs to the format that a half model computes in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def attach(self, model: nn.Module) -> RemovableHandle:
        """Register the hook on `model`; the handle removes it."""
        # not by the model's own method: a scripted module runs hooks but rejects their registration
        return nn.Module.register_forward_pre_hook(model, self, with_kwargs=True)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with half tensors cast."""
        return map_tensors((args, kwargs), lambda t: t.to(self.dtype) if t.dtype in REDUCED else t)


# -- fp32 master weights for a half model --


class MasterWeights:
    """The fp32 copies that optimizers step in place of half parameters; `pairs` are (half parameter, master).

    A gradient of a half parameter is added at once, in fp32, to its master's, and removed from the parameter. After a
    step of an optimizer its half parameters are overwritten with the rounded master weights.
    """

    __slots__ = ("_handles", "_of", "_optimizers", "pairs")

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []
        self._of: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._master(parameter) for parameter in group["params"]]
            for parameter, master in self.pairs:
                if parameter in optimizer.state:
                    optimizer.state[master] = _state_in(optimizer.state.pop(parameter), torch.float32)
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.publish()))

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype not in REDUCED:
            return parameter
        if id(parameter) not in self._of:
            master = parameter.detach().float().requires_grad_(parameter.requires_grad)
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
            self._of[id(parameter)] = master
            self.pairs.append((parameter, master))
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(_collect, master)))
        return self._of[id(parameter)]

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizers step for a parameter: its master, or itself where it has none."""
        return self._of.get(id(parameter), parameter)

    def publish(self) -> None:
        """Overwrite the half parameters with the rounded master weights."""
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def reload(self) -> None:
        """Overwrite the master weights with the half parameters, after a state was loaded into the model."""
        with torch.no_grad():
            for parameter, master in self.pairs:
                master.copy_(parameter)

    def remove(self) -> None:
        """Give the optimizers their half parameters back, with gradients and state in the parameters' dtype."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        back = {id(master): parameter for parameter, master in self.pairs}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [back.get(id(parameter), parameter) for parameter in group["params"]]
            for parameter, master in self.pairs:
                if master in optimizer.state:
                    optimizer.state[parameter] = _state_in(optimizer.state.pop(master), parameter.dtype)
        for parameter, master in self.pairs:
            if master.grad is not None:
                parameter.grad = master.grad.to(parameter.dtype)


def _collect(master: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None:
        wide = parameter.grad.float()
        master.grad = wide if master.grad is None else master.grad + wide
        parameter.grad = None


def _state_in(state: Any, dtype: torch.dtype) -> Any:
    """A parameter's optimizer state with its moments in `dtype`; torch's step counter stays fp32."""
    return {**state, **{key: moment.to(dtype) for key, moment in moments(state).items()}}


@contextmanager
def master_weights(optimizers: Iterable[Optimizer]) -> Iterator[MasterWeights]:
    """Let optimizers step fp32 copies of half parameters, until the context ends; fp32 parameters stay."""
    kept = MasterWeights(optimizers)
    try:
        yield kept
    finally:
        kept.remove()
