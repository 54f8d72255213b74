"""One fp32 island: the pair of hooks that lets a module compute in fp32."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ampdoctor.precision.emulation.torch_internals import let_compile_see_hooks, outside_graphs
from ampdoctor.precision.nested import REDUCED, cast_up, map_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Devices whose autocast is switched off inside; those that a build of torch lacks are never on."""


class _Entry(NamedTuple):
    island: Island
    module: nn.Module
    autocast: tuple[bool, ...]
    narrow: torch.dtype | None


class _Open(threading.local):
    """Calls of islands that have begun and not ended, on this thread.

    By thread, as autocast itself is: DataParallel runs replicas side by side, and activation checkpointing recomputes
    on autograd's threads. Not in the island, which is copied and pickled with its model.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_OPEN = _Open()


class Island:
    """The hooks of one module, which know nothing of the module but its dtype: copies and pickles of it keep them.

    `torch.compile` breaks its graph at them, so that the island is compiled as a graph of its own, without autocast.
    Traced into its parent's graph its forward would be right; but a graph's backward is traced under the autocast in
    which the graph is called (`torch._functorch.config.backward_pass_autocast`), and so in half precision.

    Args:
        dtype: What its parameters were before they became fp32, where the model is a half one: its fp32 outputs are
            cast to it. None: to the dtype of the first half input, if there is one. Under autocast outputs stay fp32.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def attach(self, module: nn.Module) -> list[Any]:
        """Put the hooks on `module`; the handles take them away.

        Ours are the last before the forward and the first after it: other hooks see the model's own precision.
        """
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, prepend=True, always_call=True),
        ]

    @outside_graphs
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before the forward: autocast off, half inputs in fp32."""
        self.called()
        autocast = tuple(torch.is_autocast_enabled(device) for device in _DEVICE_TYPES)
        narrow = None if any(autocast) else (self.dtype or _first_reduced((args, kwargs)))
        _OPEN.entries.append(_Entry(self, module, autocast, narrow))
        for device in _DEVICE_TYPES:
            torch.set_autocast_enabled(device, False)
        return cast_up(args), cast_up(kwargs)

    @outside_graphs
    def leave(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """After the forward, also one that raised: autocast as it was, the output narrowed in a half model."""
        entries = _OPEN.entries
        if not any(entry.module is module for entry in entries):
            return None  # the call failed before our pre-hook ran
        narrow = None
        while entries:
            entry = entries.pop()
            _set_autocast(entry.autocast)
            if entry.module is module:
                narrow = entry.narrow
                break
        return output if narrow is None else map_tensors(output, lambda tensor: self._narrowed(tensor, narrow))

    def _narrowed(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.narrow(tensor, dtype) if tensor.dtype is torch.float32 else tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        let_compile_see_hooks()  # a loaded or copied model has hooks that nobody has just attached

    def called(self) -> None:
        """The module is called: for those who count."""

    def narrow(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """An fp32 output in the model's half dtype."""
        return tensor.to(dtype)


def forget(islands: list[Any]) -> None:
    """End calls of these islands that something which no hook sees (Ctrl-C) left open: autocast is as before them."""
    entries = _OPEN.entries
    first = next((i for i, entry in enumerate(entries) if any(entry.island is island for island in islands)), None)
    if first is not None:
        _set_autocast(entries[first].autocast)
        del entries[first:]


def island_of(module: nn.Module) -> Island | None:
    """The island whose hooks `module` has, if any."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to see hooks
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, Island)), None)


def island_on(module: nn.Module) -> bool:
    """Has `module` the hooks of an island?"""
    return island_of(module) is not None


def _set_autocast(enabled: tuple[bool, ...]) -> None:
    for device, was in zip(_DEVICE_TYPES, enabled, strict=True):
        torch.set_autocast_enabled(device, was)


def _first_reduced(value: Any) -> torch.dtype | None:
    found: list[torch.dtype] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.dtype in REDUCED:
            found.append(tensor.dtype)
        return tensor

    map_tensors(value, look)
    return found[0] if found else None
