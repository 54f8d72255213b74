"""Which tensors of a run are in the half format: seen in one half-precision step, not guessed from module types."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.probes.measures.grad_sites import HalfPlan, observed_modules, owns_parameters
from ampdoctor.probes.ops.tensors import memory_of, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ampdoctor.hooks.interfaces import Watched

HALVES = (torch.float16, torch.bfloat16)
_CAST = torch.ops.aten._to_copy.default  # the op that a cast is


class HalfProbe:
    """Records the dtypes of module inputs and outputs, and the parameters that autocast casts, over a replayed step.

    Attributes:
        loss_in_half: The step's loss has the half format and a dimension, so that scaling it does not promote it.
    """

    def __init__(self) -> None:
        self.loss_in_half = False
        self._outputs: set[str] = set()
        self._inputs: set[str] = set()
        self._parameters: set[str] = set()
        self._made: dict[int, weakref.ref[Tensor]] = {}

    @property
    def plan(self) -> HalfPlan:
        """What was seen so far."""
        return HalfPlan(frozenset(self._outputs), frozenset(self._inputs), frozenset(self._parameters))

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks on the observed modules; parameters that are half themselves need no cast."""
        names = run.parameter_names()
        self._storages: dict[int, str] = {}
        for parameter in run.model.parameters():
            name = names[id(parameter)]
            if parameter.dtype in HALVES:
                self._parameters.add(name)
            elif memory := memory_of(parameter):
                self._storages[memory] = name
        with ExitStack() as stack:
            for name, module in observed_modules(run):
                stack.callback(module.register_forward_hook(self._hook(name), always_call=True).remove)
            yield

    def during(self, step: int) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam's signature
        """Watch for casts of parameters: the op has the parameter's own storage as its input."""
        self._made.clear()
        return _Casts(self._storages, self._parameters)

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """A 0-dim half loss times the scale is fp32; one of shape [1] stays half (as torch promotes them)."""
        self._made.clear()
        if isinstance(loss, torch.Tensor):
            self.loss_in_half = self.loss_in_half or (loss.dtype in HALVES and loss.dim() > 0)

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made = [tensor for tensor in tensors_in(output) if tensor.dtype in HALVES]
            if not made:
                return
            self._outputs.add(name)
            if owns_parameters(module) and any(self._unseen(tensor) for tensor in tensors_in(args)):
                self._inputs.add(name)
            for tensor in made:
                self._made[id(tensor)] = weakref.ref(tensor)

        return hook

    def _unseen(self, tensor: Tensor) -> bool:
        """Wider than half (then the module casts it), or half but made where no module is watched."""
        if not tensor.is_floating_point() or not tensor.requires_grad:
            return False
        known = self._made.get(id(tensor))
        return tensor.dtype not in HALVES or known is None or known() is not tensor


class _Casts(TorchDispatchMode):
    def __init__(self, storages: dict[int, str], found: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._storages = storages
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is _CAST and options.get("dtype") in HALVES:
            name = self._storages.get(memory_of(args[0]))
            if name is not None:
                self._found.add(name)
        return func(*args, **options)
