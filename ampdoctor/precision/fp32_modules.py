"""modules in fp32: modules of a mixed-precision model that compute in fp32."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampdoctor.errors import UsageError
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.precision.casting import REDUCED, TemporaryCast, cast_up, map_tensors, parameters_and_buffers
from ampdoctor.precision.kernels import let_compile_see_hooks, outside_graphs

# -- one module in fp32: the pair of hooks that lets a module compute in fp32 --

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")  # their autocast is switched off inside (never on where torch lacks one)


class _Entry(NamedTuple):
    fp32_module: Fp32Module
    module: nn.Module
    autocast: tuple[bool, ...]
    narrow: torch.dtype | None


class _Open(threading.local):
    """Calls of fp32 modules that have begun and not ended, by thread as autocast is (modules may be copied)."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_OPEN = _Open()


class Fp32Module:
    """The hooks of one module, without a reference to it: copies and pickles of the module keep them.

    `torch.compile` breaks its graph at them: in its parent's graph the backward would be traced under autocast.
    In a half model fp32 outputs are cast to `dtype`, or to that of the first half input.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks, innermost of all: other hooks see the model's own precision. The handles remove them."""
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
        """After the forward, also one that raised: restore autocast, cast the output in a half model."""
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
        if narrow is None:
            return output
        return map_tensors(output, lambda t: self.narrow(t, narrow) if t.dtype is torch.float32 else t)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        let_compile_see_hooks()  # a loaded or copied model has hooks without a call of `attach`

    def called(self) -> None:
        """Called at each call of the module; for subclasses that count."""

    def narrow(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """An fp32 output in the model's half dtype."""
        return tensor.to(dtype)


def forget(in_fp32: list[Any]) -> None:
    """End calls of these modules that were left open without a hook (Ctrl-C), and restore autocast."""
    entries = _OPEN.entries
    first = next((i for i, entry in enumerate(entries) if entry.fp32_module in in_fp32), None)
    if first is not None:
        _set_autocast(entries[first].autocast)
        del entries[first:]


def fp32_module_of(module: nn.Module) -> Fp32Module | None:
    """The fp32 module whose hooks `module` has, if any."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to see hooks
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, Fp32Module)), None)


def _set_autocast(enabled: tuple[bool, ...]) -> None:
    for device, was in zip(_DEVICE_TYPES, enabled, strict=True):
        torch.set_autocast_enabled(device, was)


def _first_reduced(value: Any) -> torch.dtype | None:
    return next((tensor.dtype for _, tensor in iter_tensors(value) if tensor.dtype in REDUCED), None)


class Fp32Modules:
    """Modules that compute in fp32, while `force_fp32` is open, with those that share a half parameter with one.

    A module whose `calls` stay at 0 was never called: the model uses its parameters directly.
    """

    __slots__ = ("_beyond", "calls")

    def __init__(self, names: Iterable[str]) -> None:
        self.calls = dict.fromkeys(names, 0)
        self._beyond: dict[str, Tensor] = {}

    @property
    def beyond(self) -> dict[str, float]:
        """The largest magnitude of finite outputs that overflow a half model's dtype: fp32 there does not help."""
        found = {name: float(amax) for name, amax in self._beyond.items()}  # the only device synchronisation
        return {name: amax for name, amax in found.items() if amax > 0}

    def record(self, name: str, amax: Tensor) -> None:
        """Takes the largest magnitude that an output has lost."""
        before = self._beyond.get(name)
        self._beyond[name] = amax if before is None else torch.maximum(before, amax)


class _Watched(Fp32Module):
    """An fp32 module of a replay: counts its calls, and records outputs that overflow the model's dtype."""

    def __init__(self, name: str, dtype: torch.dtype | None, report: Fp32Modules) -> None:
        super().__init__(dtype)
        self._name = name
        self._report = report

    def called(self) -> None:
        self._report.calls[self._name] += 1

    def narrow(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        result = super().narrow(tensor, dtype)
        with torch.no_grad():
            lost = result.isinf() & tensor.isfinite()
            amax = torch.where(lost, tensor, 0).abs().amax() if tensor.numel() else tensor.new_zeros(())
            self._report.record(self._name, amax)
        return result


def half_tensors(module: nn.Module) -> list[Tensor]:
    """Its fp16 and bf16 parameters and buffers, those of children too."""
    return [tensor for tensor in parameters_and_buffers(module) if tensor.dtype in REDUCED]


def half_dtype(module: nn.Module) -> torch.dtype | None:
    """The half dtype of a module's parameters; None where it has none in half."""
    return next((tensor.dtype for tensor in half_tensors(module)), None)


def resolve_fp32_modules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of `names`, with children in place of a ModuleList or ModuleDict; UsageError if one is missing."""
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
        if getattr(module.forward, "__name__", "") == "_forward_unimplemented":
            prefix = f"{name}." if name else ""
            todo = [prefix + child for child, _ in module.named_children()] + todo
        else:
            chosen[name] = module
    return chosen


def upcast_fp32_modules(model: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, str]:
    """Modules that own a half tensor which an fp32 module owns too: name -> the fp32 module's name."""
    owner: dict[int, str] = {}
    inside: set[int] = set()

    def take(fp32_module: str, module: nn.Module) -> None:
        inside.update(id(sub) for sub in module.modules())
        owner.update({id(tensor): fp32_module for tensor in half_tensors(module)})

    for name, module in chosen.items():
        take(name, module)
    widened: dict[str, str] = {}
    before = -1
    while before != len(widened):  # an added module may share a parameter with yet another one
        before = len(widened)
        for name, module in model.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            shared = next((owner[id(tensor)] for tensor in own if id(tensor) in owner), None)
            if shared is not None and id(module) not in inside:
                widened[name] = shared
                take(shared, module)
    return widened


@contextmanager
def force_fp32(model: nn.Module, names: Iterable[str], optimizers: Iterable[Optimizer] = ()) -> Iterator[Fp32Modules]:
    """Let modules of a mixed-precision model compute in fp32, forward and backward; `names` are from `named_modules()`.

    Inputs are cast up, half parameters and buffers (and the optimizers' half state for them) are fp32 for the duration,
    autocast is off inside. Under autocast the output stays fp32: cast back it would overflow again. In a half model the
    output is cast to the module's half dtype, and what overflows is recorded in `beyond`. Where half parameters are
    shared with a module outside, that computes in fp32 as well. Enter and leave between steps. Raises UsageError where
    a name is unknown.
    """
    chosen = resolve_fp32_modules(model, names)
    widened = upcast_fp32_modules(model, chosen)
    modules = dict(model.named_modules())
    everything = {**chosen, **{name: modules[name] for name in widened}}
    in_fp32 = Fp32Modules(everything)
    # Within such a module all is fp32: one inside another one casts no outputs.
    inside = {inner for module in everything.values() for inner in module.modules() if inner is not module}
    dtypes = {name: None if module in inside else half_dtype(module) for name, module in everything.items()}
    with ExitStack() as stack:
        for module in inside:
            if (other := fp32_module_of(module)) is not None:  # one that the model came with
                stack.callback(setattr, other, "dtype", other.dtype)
                other.dtype = None
        halves = [tensor for module in everything.values() for tensor in half_tensors(module)]
        stack.callback(TemporaryCast(halves, torch.float32, optimizers).restore)
        watched = [_Watched(name, dtypes[name], in_fp32) for name in everything]
        stack.callback(forget, watched)
        for fp32_module, module in zip(watched, everything.values(), strict=True):
            for handle in fp32_module.attach(module):
                stack.callback(handle.remove)
        yield in_fp32
