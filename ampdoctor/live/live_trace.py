"""The trace of a loop that is somebody else's: its models are met when they are called, its steps end when they end.

A replay knows its parts before its first step and may run the step again. A loop that runs only once, as in a user's
test, is traced from its first op on, and what it turns out to be made of is learned on the way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ampdoctor.evidence.trace import Origin, Trace
from ampdoctor.hooks.names import clean_names, clean_tensor_name, names_of_parameters
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.hooks.scaler_events import Listener, StepEvents
from ampdoctor.hooks.torch_internals import outside_transforms, under_fake_tensors, unseen, unwrapped
from ampdoctor.probes.modules import CalledModules
from ampdoctor.probes.nonfinite import dense, holds_nan, is_mask, is_nonfinite, state_tensors
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.tensor_memory import Births, storage_key

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import Watched
    from ampdoctor.probes.ops import Site


_WRITE_LISTS = frozenset(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))
"""Ops that write into each tensor of a list: under a mode torch forgets to count that as a change of them."""
_UNCOMPUTED: set[Origin] = {"constant", "data"}
"""Origins of what no op computed."""


class LiveTrace(OpTraceProbe):
    """Traces ops from `watching` on, until that context ends or `idle` is set.

    Args:
        name_of: As in `CalledModules`.

    Attributes:
        idle: Nothing is looked at any more; the hooks stay until `watching` ends.
    """

    def __init__(self, name_of: Callable[[nn.Module, Any, bool], str | None]) -> None:
        super().__init__()
        self._sites.modules = CalledModules(name_of)
        self.idle = False
        self._unexplained: set[int] = set()

    @contextmanager
    def watching(self, run: Watched) -> Iterator[None]:
        """The modes and the module hooks are in place, with the first step begun."""
        self._run = run
        with self._sites.attach(run), self.during(0):
            yield

    def met(self, tensors: Iterable[torch.Tensor]) -> None:
        """The run has more parts than before.

        Args:
            tensors: The state of the new parts. What was met earlier in this step may be non-finite since, which is
                the step's own doing.
        """
        with unseen():
            before, unread, known = self._before, self._unread, self._belongings
            self._sites.take_names()
            self._take_stock()
            self._belongings.follow(known)
            new = {id(t) for t in tensors if not known.knows(t)}
            self._before = before | self._before & new
            self._unread = unread | self._unread & new
            for tensor in self._belongings.nonfinite:
                if id(tensor) in new and self._origins(tensor) <= _UNCOMPUTED:
                    self._disown(tensor)

    def given(self, batch: Any) -> None:
        """A model is called with what it did not make: a NaN in it is the data's, whatever op put it there.

        So is an infinity that no op computed, but for a mask's.
        """
        with unseen():
            for path, tensor in iter_tensors(batch):
                if tensor.grad_fn is not None or self._belongings.owns(tensor) or not is_nonfinite(tensor):
                    continue
                if holds_nan(tensor) or (_is_data(tensor) and self._origins(tensor) <= _UNCOMPUTED):
                    self._disown(tensor)
                    self._belongings.bring(tensor, path)

    def next_step(self, step: int) -> None:
        """A step is over, and another one begins."""
        with unseen():
            self._sites.next_step()
            self._begin(step)

    def harm(self, sink: str, tensor: torch.Tensor) -> bool:
        """Note a harmed value under the name of its sink; False where it is finite."""
        if under_fake_tensors():
            return False
        with unseen():
            bad = is_nonfinite(tensor)
            if bad:
                self._harm(sink, tensor)
        return bad

    def behind(self, sink: str, tensors: Iterable[torch.Tensor]) -> tuple[Trace, Births] | None:
        """What was seen of the step, with these as all that is harmed, though none of them counts as harmed yet.

        Args:
            sink: What they are.
            tensors: As they are, or as a function transform wraps them.

        Returns:
            The trace, and the numbers of what they descend from; None where they are finite.
        """
        kept, self._harms = self._harms, {}
        try:
            with outside_transforms():
                bad = [self.harm(sink, unwrapped(tensor)) for tensor in tensors]
            return (self.gathered(), self._harms[sink]) if any(bad) else None
        finally:
            self._harms = kept

    @property
    def asked(self) -> Births:
        """The numbers of what the loop's code has looked at last."""
        return self._readings.asked

    def harm_state(self) -> bool:
        """Note parameters, buffers and optimizer state that are non-finite and were not so before; False for none."""
        if under_fake_tensors():
            return False
        with unseen():
            buffers = (t for kind, _, t in state_tensors(self._run) if kind == "buffer" and is_nonfinite(t))
            # a model may make its mask when it is first called
            self._before |= {id(t) for t in buffers if is_mask(t) and self._origins(t) <= {"constant"}}
            return self._harm_state()

    def harm_by_raising(self) -> None:
        """Note what the user's code had looked at when it raised."""
        self._harm_by_raising()

    def gathered(self) -> Trace:
        """What was seen of the step so far; what was written past the dispatcher has no birth."""
        trace, unexplained = self._gathered(), self._unexplained
        seen = tuple(birth for index, birth in enumerate(trace.births) if index not in unexplained)
        lost = tuple(sink for sink, origins in self._harms.items() if origins <= unexplained and sink != "raised")
        return replace(trace, births=seen, unattributed=lost)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.idle or under_fake_tensors():
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        if func.namespace == "aten" and func.overloadpacket.__name__ in _WRITE_LISTS:
            for tensor in args[0]:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        return result

    def _brought(self, tensor: torch.Tensor, site: Site) -> Births:
        """What is non-finite, was made by no op here and belongs to nothing came with the data."""
        written = self._belongings.came_finite(tensor)
        unowned = not written and not self._belongings.owns(tensor)
        if unowned and site.phase in ("forward", "loss") and _is_data(tensor):
            self._belongings.bring(tensor, "")
        births = super()._brought(tensor, site)
        if written:
            self._unexplained |= births
        return births

    def _meant(self, births: Births) -> bool:
        """No infinity is meant that was written past the dispatcher."""
        return not births & self._unexplained and super()._meant(births)

    def _begin(self, step: int) -> None:
        self._unexplained = set()
        super()._begin(step)

    def _take_stock(self) -> None:
        """As in a replay; but a moment that is infinite already is sick as soon as a step reads it."""
        super()._take_stock()
        self._before -= {id(t) for kind, _, t in state_tensors(self._run) if kind == "optimizer_state"}

    def _disown(self, tensor: torch.Tensor) -> None:
        """What put the non-finite values there is no culprit: they came with the run."""
        self._taint.forget(tensor)
        self._given.pop(storage_key(tensor), None)

    def _origins(self, tensor: torch.Tensor) -> set[Origin]:
        """How what is non-finite in it came into this step; nothing where it has not been looked at."""
        return {self._births[index].origin for index in self._taint.births(tensor)}


def _is_data(tensor: torch.Tensor) -> bool:
    """Non-finite values of it are no mask's (0 and -inf), and no single number that the code writes."""
    if not tensor.dim():
        return False
    values = dense(tensor)
    return not is_mask(values) or bool((values[torch.isfinite(values)] != 0).any())


# What is known of a training loop that is somebody else's: its models, optimizers and scaler, as they are met.


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
