"""Modules and the tensors that they take and return: which module is running, and hooks on gradients at modules."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampdoctor.evidence.run_facts import Place
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.hooks.torch_internals import in_backward, of_transform
from ampdoctor.numerics.tensors import is_plain, is_readable

# -- which module is running, also while activation checkpointing runs a forward again --


class ModuleStack:
    """The modules whose forward is running, innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, int]] = []
        self._calls: Counter[tuple[str, bool]] = Counter()

    def clear(self) -> None:
        self._stack.clear()
        self._calls.clear()

    @property
    def current(self) -> tuple[str, int] | None:
        return self._stack[-1] if self._stack else None

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        scripted: dict[int, str] = {}
        with ExitStack() as stack:
            for name, module in run.model.named_modules():
                clean = run.module_names.get(name, name)
                if isinstance(module, torch.jit.ScriptModule):
                    scripted[id(module)] = clean
                    continue
                stack.callback(module.register_forward_pre_hook(self._enter(clean, module), prepend=True).remove)
                # always_call: checkpointing leaves a forward by an exception once it has recomputed what it needs
                stack.callback(module.register_forward_hook(self._leave(clean, module), always_call=True).remove)
            if scripted:
                self._attach_scripted(scripted, stack)
            yield

    def _attach_scripted(self, names: dict[int, str], stack: ExitStack) -> None:
        """Use global hooks for scripted modules, which take none of their own; calls of their children are not seen."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in names:
                self._enter(names[id(module)], module)(module, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in names:
                self._leave(names[id(module)], module)(module, args, output)

        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)

    def _enter(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any], None]:
        def hook(called: nn.Module, _args: Any) -> None:
            if called is not module:
                return  # a copy of the model (an EMA's deepcopy) has copies of its hooks
            again = in_backward()
            self._stack.append((name, self._calls[name, again]))
            self._calls[name, again] += 1

        return hook

    def _leave(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def hook(called: nn.Module, _args: Any, _output: Any) -> None:
            while called is module and self._stack:
                top, _ = self._stack.pop()
                if top == name:
                    return

        return hook


# -- tensors inside nested values --

_DEPTH = 8  # values nested deeper than this are no outputs of a model but an object graph


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value (mappings, dataclasses, `ModelOutput`, sequences), in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > _DEPTH or isinstance(value, str | bytes | int | float | None):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none of its own (a subclass that wraps others, meta)."""
    if not is_plain(tensor) or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def takes_apart(types: Any, values: Any) -> bool:
    """Whether a tensor subclass has to run this op itself, as ops on its parts, which a mode sees."""
    if all(kind is torch.Tensor or kind is torch.nn.Parameter for kind in types):
        return False
    own = (tensor for tensor in tensors_in(values) if not is_plain(tensor))
    return any(not tensor.is_nested and not hasattr(tensor, "fake_mode") for tensor in own)


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether the values can be checked: floating-point or complex, in memory, readable, of no transform's level."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor._is_zerotensor():
        return False
    return not tensor.is_nested and not of_transform(tensor) and is_readable(tensor)


# -- gradients at outputs and inputs of modules, and at parameters before accumulation --


@dataclass(frozen=True, slots=True)
class LowPrecisionTensors:
    """What has the half format in the half-precision run, by clean name."""

    outputs: frozenset[str]  # modules with an output in the format
    inputs: frozenset[str]  # modules that cast an input to it, or read one that no watched module made
    parameters: frozenset[str]  # cast to the format, or stored in it

    def holds(self, place: Place) -> bool:
        """Whether the tensor at this place is in the half format."""
        if place.part == "parameter":
            return place.name in self.parameters
        return place.name in (self.outputs if place.part == "output" else self.inputs)


OnGradient = Callable[[Place, int, "Tensor"], None]
"""Called with a place, the tensor's index there in the step, and the gradient.

Tensors are numbered in the forward; a gradient that is delivered once more gets a number after them.
"""
OnOutput = Callable[[str, "Tensor"], None]


def observed_modules(run: ObservedRun) -> Iterator[tuple[str, nn.Module]]:
    """(clean name, module) of modules without children, of those with parameters of their own, and of the root."""
    for name, module in run.model.named_modules():
        if not name or not any(module.children()) or owns_parameters(module):
            yield run.module_names.get(name, name), module


def owns_parameters(module: nn.Module) -> bool:
    """Whether it has parameters that belong to no child."""
    return any(True for _ in module.parameters(recurse=False))


def optimizer_parameters(run: ObservedRun) -> Iterator[Tensor]:
    """Yields the parameters that the optimizers hold."""
    return chain.from_iterable(map(parameters_of, run.optimizers.values()))


class GradientHooks:
    """Hooks that pass on every gradient, each time it is delivered, tensor by tensor (in-place modules keep the hooks).

    Of a view that an in-place module overwrites only the later value's gradient is seen. A parameter's is seen as each
    backward delivers it, half and unscaled; input gradients (`inputs`) are what flows through that module alone.
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
        self._counts.clear()
        self._hooked.clear()

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
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
            # A view, so that only what flows back through this module is seen, not the gradients of other readers.
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
                    continue  # passed through: hooked at the module that made it
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
