"""Points of a step: a module's output, the gradient that arrives at it, a parameter's gradient.

A search over a step's layers first records the order of its points (names only, no tensor is read), and then goes to
one point at a time, with a hook on that point's module alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.hooks.torch_internals import in_backward, no_modes, sequence_number, sequence_of
from ampdoctor.probes.cheap.nonfinite import trained_parameters
from ampdoctor.probes.halving.flow import Flow
from ampdoctor.probes.ops.exact import is_nonfinite
from ampdoctor.probes.ops.tensors import is_watched, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ampdoctor.hooks.interfaces import Watched

PointKind = Literal["output", "arrival", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment of a step at which tensors can be looked at.

    Attributes:
        kind: A module's `output`, the `arrival` of the gradient of one of its output's tensors, or a parameter's
            `gradient` as it is accumulated.
        name: Of the module, or of the parameter.
        count: How manieth output of that module (gradient of that parameter) in the step; outputs that activation
            checkpointing computes again count for themselves.
        recompute: The output was computed again during a backward.
        tensor: For an arrival: which of the output's tensors.
        firing: For an arrival: how manieth gradient of that tensor (a gradient penalty sends two).
        sequence: For an arrival: autograd's number of the op that made the tensor, counted from the step's start.
        turn: How manieth forward-and-backward of the step it belongs to.
        number: Of the output, in the order probe's `flow`.
    """

    kind: PointKind
    name: str
    count: int
    recompute: bool = False
    tensor: int = 0
    firing: int = 0
    sequence: int | None = None
    turn: int = 0
    number: int = 0


Reached = Callable[[Sequence["Tensor"]], None]
"""Called at a point with the tensors that are there; may raise `StepHalted`."""


class OrderProbe:
    """Records the order of a step's points, up to the first arrival after a given parameter's gradient.

    Nothing but names is looked at. A module that hands on what others returned (a container its last child's output) is
    no point of its own: it adds no op.

    Args:
        gradients: Gradients after which the order is long enough; None for the whole step.

    Attributes:
        points: In the order of execution.
        flow: Which outputs flow into which.
    """

    def __init__(self, gradients: int | None) -> None:
        self._wanted = gradients
        self.flow = Flow()
        self.points: list[Point] = []
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._gradients: Counter[str] = Counter()
        self._last: list[tuple[Tensor, int]] = []
        self._turn = 0
        self._in_turns_backward = False

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks on all modules and on the parameters that the optimizers hold."""
        names = run.parameter_names()
        trained = trained_parameters(run)
        with ExitStack() as stack:
            for name, module in run.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule) or ".parametrizations." in f".{name}.":
                    # the one takes no hooks; the other works on weights, beside what flows through the layers: the
                    # interval that it lies in is traced op by op
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
                self.flow.forget_graph()

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Sequence numbers count from here."""
        self._base = sequence_number()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """Nothing is left to do."""

    def _on_output(self, name: str, module: nn.Module, stack: ExitStack) -> Callable[[nn.Module, Any, Any], None]:
        def hook(called: nn.Module, _args: Any, output: Any) -> None:
            if called is not module:
                return  # a copy of the model (an EMA's deepcopy) has copies of its hooks
            recompute = in_backward()
            count = self._counts[name, recompute]
            self._counts[name, recompute] += 1
            tensors = [tensor for tensor in tensors_in(output) if is_watched(tensor)]
            last = [(tensor, tensor._version) for tensor in tensors]
            known = {(id(tensor), version) for tensor, version in self._last}
            new = [not self.flow.has(tensor) and (id(tensor), version) not in known for tensor, version in last]
            if not any(new):
                return  # also of a module that returns no floating-point tensor
            self._last = last
            if not recompute and self._in_turns_backward:
                self._turn, self._in_turns_backward = self._turn + 1, False
            point = Point(
                kind="output",
                name=name,
                count=count,
                recompute=recompute,
                turn=self._turn,
                number=self.flow.add(tensors),
            )
            self.points.append(point)
            for index, tensor in enumerate(tensors):
                if new[index] and tensor.requires_grad and torch.is_grad_enabled():
                    handle = on_gradient(tensor, self._on_arrival(point, index, tensor))
                    if tensor.is_leaf:  # a module that hands out a parameter: the hook does not die with the graph
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


class PointProbe:
    """Looks at one point and ends the step there.

    Args:
        point: Where.

    Attributes:
        bad: Something is non-finite there; None where the step did not get there.
    """

    def __init__(self, point: Point) -> None:
        self._point = point
        self.bad: bool | None = None

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """One hook, at the point."""
        with at_point(run, self._point, self._look):
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Nothing but the hook."""
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """Nothing is left to do."""

    def _look(self, tensors: Sequence[Tensor]) -> None:
        self.bad = any(map(is_nonfinite, tensors))
        raise StepHalted


@contextmanager
def at_point(run: Watched, point: Point, reached: Reached) -> Iterator[None]:
    """While the context lives, one step calls `reached` at a point, out of sight of the modes that watch ops.

    Args:
        run: Its model is hooked: the point's module or parameter, nothing else.
        point: Where.
        reached: What to do there.
    """

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
