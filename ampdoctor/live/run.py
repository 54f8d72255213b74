"""What is known of a training loop that is somebody else's: its models, optimizers and scaler, as they are met."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.names import clean_names, clean_tensor_name, names_of_parameters
from ampdoctor.hooks.scaler_events import Listener, StepEvents


class LiveRun:
    """A `Watched` run that grows.

    The first model has the names of its own `named_modules()`; a second one has its class's name before them.

    Args:
        listener: Told of the calls on its scalers and optimizers.

    Attributes:
        model: Holds all models that were met.
        optimizers: By name: "optimizer", then "optimizer2" and so on.
        events: The calls of the running step.
        micro_batch: Always 0: only a loop itself knows whether two backwards are one step.
        module_names: As in `Watched`.
        steps: Of each optimizer, those that it took or that a scaler skipped.
    """

    def __init__(self, listener: Listener) -> None:
        self.model = nn.Module()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.events = StepEvents(self._parameters, self.optimizers, listener=listener)
        self.micro_batch = 0
        self.module_names: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self._known: dict[int, str] = {}
        self._made = 0
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def step(self) -> int:
        """The running step: as many as the optimizer that has taken fewest has behind it."""
        return min(self.steps.values(), default=0)

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was met."""
        return self._known.get(id(module))

    def meet(self, model: nn.Module) -> None:
        """Another model belongs to the run, and with it all its modules."""
        inside = {id(module) for module in model.modules()}
        for key, known in list(self.model.named_children()):
            if id(known) in inside:  # a part of the model was called before the model was
                delattr(self.model, key)
        self.model.add_module(f"model{self._made}", model)
        self._made += 1
        self._name()

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """The optimizer's name; it belongs to the run from now on."""
        for name, known in self.optimizers.items():
            if known is optimizer:
                return name
        name = f"optimizer{len(self.optimizers) + 1}" if self.optimizers else "optimizer"
        self.optimizers[name] = optimizer
        self.steps[name] = 0
        return name

    def knows_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """It was met."""
        return any(known is optimizer for known in self.optimizers.values())

    def parameter_names(self) -> dict[int, str]:
        """As in `Watched`."""
        return names_of_parameters(self.model, self.module_names, self.optimizers)

    def called(self, model: nn.Module) -> None:
        """A model runs with the parameters that it has now; `functional_call` lends it others for one call."""
        self._lent = {key: lent for key, lent in self._lent.items() if lent() is not None}
        self._lent.update((id(p), weakref.ref(p)) for p in model.parameters())

    def parameters_among(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """Those that a model was called with as its parameters, or an optimizer holds."""
        names, lent = self.parameter_names(), self._lent
        return [t for t in tensors if id(t) in names or (id(t) in lent and lent[id(t)]() is t)]

    def clean_name(self, name: str) -> str:
        """As in `Watched`."""
        return clean_tensor_name(name, self.module_names)

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: what a loop keeps beside its models is not looked for."""
        return iter(())

    def current_tensors(self) -> Iterator[tuple[str, Any]]:
        """Nothing: which batch a step has is seen when a model is called with it."""
        return iter(())

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Each once: the models', and those that only an optimizer holds."""
        held = (
            p for optimizer in self.optimizers.values() for group in optimizer.param_groups for p in group["params"]
        )
        yield from {id(p): p for p in (*self.model.parameters(), *held)}.values()

    def _name(self) -> None:
        self.module_names.clear()
        self._known.clear()
        taken: set[str] = set()
        for key, model in self.model.named_children():
            first = not taken
            prefix = "" if first else _unique(type(model).__name__, taken)
            taken.add(prefix)
            names = clean_names(model)
            for raw, module in model.named_modules(remove_duplicate=False):
                shown = ".".join(part for part in (prefix, names[raw]) if part)
                self.module_names[f"{key}.{raw}" if raw else key] = shown
                self._known.setdefault(id(module), shown)


def has_state(module: nn.Module) -> bool:
    """It has tensors of its own."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def state_of(model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The tensors that these parts bring into the run."""
    if model is not None:
        yield from model.parameters()
        yield from model.buffers()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _unique(name: str, taken: set[str]) -> str:
    count = 1
    while (candidate := name if count == 1 else f"{name}{count}") in taken:
        count += 1
    return candidate
