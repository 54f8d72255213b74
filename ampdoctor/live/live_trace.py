"""The trace of a user's loop, whose models are found when they are called and whose steps end when they end.

A replay has all parts before its first step, and may run the step again. A loop that runs only once, as in a user's
test, is traced from its first op, and its parts appear on the way.
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
from ampdoctor.hooks.scaler_events import ScalerCallbacks, StepEvents
from ampdoctor.hooks.torch_internals import outside_transforms, under_fake_tensors, unseen, unwrapped
from ampdoctor.probes.modules import CalledModules
from ampdoctor.probes.nonfinite import dense, holds_nan, is_mask, is_nonfinite, state_tensors
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.tensor_memory import OriginIds, storage_key

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import ObservedRun
    from ampdoctor.probes.ops import Site


_WRITE_LISTS = frozenset(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))
"""Ops that write into each tensor of a list: under a mode, torch does not raise their version counters."""
_UNCOMPUTED: set[Origin] = {"constant", "data"}
"""Origins of values that no op computed."""


class LiveTrace(OpTraceProbe):
    """Traces ops from `watching` on, until that context ends or `idle` is set; `name_of` is as in `CalledModules`."""

    def __init__(self, name_of: Callable[[nn.Module, Any, bool], str | None]) -> None:
        super().__init__()
        self._sites.modules = CalledModules(name_of)
        self.idle = False  # nothing is checked any more; the hooks stay until `watching` ends
        self._unexplained: set[int] = set()

    @contextmanager
    def watching(self, run: ObservedRun) -> Iterator[None]:
        """Installs the modes and the module hooks, and begins the first step."""
        self._run = run
        with self._sites.attach(run), self.during(0):
            yield

    def met(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds parts with their state to the run; earlier parts may be non-finite now, which is the step's doing."""
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
        """Checks the inputs of a model: a NaN in the data belongs to the data, whatever op produced it.

        So does an infinity that no op computed, unless it is a mask's.
        """
        with unseen():
            for path, tensor in iter_tensors(batch):
                if tensor.grad_fn is not None or self._belongings.owns(tensor) or not is_nonfinite(tensor):
                    continue
                if holds_nan(tensor) or (_is_data(tensor) and self._origins(tensor) <= _UNCOMPUTED):
                    self._disown(tensor)
                    self._belongings.bring(tensor, path)

    def next_step(self, step: int) -> None:
        """Ends a step, and begins the next."""
        with unseen():
            self._sites.next_step()
            self._begin(step)

    def harm(self, sink: str, tensor: torch.Tensor) -> bool:
        """Records a non-finite value under the name of its sink; False where it is finite."""
        if under_fake_tensors():
            return False
        with unseen():
            bad = is_nonfinite(tensor)
            if bad:
                self._harm(sink, tensor)
        return bad

    def behind(self, sink: str, tensors: Iterable[torch.Tensor]) -> tuple[Trace, OriginIds] | None:
        """Returns the trace of the step as if only these tensors were harmed, and the numbers of their origins.

        None where they are finite. They may be wrapped by a function transform, and are not recorded as harmed.
        """
        kept, self._harms = self._harms, {}
        try:
            with outside_transforms():
                bad = [self.harm(sink, unwrapped(tensor)) for tensor in tensors]
            return (self.gathered(), self._harms[sink]) if any(bad) else None
        finally:
            self._harms = kept

    @property
    def asked(self) -> OriginIds:
        """The numbers of the origins of the value that the loop's code read last."""
        return self._readings.asked

    def harm_state(self) -> bool:
        """Records parameters, buffers and optimizer state that have become non-finite; False for none."""
        if under_fake_tensors():
            return False
        with unseen():
            buffers = (t for kind, _, t in state_tensors(self._run) if kind == "buffer" and is_nonfinite(t))
            # a model may make its mask when it is first called
            self._before |= {id(t) for t in buffers if is_mask(t) and self._origins(t) <= {"constant"}}
            return self._harm_state()

    def harm_by_raising(self) -> None:
        """Records the values that the user's code had read when it raised."""
        self._harm_by_raising()

    def gathered(self) -> Trace:
        """Returns the trace of the step so far; values that were written past the dispatcher have no birth."""
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

    def _brought(self, tensor: torch.Tensor, site: Site) -> OriginIds:
        """A non-finite value that no op here made, and that belongs to nothing, came with the data."""
        written = self._belongings.came_finite(tensor)
        unowned = not written and not self._belongings.owns(tensor)
        if unowned and site.phase in ("forward", "loss") and _is_data(tensor):
            self._belongings.bring(tensor, "")
        births = super()._brought(tensor, site)
        if written:
            self._unexplained |= births
        return births

    def _meant(self, births: OriginIds) -> bool:
        """An infinity that was written past the dispatcher is never intended."""
        return not births & self._unexplained and super()._meant(births)

    def _begin(self, step: int) -> None:
        self._unexplained = set()
        super()._begin(step)

    def _take_stock(self) -> None:
        """As in a replay; but optimizer state that is already infinite is sick as soon as a step reads it."""
        super()._take_stock()
        self._before -= {id(t) for kind, _, t in state_tensors(self._run) if kind == "optimizer_state"}

    def _disown(self, tensor: torch.Tensor) -> None:
        """Forgets the origin of a tensor's non-finite values: they came with the run."""
        self._taint.forget(tensor)
        self._given.pop(storage_key(tensor), None)

    def _origins(self, tensor: torch.Tensor) -> set[Origin]:
        """Returns the origins of a tensor's non-finite values; empty where it has not been checked."""
        return {self._births[index].origin for index in self._taint.births(tensor)}


def _is_data(tensor: torch.Tensor) -> bool:
    """Whether its non-finite values are neither a mask's (0 and -inf) nor a single number that the code writes."""
    if not tensor.dim():
        return False
    values = dense(tensor)
    return not is_mask(values) or bool((values[torch.isfinite(values)] != 0).any())


class LiveRun:
    """A `ObservedRun` run that grows. `listener` receives the calls on its scalers and optimizers.

    The first model has the names of its own `named_modules()`; a second one has its class's name before them.
    """

    def __init__(self, listener: ScalerCallbacks) -> None:
        self.model = nn.Module()  # holds all models
        self.optimizers: dict[str, torch.optim.Optimizer] = {}  # by name: "optimizer", then "optimizer2" and so on
        self.events = StepEvents(self._parameters, self.optimizers, listener=listener)  # of the running step
        self.micro_batch = 0  # always: it is not visible whether two backwards are one step
        self.module_names: dict[str, str] = {}
        self.steps: dict[str, int] = {}  # by optimizer: taken or skipped
        self._known: dict[int, str] = {}
        self._made = 0
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def step(self) -> int:
        """The running step: the number of steps of the optimizer with the fewest."""
        return min(self.steps.values(), default=0)

    def name_of(self, module: nn.Module) -> str | None:
        """Returns the name of a known module."""
        return self._known.get(id(module))

    def meet(self, model: nn.Module) -> None:
        """Adds a model with all its modules to the run."""
        inside = {id(module) for module in model.modules()}
        for key, known in list(self.model.named_children()):
            if id(known) in inside:  # a part of the model was called before the model
                delattr(self.model, key)
        self.model.add_module(f"model{self._made}", model)
        self._made += 1
        self._name()

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """Adds the optimizer to the run, and returns its name."""
        for name, known in self.optimizers.items():
            if known is optimizer:
                return name
        name = f"optimizer{len(self.optimizers) + 1}" if self.optimizers else "optimizer"
        self.optimizers[name] = optimizer
        self.steps[name] = 0
        return name

    def knows_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer belongs to the run."""
        return any(known is optimizer for known in self.optimizers.values())

    def parameter_names(self) -> dict[int, str]:
        """As in `ObservedRun`."""
        return names_of_parameters(self.model, self.module_names, self.optimizers)

    def called(self, model: nn.Module) -> None:
        """Notes the parameters with which a model runs now; `functional_call` lends it others for one call."""
        self._lent = {key: lent for key, lent in self._lent.items() if lent() is not None}
        self._lent.update((id(p), weakref.ref(p)) for p in model.parameters())

    def parameters_among(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """Returns the parameters with which a model was called, or which an optimizer holds."""
        names, lent = self.parameter_names(), self._lent
        return [t for t in tensors if id(t) in names or (id(t) in lent and lent[id(t)]() is t)]

    def clean_name(self, name: str) -> str:
        """As in `ObservedRun`."""
        return clean_tensor_name(name, self.module_names)

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields nothing: weights outside the models are not searched for."""
        return iter(())

    def current_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields nothing: a step's batch becomes known when a model is called with it."""
        return iter(())

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Yields the models' parameters, and those that only an optimizer holds, once each."""
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
    """Whether it has parameters or buffers."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def state_of(model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Yields the tensors that these parts add to the run."""
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
