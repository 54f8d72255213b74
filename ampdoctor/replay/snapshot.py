"""Snapshots: the whole state of a training run, taken and put back exactly.

A snapshot is the fast way back to a step. What it cannot hold (a counter in a closure, a file position) is why a fresh
factory call replayed from step 0 stays the reference; fingerprints of the passes tell which one is right.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_RNG_MODULES = ("numpy",)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every random generator that training code commonly draws from."""

    python: Any
    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    numpy: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Copy the current states of Python's, torch's (CPU and each CUDA device) and numpy's global generators."""
        import numpy as np

        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(random.getstate(), torch.get_rng_state(), cuda, np.random.get_state())  # noqa: NPY002 - the global one is what user code draws from

    def restore(self) -> None:
        """Put the generators back."""
        import numpy as np

        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))
        np.random.set_state(self.numpy)  # noqa: NPY002 - see capture


def _clone(value: Any) -> Any:
    """A deep copy that keeps tensors plain (no autograd history) and everything else as `copy.deepcopy` does."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clone(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_clone(item) for item in value)
    return copy.deepcopy(value)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, persistent or not, each tensor once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's storage and its contents, so that views and aliases of the storage survive a restore."""

    tensor: torch.Tensor
    data: torch.Tensor
    values: torch.Tensor
    grad: torch.Tensor | None
    grad_values: torch.Tensor | None

    @classmethod
    def capture(cls, tensor: torch.Tensor) -> _Tensor:
        grad = tensor.grad if tensor.is_leaf else None
        return cls(
            tensor,
            tensor.data,
            tensor.detach().clone(),
            grad,
            None if grad is None else grad.detach().clone(),
        )

    def restore(self) -> None:
        self.data.copy_(self.values)
        if self.tensor.data_ptr() != self.data.data_ptr() or self.tensor.dtype != self.data.dtype:
            self.tensor.data = self.data
        if not self.tensor.is_leaf:
            return
        if self.grad is None or self.grad_values is None:
            self.tensor.grad = None
            return
        if self.grad.dtype == self.grad_values.dtype and self.grad.shape == self.grad_values.shape:
            with torch.no_grad():
                self.grad.copy_(self.grad_values)
            self.tensor.grad = self.grad
        else:
            self.tensor.grad = self.grad_values.clone()


class Snapshot:
    """The state of model, optimizers, scaler, schedulers and random generators at one moment.

    Args:
        model: Parameters, all buffers, `.grad`, the train/eval flags.
        optimizers: State and hyper-parameters of each; parameters that are not the model's (fp32 masters, EMA copies
            held by an optimizer) are kept as well.
        scaler: A GradScaler or None.
        schedulers: Objects with `state_dict` and `load_state_dict`.
        generators: Generators of the user's own (a DataLoader's).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        scaler: Any,
        schedulers: tuple[Any, ...] = (),
        generators: tuple[torch.Generator, ...] = (),
    ) -> None:
        self._restores: list[Callable[[], None]] = []
        seen: set[int] = set()
        with torch.no_grad():
            for _, tensor in _tensors(model):
                self._keep(tensor, seen)
            self._keep_modules(model)
            for optimizer in optimizers.values():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        self._keep(parameter, seen)
                self._keep_optimizer(optimizer)
        if scaler is not None:
            self._keep_scaler(scaler)
        for scheduler in schedulers:
            if hasattr(scheduler, "state_dict"):
                state = _clone(scheduler.state_dict())
                self._restores.append(lambda s=scheduler, v=state: s.load_state_dict(_clone(v)))  # type: ignore[misc]
        for generator in generators:
            rng = generator.get_state()
            self._restores.append(lambda g=generator, v=rng: g.set_state(v))  # type: ignore[misc]
        random_state = RandomState.capture()
        self._restores.append(random_state.restore)

    def restore(self) -> None:
        """Put everything back: same objects, same storages, same bits. May be called any number of times."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _keep(self, tensor: torch.Tensor, seen: set[int]) -> None:
        if id(tensor) in seen or tensor.is_meta:
            return
        seen.add(id(tensor))
        self._restores.append(_Tensor.capture(tensor).restore)

    def _keep_modules(self, model: nn.Module) -> None:
        for module in model.modules():
            # a step may put another tensor in place of a buffer: keep which object was registered, not only its values
            parameters, buffers, training = dict(module._parameters), dict(module._buffers), module.training

            def restore(
                module: nn.Module = module,
                parameters: dict[str, Any] = parameters,
                buffers: dict[str, Any] = buffers,
                training: bool = training,  # noqa: FBT001 - bound early, never passed
            ) -> None:
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
                module.training = training

            self._restores.append(restore)

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        state = {parameter: _clone(values) for parameter, values in optimizer.state.items()}
        groups = [{key: _clone(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        params = [list(group["params"]) for group in optimizer.param_groups]

        def restore() -> None:
            optimizer.state.clear()
            for parameter, values in state.items():
                optimizer.state[parameter] = _clone(values)
            del optimizer.param_groups[len(groups) :]
            for group, saved, members in zip(optimizer.param_groups, groups, params, strict=True):
                group.clear()
                group.update(_clone(saved))
                group["params"] = list(members)

        self._restores.append(restore)

    def _keep_scaler(self, scaler: Any) -> None:
        kept = {key: value for key, value in vars(scaler).items() if not callable(value)}
        state = {key: _clone(value) for key, value in kept.items() if key != "_per_optimizer_states"}

        def restore() -> None:
            for key, value in state.items():
                setattr(scaler, key, _clone(value))
            if "_per_optimizer_states" in kept:
                scaler._per_optimizer_states.clear()

        self._restores.append(restore)
