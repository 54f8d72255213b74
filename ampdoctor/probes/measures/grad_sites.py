"""Where gradients are seen: at the outputs and inputs of modules, and at parameters before they are accumulated."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.ranges import Place
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.probes.ops.tensors import is_watched, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ampdoctor.hooks.interfaces import Watched


@dataclass(frozen=True, slots=True)
class HalfPlan:
    """What has the half format in the half-precision run, by clean name.

    Attributes:
        outputs: Modules with an output in the format.
        inputs: Modules that cast an input to the format, or read one that no watched module made.
        parameters: Parameters that are cast to the format or have it.
    """

    outputs: frozenset[str]
    inputs: frozenset[str]
    parameters: frozenset[str]

    def holds(self, place: Place) -> bool:
        """Is the tensor at this place in the half format?"""
        if place.part == "parameter":
            return place.name in self.parameters
        return place.name in (self.outputs if place.part == "output" else self.inputs)


OnGradient = Callable[[Place, int, "Tensor"], None]
"""Called with the place, the how manieth tensor of it in this step (counted in the forward, and a gradient
that is delivered once more behind them), and the gradient."""
OnOutput = Callable[[str, "Tensor"], None]


def observed_modules(run: Watched) -> Iterator[tuple[str, nn.Module]]:
    """(clean name, module) of modules without children, of those with parameters of their own, and of the root."""
    for name, module in run.model.named_modules():
        if not name or not any(module.children()) or owns_parameters(module):
            yield run.module_names.get(name, name), module


def owns_parameters(module: nn.Module) -> bool:
    """Has it parameters that belong to no child?"""
    return any(True for _ in module.parameters(recurse=False))


class GradientHooks:
    """Hooks that hand on every gradient; module outputs are hooked tensor by tensor (in-place modules survive that).

    What an in-place module overwrites still has its gradient seen, unless it is a view (a linear's output in three
    dimensions is one): autograd then rewrites the history that the hook was part of, and only the gradient of the
    overwritten value is seen.

    A tensor's gradient is seen each time that it is delivered: a second derivative runs through the forward again.

    A parameter's gradient is seen as each backward delivers it: before micro-batches add up, before unscaling and
    clipping, because that is the tensor that was in half precision.

    Args:
        on_gradient: Gets the gradients.
        on_output: Gets the outputs of modules, in the forward.
        inputs: Clean names of the modules whose input gradients are wanted: the part that flows through that module.
    """

    def __init__(
        self, on_gradient: OnGradient, *, on_output: OnOutput | None = None, inputs: frozenset[str] = frozenset()
    ) -> None:
        self._on_gradient = on_gradient
        self._on_output = on_output
        self._inputs = inputs
        self._counts: Counter[Place] = Counter()
        self._hooked: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def clear(self) -> None:
        """A new step begins."""
        self._counts.clear()
        self._hooked.clear()

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """The hooks are in place inside, and gone afterwards."""
        names = run.parameter_names()
        with ExitStack() as stack:
            for name, module in observed_modules(run):
                if name in self._inputs:
                    hook = self._before_forward(Place(name, "activation_grad", "input"))
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                place = Place(name, "activation_grad", "output")
                stack.callback(module.register_forward_hook(self._after_forward(place), always_call=True).remove)
            for parameter in run.model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    at = Place(names[id(parameter)], "weight_grad", "parameter")
                    stack.callback(on_gradient(parameter, self._deliver_parameter(at)).remove)
            try:
                yield
            finally:
                self.clear()

    def _before_forward(self, place: Place) -> Callable[..., Any]:
        def watch(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and is_watched(value) and value.requires_grad):
                return value
            if not torch.is_grad_enabled():
                return value
            # A view, so that only what flows back through this module is seen, not what other readers add.
            seen = value.view_as(value)
            self._watch(place, seen)
            return seen

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return tuple(watch(a) for a in args), {key: watch(v) for key, v in kwargs.items()}

        return hook

    def _after_forward(self, place: Place) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if not is_watched(tensor):
                    continue
                if self._on_output is not None:
                    self._on_output(place.name, tensor)
                known, version = self._hooked.get(id(tensor), (None, 0))
                if known is not None and known() is tensor and version == tensor._version:
                    continue  # handed through: the module that made it has it
                if tensor.requires_grad and torch.is_grad_enabled():
                    self._hooked[id(tensor)] = weakref.ref(tensor), tensor._version
                    self._watch(place, tensor)

        return hook

    def _watch(self, place: Place, tensor: Tensor) -> None:
        first = [self._next(place)]

        def deliver(gradient: Tensor) -> None:
            self._on_gradient(place, first.pop() if first else self._next(place), gradient)

        on_gradient(tensor, deliver)

    def _deliver_parameter(self, place: Place) -> Callable[[Tensor], None]:
        return lambda gradient: self._on_gradient(place, self._next(place), gradient)

    def _next(self, place: Place) -> int:
        self._counts[place] += 1
        return self._counts[place] - 1
