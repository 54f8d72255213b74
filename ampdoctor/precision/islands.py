"""fp32 islands: modules of a mixed-precision model that compute in fp32."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.casting import Swap, parameters_and_buffers
from ampdoctor.precision.nested import REDUCED, cast_up, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

_DEVICE_TYPES = ("cpu", "cuda")


class Islands:
    """Modules that compute in fp32, while `force_fp32` is open.

    Attributes:
        names: The modules asked for, containers that have no forward replaced by their children.
        widened: Module names taken in beside those asked for, because they share a parameter that is cast with them;
            each with the name of that parameter's island.
        calls: How often each module ran as an island. A name that stays at 0 was never called: the model uses its
            parameters directly, and the island did nothing.
    """

    __slots__ = ("_beyond", "_handles", "_open", "_swap", "calls", "names", "widened")

    def __init__(self, names: Sequence[str], widened: dict[str, str]) -> None:
        self.names = tuple(names)
        self.widened = widened
        self.calls = dict.fromkeys((*names, *widened), 0)
        self._beyond: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._open: list[tuple[Any, tuple[bool, ...], torch.dtype | None]] = []
        self._swap: Swap | None = None

    @property
    def beyond(self) -> dict[str, float]:
        """Islands of a pure half model whose finite output the model's dtype cannot hold: its largest magnitude.

        Cast back, such an output is infinite again: fp32 in that module alone cures nothing.
        """
        found = {name: float(amax) for name, amax in self._beyond.items()}  # the one moment that waits for a device
        return {name: amax for name, amax in found.items() if amax > 0}

    def _enter(self, name: str, dtype: torch.dtype | None, module: nn.Module) -> Any:
        def pre_hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            self.calls[name] += 1
            enabled = tuple(torch.is_autocast_enabled(device) for device in _DEVICE_TYPES)
            narrow = None if any(enabled) else (dtype or _first_reduced((args, kwargs)))
            self._open.append((module, enabled, narrow))
            for device in _DEVICE_TYPES:
                torch.set_autocast_enabled(device, False)
            return cast_up(args), cast_up(kwargs)

        return pre_hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Any) -> Any:
            if not any(entry[0] is module for entry in self._open):
                return None  # the call failed before our pre-hook ran
            narrow = None
            while self._open:
                opened, enabled, narrow = self._open.pop()
                _set_autocast(enabled)
                if opened is module:
                    break
            return output if narrow is None else map_tensors(output, lambda tensor: self._narrow(name, tensor, narrow))

        return hook

    def _narrow(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        result = tensor.to(dtype)
        with torch.no_grad():
            lost = result.isinf() & tensor.isfinite()
            amax = torch.where(lost, tensor, 0).abs().amax() if tensor.numel() else tensor.new_zeros(())
            before = self._beyond.get(name)
            self._beyond[name] = amax if before is None else torch.maximum(before, amax)
        return result

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._open:  # left by something that no hook sees (Ctrl-C)
            _set_autocast(self._open[0][1])
            self._open.clear()
        if self._swap is not None:
            self._swap.restore()
            self._swap = None


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


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def _resolve(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of `names`; ModuleList and ModuleDict stand for their children, for nothing ever calls them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, nn.Module] = {}
    todo = list(names)
    while todo:
        name = todo.pop(0)
        module = modules.get(name)
        if module is None:
            near = difflib.get_close_matches(name, modules, n=3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise UsageError(f"the model has no module called {name!r}{hint}")
        if _has_forward(module):
            chosen[name] = module
        else:
            prefix = f"{name}." if name else ""
            todo = [prefix + child for child, _ in module.named_children()] + todo
    return chosen


def _widen(model: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, str]:
    """Modules outside the islands that own a half tensor that an island owns too: name -> the island's name.

    A tied weight that becomes fp32 is fp32 for all its owners, and an owner left outside would mix it with half inputs.
    """
    owner: dict[int, str] = {}
    inside: set[int] = set()

    def take(island: str, module: nn.Module) -> None:
        inside.update(id(sub) for sub in module.modules())
        owner.update({id(tensor): island for tensor in parameters_and_buffers(module) if tensor.dtype in REDUCED})

    for name, module in chosen.items():
        take(name, module)
    widened: dict[str, str] = {}
    before = -1
    while before != len(widened):  # what is taken in may share a parameter with yet another module
        before = len(widened)
        for name, module in model.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            shared = next((owner[id(tensor)] for tensor in own if id(tensor) in owner), None)
            if shared is not None and id(module) not in inside:
                widened[name] = shared
                take(shared, module)
    return widened


@contextmanager
def force_fp32(model: nn.Module, names: Iterable[str], optimizers: Iterable[Optimizer] = ()) -> Iterator[Islands]:
    """Let modules of a mixed-precision model compute in fp32, forward and backward.

    Inputs are cast up (in nested structures and keywords too), half parameters and buffers are fp32 for the
    duration, autocast is off inside. Under autocast the output stays fp32: cast back it would overflow again. Without
    autocast (a pure half model) fp32 outputs are cast to the module's half dtype, and what that dtype cannot hold is
    recorded in `beyond`. Enter and leave between steps: forward and backward both belong inside.

    Hooks rather than a wrapped `forward`: they leave no attribute on the instance for copies, pickles and signature
    readers to find, they run again when activation checkpointing recomputes, and with `always_call` also when a
    forward raises. What neither sees is a parent that uses a module's weight without calling it; `calls` tells.

    Tied weights: where half parameters are shared with a module outside, that module becomes an island as well, and
    `widened` says so. Under autocast parameters are fp32 and nothing is shared that matters.

    Args:
        model: The model.
        names: Names of `model.named_modules()`; "" is the whole model. Module lists and dicts mean their children.
        optimizers: Optimizers whose half state for these parameters becomes fp32 too.

    Yields:
        What was done, and what it met.

    Raises:
        UsageError: The model has no such module.
    """
    chosen = _resolve(model, names)
    widened = _widen(model, chosen)
    modules = dict(model.named_modules())
    islands = Islands(tuple(chosen), widened)
    everything = {**chosen, **{name: modules[name] for name in widened}}
    dtypes = {
        name: next((tensor.dtype for tensor in parameters_and_buffers(module) if tensor.dtype in REDUCED), None)
        for name, module in everything.items()
    }
    try:
        halves = [
            tensor
            for module in everything.values()
            for tensor in parameters_and_buffers(module)
            if tensor.dtype in REDUCED
        ]
        islands._swap = Swap(halves, torch.float32, optimizers)  # noqa: SLF001 - built here
        for name, module in everything.items():
            # Ours last before the forward and first after it: other hooks see the model's own precision.
            pre = islands._enter(name, dtypes[name], module)  # noqa: SLF001
            post = islands._leave(name)  # noqa: SLF001
            islands._handles += [  # noqa: SLF001
                module.register_forward_pre_hook(pre, with_kwargs=True),
                module.register_forward_hook(post, prepend=True, always_call=True),
            ]
        yield islands
    finally:
        islands._remove()  # noqa: SLF001
