"""Snapshots save the whole state of a training run and restore it bit by bit.

A snapshot is the fast way back to a step. It cannot hold everything (iterators, file positions), so a fresh factory
call replayed from step 0 stays the reference; fingerprints of the two passes show whether the snapshot was exact.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.torch_internals import default_device, reset_default_device
from ampdoctor.precision.casting import HALVES
from ampdoctor.precision.dtype_overrides import overrides
from ampdoctor.replay.python_state import Reached
from ampdoctor.replay.tensor_store import TensorStore, Values
from ampdoctor.replay.user_code import user_code

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


# -- copies, and a GradScaler's state --


def clone(value: Any) -> Any:
    """Returns a deep copy; tensors become plain ones without autograd history."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(clone(item) for item in value)
    return copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class ScalerSnapshot:
    """A GradScaler's state at one moment; it does not keep the scaler alive."""

    values: dict[str, Any]
    states: Any  # the scaler's own defaultdict of optimizers, whose type must stay
    stages: dict[int, Any] | None

    @classmethod
    def of(cls, scaler: Any) -> ScalerSnapshot:
        """Copy a scaler's state."""
        kept = {key: value for key, value in vars(scaler).items() if not callable(value)}
        states = kept.pop("_per_optimizer_states", None)
        return cls(clone(kept), states, None if states is None else clone(dict(states)))

    def restore(self, scaler: Any) -> None:
        """Restore the state of the same scaler."""
        for key, value in self.values.items():
            setattr(scaler, key, clone(value))
        if self.states is not None:
            scaler._per_optimizer_states = self.states
            self.states.clear()
            self.states.update(clone(self.stages))


def arguments_of(scaler: Any) -> Any:
    """Returns the arguments of a GradScaler; the scaler itself if it is another kind, or a state was loaded into it."""
    if type(scaler) is not torch.amp.GradScaler or scaler._scale is not None:
        return scaler
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }


def format_of_weights(model: nn.Module) -> str:
    """Returns the format of most of a model's weights: "fp32", "fp16" or "bf16"."""
    elements = Counter({"fp32": 0})
    for parameter in model.parameters():
        elements[HALVES.get(parameter.dtype, "fp32")] += parameter.numel()
    return elements.most_common(1)[0][0]


def is_one_element(value: object) -> bool:
    """Is it a tensor with a single element?"""
    return isinstance(value, torch.Tensor) and value.numel() == 1


class OtherScalers:
    """Records the scalers that a run's steps make or hold themselves; `own` is the run's scaler, which is left out."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.state: dict[str, Any] | None = None  # the first enabled scaler's `state_dict` at its first call
        self.first: WeakKeyDictionary[Any, ScalerSnapshot] = WeakKeyDictionary()  # states before the first call

    def called(self, scaler: Any) -> None:
        """Notes a scaler before one of its methods runs."""
        if scaler is not self._own and scaler not in self.first:
            self.first[scaler] = ScalerSnapshot.of(scaler)
            if self.state is None and scaler.is_enabled():
                self.state = scaler.state_dict()


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor)
"""Types of attributes that can be restored by a plain assignment."""


def process_settings() -> Callable[[], None]:
    """Returns a function that restores the present process settings, which user code may change."""
    device, folder, path = default_device(), Path.cwd(), list(sys.path)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: list[Callable[[], Any]] = [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        overrides(),
    ]
    for kind in ("cpu", "cuda"):
        settings.append(partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)))
        settings.append(partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind)))

    def restore() -> None:
        for setting in settings:
            setting()
        if default_device() != device:
            reset_default_device() if device.type == "cpu" else torch.set_default_device(device)
        os.chdir(folder)
        sys.path[:] = path

    return restore


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with expanded dimensions (stride 0) cut to 1, so that it is writable."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    once = [1 if stride == 0 and n else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(once, tensor.stride(), tensor.storage_offset())


def _same_view(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    if tensor.dtype != data.dtype or tensor.shape != data.shape or tensor.layout is not data.layout:
        return False
    if data.layout is not torch.strided:
        return True
    return tensor.data_ptr() == data.data_ptr() and tensor.stride() == data.stride()


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter and buffer (persistent or not) once, with its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's storage and contents, so that views and aliases of the storage stay valid after a restore."""

    tensor: torch.Tensor
    data: torch.Tensor
    values: Values
    grad: torch.Tensor | None
    grad_values: torch.Tensor | None
    requires_grad: bool

    @classmethod
    def capture(cls, tensor: torch.Tensor, values: Values, *, gradient: bool) -> _Tensor:
        grad = tensor.grad if gradient and tensor.is_leaf else None
        return cls(
            tensor, tensor.data, values, grad, None if grad is None else grad.detach().clone(), tensor.requires_grad
        )

    def restore(self, *, unchanged: bool = True) -> None:
        if unchanged:
            self.values.copy_to(_memory(self.data))
        else:
            _put_back(self.data, self.values)
        if not _same_view(self.tensor, self.data):
            self.tensor.data = self.data
        if not self.tensor.is_leaf:
            return
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.grad is None or self.grad_values is None:
            self.tensor.grad = None
            return
        if self.grad.dtype == self.grad_values.dtype and self.grad.shape == self.grad_values.shape:
            with torch.no_grad():
                self.grad.copy_(self.grad_values)
            self.tensor.grad = self.grad
        else:
            self.tensor.grad = self.grad_values.clone()


def _put_back(tensor: torch.Tensor, values: Values) -> None:
    """Write values only if they differ: memory outside the run may be read-only."""
    memory = _memory(tensor.data)
    if not values.are_in(memory):
        values.copy_to(memory)


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A plain tensor of an optimizer's state, which may make a new one each step; else its own memory is restored."""

    tensor: weakref.ref[torch.Tensor]
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: Values

    @classmethod
    def capture(cls, tensor: torch.Tensor, values: Values) -> _StateTensor:
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return cls(weakref.ref(tensor), *place, values)

    def restored(self) -> torch.Tensor:
        tensor = self.tensor()
        if tensor is None or not self._is_in_place(tensor):
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        self.values.copy_to(_memory(tensor.data))
        return tensor

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        here = tensor.shape, tensor.dtype, tensor.device, tensor.layout
        same = here == (self.shape, self.dtype, self.device, torch.strided)
        return same and tensor.stride() == self.stride and tensor.data_ptr() == self.pointer


@dataclass(frozen=True, slots=True)
class _Module:
    """A module's registered tensors (the objects, as a step may replace a buffer), mode and plain attributes."""

    module: nn.Module
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    plain: dict[str, Any]
    names: frozenset[str]

    @classmethod
    def capture(cls, module: nn.Module) -> _Module:
        plain = {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
        return cls(module, dict(module._parameters), dict(module._buffers), plain, frozenset(vars(module)))

    def restore(self) -> None:
        for table, kept in ((self.module._parameters, self.parameters), (self.module._buffers, self.buffers)):
            table.clear()
            table.update(kept)
        attributes = vars(self.module)
        for name in [n for n, value in attributes.items() if n not in self.names and type(value) in _PLAIN]:
            del attributes[name]
        attributes.update(self.plain)


def weights_of(model: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the tensors of `model` with dtype and device, but not the random states."""
    kept = Snapshot(model, {}, None)

    def restore() -> None:
        now = RandomState.capture()
        kept.restore()
        now.restore()

    return restore


class Snapshot:
    """The state of model, optimizers, scaler, schedulers and random generators at one moment."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        scaler: Any,
        schedulers: tuple[Any, ...] = (),
        generators: tuple[torch.Generator, ...] = (),  # the user's own (a DataLoader's)
        *,
        others: Mapping[Any, ScalerSnapshot] = MappingProxyType({}),  # `OtherScalers.first`, also for those seen later
        gradients: bool = True,  # False if a step clears gradients first: a restore then clears them
        reached: Reached | None = None,  # the Python state that the run's functions reach outside these parts
        keeper: TensorStore | None = None,  # stores the values; None: in memory
        like: Snapshot | None = None,  # an earlier snapshot; unchanged values are shared with it
    ) -> None:
        self._restores: list[Callable[[], None]] = []
        self._values: dict[int, Values] = {}  # by the tensor's id
        self._known = like._values if like is not None else {}
        self._keeper = keeper or TensorStore()
        self._gradients = gradients
        seen: set[int] = set()
        with torch.no_grad(), user_code(what="copying the run's state"):
            for _, tensor in tensors_of(model):
                self._keep(tensor, seen)
            self._keep_modules(model, seen)
            for optimizer in optimizers.values():
                for parameter in parameters_of(optimizer):
                    self._keep(parameter, seen)
                self._keep_optimizer(optimizer)
            if scaler is not None:
                kept = ScalerSnapshot.of(scaler)
                self._restores.append(lambda: kept.restore(scaler))
            self._others = others
            self._others_now = weakref.WeakKeyDictionary({other: ScalerSnapshot.of(other) for other in others})
            for scheduler in schedulers:
                if hasattr(scheduler, "state_dict"):
                    state = clone(scheduler.state_dict())
                    self._restores.append(lambda s=scheduler, v=state: s.load_state_dict(clone(v)))  # type: ignore[misc]
            if reached is not None:
                self._restores += reached.kept(self._alone)
        random_state = RandomState.capture(generators)
        self._restores.append(random_state.restore)
        self._known = {}

    def restore(self) -> None:
        """Restore everything: same objects, same storages, same bits. It can be called repeatedly."""
        failed: BaseException | None = None
        with torch.no_grad(), user_code(what="putting the run's state back"):
            others = [
                partial(self._others_now.get(other, first).restore, other) for other, first in self._others.items()
            ]
            for restore in (*self._restores, *others):
                try:
                    restore()
                except BaseException as error:  # noqa: BLE001 - the rest is restored first, then it is raised
                    failed = failed or error
            if failed is not None:
                raise failed

    def _keep(self, tensor: torch.Tensor, seen: set[int]) -> None:
        if id(tensor) in seen or tensor.is_meta:
            return
        seen.add(id(tensor))
        self._restores.append(_Tensor.capture(tensor, self._kept(tensor), gradient=self._gradients).restore)

    def _alone(self, tensor: torch.Tensor) -> Callable[[], None]:
        values = self._kept(tensor)
        if not tensor.is_leaf:
            return partial(_put_back, tensor, values)
        return partial(_Tensor.capture(tensor, values, gradient=True).restore, unchanged=False)

    def _kept(self, tensor: torch.Tensor) -> Values:
        values = self._keeper.keep(_memory(tensor.data), self._known.get(id(tensor)))
        self._values[id(tensor)] = values
        return values

    def _keep_modules(self, model: nn.Module, seen: set[int]) -> None:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # its tables are in C++, and it cannot register new tensors
                self._restores.append(lambda m=module, t=module.training: m.train(t))  # type: ignore[misc]
                continue
            self._restores.append(_Module.capture(module).restore)
            for value in vars(module).values():
                # an unregistered tensor: a queue or a running mean
                if type(value) is torch.Tensor and value.is_leaf:
                    self._keep(value, seen)

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        state = {parameter: self._of_state(values) for parameter, values in optimizer.state.items()}
        groups = [{key: clone(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        params = [list(group["params"]) for group in optimizer.param_groups]

        def restore() -> None:
            optimizer.state.clear()
            for parameter, values in state.items():
                optimizer.state[parameter] = _restored(values)
            del optimizer.param_groups[len(groups) :]
            for group, saved, members in zip(optimizer.param_groups, groups, params, strict=True):
                group.clear()
                group.update(clone(saved))
                group["params"] = list(members)

        self._restores.append(restore)

    def _of_state(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta:
            return _StateTensor.capture(value, self._kept(value))
        if type(value) is dict:
            return {key: self._of_state(item) for key, item in value.items()}
        if type(value) is list:
            return [self._of_state(item) for item in value]
        return clone(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _StateTensor):
        return value.restored()
    if type(value) is dict:
        return {key: _restored(item) for key, item in value.items()}
    if type(value) is list:
        return [_restored(item) for item in value]
    return clone(value)
