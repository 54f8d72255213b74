"""fp32 islands: modules of a mixed-precision model that compute in fp32."""

from __future__ import annotations

import difflib
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.casting import REDUCED, TemporaryCast, cast_up, map_tensors, parameters_and_buffers
from ampdoctor.precision.kernels import let_compile_see_hooks, outside_graphs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


# -- one fp32 island: the pair of hooks that lets a module compute in fp32 --

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")  # their autocast is switched off inside (never on where torch lacks one)


class _Entry(NamedTuple):
    fp32_module: Fp32Module
    module: nn.Module
    autocast: tuple[bool, ...]
    narrow: torch.dtype | None


class _Open(threading.local):
    """Calls of islands that have begun and not ended, on this thread.

    By thread, as autocast itself is: DataParallel runs replicas side by side, and activation checkpointing recomputes
    on autograd's threads. Not stored in the island, which is copied and pickled with its model.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_OPEN = _Open()


class Fp32Module:
    """The hooks of one module, without a reference to it: copies and pickles of the module keep them.

    `torch.compile` breaks its graph at them, so that the island is compiled as a graph of its own, without autocast.
    Traced into its parent's graph its forward would be right; but a graph's backward is traced under the autocast in
    which the graph is called (`torch._functorch.config.backward_pass_autocast`), and so in half precision.

    In a half model, `dtype` is the dtype that the parameters had before they became fp32, and fp32 outputs are cast to
    it; if it is None, to the dtype of the first half input, if there is one. Under autocast they stay fp32.
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
        return output if narrow is None else map_tensors(output, lambda tensor: self._narrowed(tensor, narrow))

    def _narrowed(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.narrow(tensor, dtype) if tensor.dtype is torch.float32 else tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        let_compile_see_hooks()  # a loaded or copied model has hooks without a call of `attach`

    def called(self) -> None:
        """Called at each call of the module; for subclasses that count."""

    def narrow(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """An fp32 output in the model's half dtype."""
        return tensor.to(dtype)


def forget(islands: list[Any]) -> None:
    """End calls of these islands that were left open without a hook (Ctrl-C), and restore autocast."""
    entries = _OPEN.entries
    first = next(
        (i for i, entry in enumerate(entries) if any(entry.fp32_module is fp32_module for fp32_module in islands)), None
    )
    if first is not None:
        _set_autocast(entries[first].autocast)
        del entries[first:]


def fp32_module_of(module: nn.Module) -> Fp32Module | None:
    """The island whose hooks `module` has, if any."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to see hooks
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, Fp32Module)), None)


def fp32_module_on(module: nn.Module) -> bool:
    """Whether `module` has the hooks of an island."""
    return fp32_module_of(module) is not None


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


class Fp32Modules:
    """Modules that compute in fp32, while `force_fp32` is open.

    `names` are the requested modules; containers that have no forward are replaced by their children. `widened` has
    further modules that share a parameter with one of them and are cast with it, each with the name of that parameter's
    island. A module whose `calls` stay at 0 was never called: the model uses its parameters directly, and the island
    had no effect.
    """

    __slots__ = ("_beyond", "calls", "names", "widened")

    def __init__(self, names: Sequence[str], widened: dict[str, str]) -> None:
        self.names = tuple(names)
        self.widened = widened
        self.calls = dict.fromkeys((*names, *widened), 0)
        self._beyond: dict[str, Tensor] = {}

    @property
    def beyond(self) -> dict[str, float]:
        """Islands of a pure half model whose finite output overflows the model's dtype: its largest magnitude.

        Cast back, such an output is infinite again: fp32 in that module alone does not help.
        """
        found = {name: float(amax) for name, amax in self._beyond.items()}  # the only device synchronisation
        return {name: amax for name, amax in found.items() if amax > 0}

    def record(self, name: str, amax: Tensor) -> None:
        """Takes the largest magnitude that an output has lost."""
        before = self._beyond.get(name)
        self._beyond[name] = amax if before is None else torch.maximum(before, amax)


class _Watched(Fp32Module):
    """An island of a replay: counts its calls, and records outputs that overflow the model's dtype."""

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


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


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
        if _has_forward(module):
            chosen[name] = module
        else:
            prefix = f"{name}." if name else ""
            todo = [prefix + child for child, _ in module.named_children()] + todo
    return chosen


def upcast_fp32_modules(model: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, str]:
    """Modules outside the islands that own a half tensor that an island owns too: name -> the island's name.

    A tied weight that becomes fp32 is fp32 for all its owners, and an owner left outside would mix it with half inputs.
    """
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

    Inputs are cast up (in nested structures and keywords too), half parameters and buffers (and the optimizers' half
    state for them) are fp32 for the duration, autocast is off inside. Under autocast the output stays fp32: cast back
    it would overflow again. Without autocast (a pure half model) fp32 outputs are cast to the module's half dtype, and
    what overflows that dtype is recorded in `beyond`. Forward and backward both belong inside: enter and leave between
    steps.

    Hooks rather than a wrapped `forward`: they leave no attribute on the instance for copies, pickles and signature
    readers to find, they run again when activation checkpointing recomputes, and with `always_call` also when a forward
    raises. Neither works for a parent that uses a module's weight without calling the module; `calls` then stays 0.

    Tied weights: where half parameters are shared with a module outside, that module becomes an island as well, and is
    listed in `widened`. Under autocast parameters are fp32, and sharing them does not matter. Raises UsageError where a
    name is unknown.
    """
    chosen = resolve_fp32_modules(model, names)
    widened = upcast_fp32_modules(model, chosen)
    modules = dict(model.named_modules())
    islands = Fp32Modules(tuple(chosen), widened)
    everything = {**chosen, **{name: modules[name] for name in widened}}
    # Within an island all is fp32: an island inside another one casts no outputs.
    inside = {inner for module in everything.values() for inner in module.modules() if inner is not module}
    dtypes = {name: None if module in inside else half_dtype(module) for name, module in everything.items()}
    with ExitStack() as stack:
        for module in inside:
            if (other := fp32_module_of(module)) is not None:  # one that the model came with
                stack.callback(setattr, other, "dtype", other.dtype)
                other.dtype = None
        halves = [tensor for module in everything.values() for tensor in half_tensors(module)]
        stack.callback(TemporaryCast(halves, torch.float32, optimizers).restore)
        watched = [_Watched(name, dtypes[name], islands) for name in everything]
        stack.callback(forget, watched)
        for fp32_module, module in zip(watched, everything.values(), strict=True):
            for handle in fp32_module.attach(module):
                stack.callback(handle.remove)
        yield islands
