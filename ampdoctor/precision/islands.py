"""fp32 islands: modules of a mixed-precision model that compute in fp32."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.casting import Swap, parameters_and_buffers
from ampdoctor.precision.island import Island, forget, island_of
from ampdoctor.precision.nested import REDUCED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Islands:
    """Modules that compute in fp32, while `force_fp32` is open.

    Attributes:
        names: The modules asked for, containers that have no forward replaced by their children.
        widened: Module names taken in beside those asked for, because they share a parameter that is cast with them;
            each with the name of that parameter's island.
        calls: How often each module ran as an island. A name that stays at 0 was never called: the model uses its
            parameters directly, and the island did nothing.
    """

    __slots__ = ("_beyond", "_handles", "_islands", "_others", "_swap", "calls", "names", "widened")

    def __init__(self, names: Sequence[str], widened: dict[str, str]) -> None:
        self.names = tuple(names)
        self.widened = widened
        self.calls = dict.fromkeys((*names, *widened), 0)
        self._beyond: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._islands: list[_Watched] = []
        self._others: list[tuple[Island, torch.dtype | None]] = []
        self._swap: Swap | None = None

    @property
    def beyond(self) -> dict[str, float]:
        """Islands of a pure half model whose finite output the model's dtype cannot hold: its largest magnitude.

        Cast back, such an output is infinite again: fp32 in that module alone cures nothing.
        """
        found = {name: float(amax) for name, amax in self._beyond.items()}  # the one moment that waits for a device
        return {name: amax for name, amax in found.items() if amax > 0}

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        forget(self._islands)
        for other, dtype in self._others:
            other.dtype = dtype
        self._others.clear()
        if self._swap is not None:
            self._swap.restore()
            self._swap = None

    def _record(self, name: str, amax: Tensor) -> None:
        before = self._beyond.get(name)
        self._beyond[name] = amax if before is None else torch.maximum(before, amax)


class _Watched(Island):
    """An island of a replay: counts its calls, and what its model's dtype cannot hold."""

    def __init__(self, name: str, dtype: torch.dtype | None, report: Islands) -> None:
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
            self._report._record(self._name, amax)  # noqa: SLF001 - its own report
        return result


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def half_tensors(module: nn.Module) -> list[Tensor]:
    """Its fp16 and bf16 parameters and buffers, those below it too."""
    return [tensor for tensor in parameters_and_buffers(module) if tensor.dtype in REDUCED]


def half_dtype(module: nn.Module) -> torch.dtype | None:
    """The half dtype that a module of a half model has; None for one without half parameters."""
    return next((tensor.dtype for tensor in half_tensors(module)), None)


def resolve_islands(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of `names`; ModuleList and ModuleDict stand for their children, for nothing ever calls them.

    Raises:
        UsageError: The model has no such module; the sentence has near names.
    """
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


def widen_islands(
    model: nn.Module, chosen: dict[str, nn.Module], halves: Callable[[nn.Module], list[Tensor]] = half_tensors
) -> dict[str, str]:
    """Modules outside the islands that own a half tensor that an island owns too: name -> the island's name.

    A tied weight that becomes fp32 is fp32 for all its owners, and an owner left outside would mix it with half inputs.
    `halves` tells which tensors of a module count, where other changes have some in fp32 already.
    """
    owner: dict[int, str] = {}
    inside: set[int] = set()

    def take(island: str, module: nn.Module) -> None:
        inside.update(id(sub) for sub in module.modules())
        owner.update({id(tensor): island for tensor in halves(module)})

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
    chosen = resolve_islands(model, names)
    widened = widen_islands(model, chosen)
    modules = dict(model.named_modules())
    islands = Islands(tuple(chosen), widened)
    everything = {**chosen, **{name: modules[name] for name in widened}}
    # Within an island all is fp32: one that lies inside another narrows nothing.
    inside = {inner for module in everything.values() for inner in module.modules() if inner is not module}
    dtypes = {name: None if module in inside else half_dtype(module) for name, module in everything.items()}
    try:
        for module in inside:
            if (other := island_of(module)) is not None:  # one that the model came with
                islands._others.append((other, other.dtype))  # noqa: SLF001 - built here
                other.dtype = None
        halves = [tensor for module in everything.values() for tensor in half_tensors(module)]
        islands._swap = Swap(halves, torch.float32, optimizers)  # noqa: SLF001
        for name, module in everything.items():
            island = _Watched(name, dtypes[name], islands)
            islands._islands.append(island)  # noqa: SLF001
            islands._handles += island.attach(module)  # noqa: SLF001
        yield islands
    finally:
        islands._remove()  # noqa: SLF001
