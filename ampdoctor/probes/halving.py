"""Bisects a step: records its points in order, checks one a replay, and traces the interval between two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ampdoctor.evidence.trace import NonFiniteOrigin
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.hooks.interfaces import ObservedRun, StepHalted
from ampdoctor.hooks.torch_internals import (
    Backward,
    in_backward,
    no_modes,
    seen_backwards,
    sequence_number,
    sequence_of,
)
from ampdoctor.probes.modules import is_watched, tensors_in
from ampdoctor.probes.nonfinite import any_nonfinite, is_mask, is_nonfinite, trained_parameters
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.probes.ops import Probe, Site
from ampdoctor.probes.tensor_memory import NONE, OriginIds, union

# -- points of a step --
#
# A search over a step's layers first records the order of its points (names only, no tensor is read). Then each replay
# checks one point, with a hook on that point's module alone.

PointKind = Literal["output", "arrival", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment of a step at which tensors can be checked.

    The kinds are a module's `output`, the `arrival` of the gradient of one tensor of that output, and a parameter's
    `gradient` as it is accumulated. `name` is that of the module or parameter.
    """

    kind: PointKind
    name: str
    count: int  # index among the module's outputs (parameter's gradients) of the step; recomputed ones apart
    recompute: bool = False  # computed again during a backward (activation checkpointing)
    tensor: int = 0  # for an arrival, as the next two: index of the output's tensor
    firing: int = 0  # index among the gradients of that tensor (a gradient penalty sends two)
    sequence: int | None = None  # autograd's number of the op that made the tensor, counted from the step's start
    turn: int = 0  # index of the forward-and-backward within the step


Reached = Callable[[Sequence["Tensor"]], None]  # called at a point with the tensors there; may raise `StepHalted`


class OrderProbe(Probe):
    """Records `points` in their order, up to the first arrival after `gradients` gradients (None: the whole step)."""

    def __init__(self, gradients: int | None) -> None:
        self._wanted = gradients
        self._made: set[tuple[Any, int]] = set()  # autograd's names of the outputs' tensors
        self.points: list[Point] = []
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._gradients: Counter[str] = Counter()
        self._last: list[tuple[Tensor, int]] = []
        self._turn = 0
        self._in_turns_backward = False

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        names = run.parameter_names()
        trained = trained_parameters(run)
        with ExitStack() as stack:
            for name, module in run.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule) or ".parametrizations." in f".{name}.":
                    # the first takes no hooks; the second works on weights, not on what flows through the layers.
                    # The interval around it is traced op by op.
                    continue
                clean = run.module_names.get(name, name)
                stack.callback(module.register_forward_hook(self._on_output(clean, module, stack)).remove)
            for parameter in run.model.parameters():
                if parameter.requires_grad and parameter.is_leaf and id(parameter) in trained:
                    hook = self._on_gradient(names[id(parameter)])
                    stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            try:
                yield
            finally:
                self._last.clear()
                self._made.clear()

    def begin(self) -> None:
        self._base = sequence_number()

    def _on_output(self, name: str, module: nn.Module, stack: ExitStack) -> Callable[[nn.Module, Any, Any], None]:
        def hook(called: nn.Module, _args: Any, output: Any) -> None:
            if called is not module:
                return  # a copy of the model (an EMA's deepcopy) has copies of its hooks
            recompute = in_backward()
            count = self._counts[name, recompute]
            self._counts[name, recompute] += 1
            tensors = [tensor for tensor in tensors_in(output) if is_watched(tensor)]
            last = [(tensor, tensor._version) for tensor in tensors]
            seen = [(id(tensor), version) for tensor, version in last]
            known = {(id(tensor), version) for tensor, version in self._last}
            made = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
            new = [here not in self._made and old not in known for here, old in zip(made, seen, strict=True)]
            if not any(new):
                return  # or the module returns no floating-point tensor
            self._last = last
            self._made |= {here for here in made if here[0] is not None}
            if not recompute and self._in_turns_backward:
                self._turn, self._in_turns_backward = self._turn + 1, False
            point = Point(kind="output", name=name, count=count, recompute=recompute, turn=self._turn)
            self.points.append(point)
            for index, tensor in enumerate(tensors):
                if new[index] and tensor.requires_grad and torch.is_grad_enabled():
                    handle = on_gradient(tensor, self._on_arrival(point, index, tensor))
                    if tensor.is_leaf:  # the module returns a parameter: its hook outlives the graph
                        stack.callback(handle.remove)

        return hook

    def _on_arrival(self, output: Point, index: int, tensor: Tensor) -> Callable[[Tensor], None]:
        node = tensor.grad_fn
        sequence = None if node is None else sequence_of(node) - self._base
        firings = 0

        def hook(_gradient: Tensor) -> None:
            nonlocal firings
            self._in_turns_backward = True
            self.points.append(
                replace(output, kind="arrival", tensor=index, firing=firings, sequence=sequence, turn=self._turn)
            )
            firings += 1
            if self._wanted is not None and sum(self._gradients.values()) >= self._wanted:
                raise StepHalted

        return hook

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            self._in_turns_backward = True
            self.points.append(Point(kind="gradient", name=name, count=self._gradients[name], turn=self._turn))
            self._gradients[name] += 1

        return hook


class PointProbe(Probe):
    """Checks one point and ends the step there; `bad` is whether a value there is non-finite (None: never reached)."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self.bad: bool | None = None

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with at_point(run, self._point, self._look):
            yield

    def _look(self, tensors: Sequence[Tensor]) -> None:
        self.bad = any_nonfinite(tensors)
        raise StepHalted


@contextmanager
def at_point(run: ObservedRun, point: Point, reached: Reached) -> Iterator[None]:
    """While the context is open, a step calls `reached` at a point, hidden from the modes that watch ops."""

    def arrived(tensors: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunction(), no_modes():
            reached(tensors)

    with ExitStack() as stack:
        if point.kind == "gradient":
            names = run.parameter_names()
            for parameter in run.model.parameters():
                if names[id(parameter)] == point.name and parameter.requires_grad and parameter.is_leaf:
                    hook = _nth_gradient(point, arrived)
                    stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        else:
            for name, module in run.model.named_modules():
                if run.module_names.get(name, name) == point.name:
                    hooked = module.register_forward_hook(_nth_output(module, point, arrived, stack))
                    stack.callback(hooked.remove)
        yield


def _nth_gradient(point: Point, arrived: Reached) -> Callable[[Tensor], None]:
    seen = 0

    def hook(parameter: Tensor) -> None:
        nonlocal seen
        if parameter.grad is None:
            return
        if seen == point.count:
            arrived([parameter.grad])
        seen += 1

    return hook


def _nth_output(
    module: nn.Module, point: Point, arrived: Reached, stack: ExitStack
) -> Callable[[nn.Module, Any, Any], None]:
    seen = 0
    firings = 0

    def on_arrival(gradient: Tensor) -> None:
        nonlocal firings
        if firings == point.firing:
            arrived([gradient])
        firings += 1

    def hook(called: nn.Module, _args: Any, output: Any) -> None:
        nonlocal seen
        if called is not module or in_backward() != point.recompute:
            return
        here, seen = seen == point.count, seen + 1
        if not here:
            return
        tensors = [tensor for tensor in tensors_in(output) if is_watched(tensor)]
        if point.kind == "output":
            arrived(tensors)
        elif point.tensor < len(tensors) and tensors[point.tensor].requires_grad:
            handle = on_gradient(tensors[point.tensor], on_arrival)
            if tensors[point.tensor].is_leaf:
                stack.callback(handle.remove)

    return hook


# -- tracing an interval between two points --


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Part of a step, from `after` (None: its start) to `until` (None: the first backward of a non-finite loss).

    `oldest` (exclusive) and `newest` (inclusive) bound autograd's numbers of forward ops whose derivatives run in it.
    """

    after: Point | None
    until: Point | None
    oldest: float = math.inf
    newest: float = -math.inf


class _Gate:
    """Tracks whether the running step is inside an interval, with its derivatives' forward ops, and calls `ended`."""

    def __init__(self, interval: Interval, ended: Reached) -> None:
        self._interval = interval
        self._ended = ended
        self._inside = False
        self._base = 0

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with ExitStack() as stack:
            for point, reached in ((self._interval.after, self._begin), (self._interval.until, self._end)):
                if point is not None:
                    stack.enter_context(at_point(run, point, reached))
            yield

    @contextmanager
    def during(self) -> Iterator[None]:
        """Begin the step; where the interval ends with the loss, check the losses of each backward."""
        self._inside = self._interval.after is None
        self._base = sequence_number()
        if self._interval.until is not None:
            yield
            return

        def begins(backward: Backward, run: Callable[[], Any]) -> Any:
            if self._inside:
                losses = [root for root in backward.roots if isinstance(root, torch.Tensor)]
                with torch._C.DisableTorchFunction(), no_modes():
                    # an inner backward (a gradient penalty) whose losses are finite is part of the loss
                    outermost = backward.accumulated and not in_backward()
                    if outermost or any_nonfinite(losses):
                        self._end(losses)
            return run()

        with seen_backwards(begins):
            yield

    def is_open(self) -> bool:
        """Whether the op that is being dispatched belongs to the interval."""
        if self._inside:
            return True
        interval = self._interval
        if interval.newest <= interval.oldest or (in_backward() and not torch.is_grad_enabled()):
            return False
        return interval.oldest < sequence_number() - self._base <= interval.newest

    def _begin(self, _tensors: Sequence[Tensor]) -> None:
        self._inside = True

    def _end(self, tensors: Sequence[Tensor]) -> None:
        self._inside = False
        self._ended(tensors)


class IntervalTrace(OpTraceProbe):
    """Traces an interval and ends the step, or follows the descendants; `reached` are the origins at its end."""

    def __init__(self, interval: Interval, *, follow: bool = False) -> None:
        super().__init__()
        self._gate = _Gate(interval, self._at_the_end)
        self._follow = follow
        self._opened = False
        self._micro_batch = 0
        self.reached: tuple[NonFiniteOrigin, ...] = ()

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with super().attach(run), self._gate.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Switch the modes on: all ops are named, those of the interval are checked."""
        with super().during(step), self._gate.during():
            yield

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if self._gate.is_open():
            self._opened = True
        elif not (self._opened and self._follow and any(map(self._taint.origins, tensors_in([args, kwargs])))):
            self._ops += 1
            return func(*args, **kwargs)
        return super().on_op(site, func, args, kwargs)

    def _brought(self, tensor: Tensor, site: Site) -> OriginIds:
        """Outside the interval, ignore masks and what another micro-batch adds to a followed value."""
        if not self._gate.is_open() and (is_mask(tensor) or site.micro_batch != self._micro_batch):
            return NONE
        return super()._brought(tensor, site)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._opened:
            super()._on_gradient(parameter)

    def _at_the_end(self, tensors: Sequence[Tensor]) -> None:
        found = union(self._taint.origins(tensor) for tensor in tensors if is_nonfinite(tensor))
        self.reached = tuple(self._origins[index] for index in sorted(found))
        self._micro_batch = self._run.micro_batch
        if not self._follow:
            raise StepHalted


class UpdateTrace(OpTraceProbe):
    """Traces what follows the backward: unscaling, clipping, the optimizers' steps, the user's own updates."""

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if site.phase in ("optimizer", "scaler"):
            return super().on_op(site, func, args, kwargs)
        self._ops += 1
        return func(*args, **kwargs)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Do nothing: a search over the update assumes finite gradients."""
