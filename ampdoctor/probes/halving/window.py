"""An interval of a step between two points: traced op by op, and ended there or followed to the harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.trace import Birth
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.hooks.torch_internals import Backward, in_backward, no_modes, seen_backwards, sequence_number
from ampdoctor.probes.cheap.nonfinite import is_mask
from ampdoctor.probes.halving.points import Point, Reached, at_point
from ampdoctor.probes.ops.exact import is_nonfinite
from ampdoctor.probes.ops.naming import kernel_name
from ampdoctor.probes.ops.tensors import takes_apart, tensors_in
from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.probes.trace.taint import NONE, Births, union

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.hooks.interfaces import Watched
    from ampdoctor.probes.ops.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Part of a step.

    Attributes:
        after: The point with which it begins; None for the step's start.
        until: The point with which it ends; None for the first backward after `after` whose loss is non-finite.
        oldest: Autograd's number of the earliest forward op whose derivative may run in it, exclusive.
        newest: And of the latest, inclusive; below `oldest` where it lies in a forward.
    """

    after: Point | None
    until: Point | None
    oldest: float = math.inf
    newest: float = -math.inf


class _Gate:
    """Knows whether the running step is inside an interval; tells when it gets to the end.

    A derivative goes wrong where its forward op left its domain, so the forward ops of an interval of a backward belong
    to it.
    """

    def __init__(self, interval: Interval, ended: Reached) -> None:
        self._interval = interval
        self._ended = ended
        self._inside = False
        self._base = 0

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks at the two ends, and at nothing between."""
        with ExitStack() as stack:
            for point, reached in ((self._interval.after, self._begin), (self._interval.until, self._end)):
                if point is not None:
                    stack.enter_context(at_point(run, point, reached))
            yield

    @contextmanager
    def during(self) -> Iterator[None]:
        """The step begins; where the interval ends with the loss, each backward is asked for its own."""
        self._inside = self._interval.after is None
        self._base = sequence_number()
        if self._interval.until is not None:
            yield
            return

        def begins(backward: Backward, run: Callable[[], Any]) -> Any:
            if self._inside:
                losses = [root for root in backward.roots if isinstance(root, torch.Tensor)]
                with torch._C.DisableTorchFunction(), no_modes():
                    # an inner backward (a gradient penalty) of what is finite yet is part of the loss
                    outermost = backward.accumulated and not in_backward()
                    if outermost or any(map(is_nonfinite, losses)):
                        self._end(losses)
            return run()

        with seen_backwards(begins):
            yield

    def is_open(self) -> bool:
        """Does the op that is being dispatched belong to the interval?"""
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
    """Traces the ops of one interval, and ends the step with it, or follows what was born there to the step's end.

    Args:
        interval: Which.
        follow: Go on after the interval, and look at those ops only that read what descends from its births.

    Attributes:
        reached: The births that the non-finite tensors at the interval's end descend from, in the order of the ops.
    """

    def __init__(self, interval: Interval, *, follow: bool = False) -> None:
        super().__init__()
        self._gate = _Gate(interval, self._at_the_end)
        self._follow = follow
        self._opened = False
        self._micro_batch = 0
        self.reached: tuple[Birth, ...] = ()

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """The trace's own hooks, and those at the ends."""
        with super().attach(run), self._gate.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The modes are on, for the names of all ops and a look at those of the interval."""
        with super().during(step), self._gate.during():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_apart(types, (args, kwargs)):
            return NotImplemented
        if self._gate.is_open():
            self._opened = True
            return super().__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            if self._opened:
                inputs = list(tensors_in([args, kwargs]))
                if self._follow and any(self._taint.births(tensor) for tensor in inputs):
                    return super().__torch_dispatch__(func, types, args, kwargs)
            self._sites.of(kernel_name(func))
            self._ops += 1
            return func(*args, **kwargs)

    def _brought(self, tensor: Tensor, site: Site) -> Births:
        """Beside what is followed, a mask is no ancestor of note, nor what another micro-batch adds to it."""
        if not self._gate.is_open() and (is_mask(tensor) or site.micro_batch != self._micro_batch):
            return NONE
        return super()._brought(tensor, site)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._opened:
            super()._on_gradient(parameter)

    def _at_the_end(self, tensors: Sequence[Tensor]) -> None:
        origins = union(self._taint.births(tensor) for tensor in tensors if is_nonfinite(tensor))
        self.reached = tuple(self._births[index] for index in sorted(origins))
        self._micro_batch = self._run.micro_batch
        if not self._follow:
            raise StepHalted


class UpdateTrace(OpTraceProbe):
    """Traces what follows the backward: unscaling, clipping, the optimizers' steps, the user's own updates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if takes_apart(types, (args, kwargs)):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            phase = self._sites.of(kernel_name(func)).phase
        if phase in ("optimizer", "scaler"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._ops += 1
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))

    def _on_gradient(self, parameter: Tensor) -> None:
        """Gradients are finite here, or this is not where to look."""
