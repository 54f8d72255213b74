"""An interval of a step between two points: traced op by op and ended there, or lived through without its births."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampdoctor.evidence.trace import Birth
from ampdoctor.probes.modules import in_backward
from ampdoctor.probes.naming import UNINITIALISED, kernel_name
from ampdoctor.probes.nonfinite import state_tensors
from ampdoctor.probes.op_trace import OpTraceProbe, is_nonfinite
from ampdoctor.probes.points import Point, Reached, at_point, sequence_number
from ampdoctor.probes.taint import storage_key, union
from ampdoctor.probes.tensors import is_watched, tensors_in
from ampdoctor.replay.halt import StepHalted

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.replay.session import Session


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
    """Knows whether the running step is inside an interval; tells when it gets to the end, and what each loss was.

    A derivative goes wrong where its forward op left its domain, so the forward ops of an interval of a backward belong
    to it.
    """

    def __init__(self, interval: Interval, ended: Reached, lost: Reached) -> None:
        self._interval = interval
        self._ended = ended
        self._lost = lost
        self._inside = False
        self._base = 0

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """Hooks at the two ends, and at nothing between."""
        with ExitStack() as stack:
            for point, reached in ((self._interval.after, self._begin), (self._interval.until, self._end)):
                if point is not None:
                    stack.enter_context(at_point(session, point, reached))
            yield

    @contextmanager
    def during(self) -> Iterator[None]:
        """The step begins; each backward is asked for its loss."""
        self._inside = self._interval.after is None
        self._base = sequence_number()
        engine = getattr(torch.autograd, "_engine_run_backward", None)
        if engine is None:  # a private name: without it an interval that ends with a loss ends with the step
            yield
            return

        def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            losses = [root for root in roots if isinstance(root, torch.Tensor)]
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                # an inner backward (a gradient penalty) of what is finite yet is part of the loss
                outermost = bool(kwargs.get("accumulate_grad")) and not in_backward()
                if self._inside and self._interval.until is None and (outermost or any(map(is_nonfinite, losses))):
                    self._end(losses)
                if outermost:
                    self._lost(losses)
            return engine(roots, *args, **kwargs)

        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined,assignment]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]

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
    """Traces the ops of one interval, and ends the step with it.

    Args:
        interval: Which.

    Attributes:
        ended: The step got to the interval's end.
        reached: The births that the non-finite tensors at the interval's end descend from, in the order of the ops.
    """

    def __init__(self, interval: Interval) -> None:
        super().__init__()
        self._gate = _Gate(interval, self._at_the_end, _ignore)
        self._opened = False
        self.ended = False
        self.reached: tuple[Birth, ...] = ()

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """The trace's own hooks, and those at the ends."""
        with super().attach(session), self._gate.attach(session):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The modes are on, for the names of all ops and a look at those of the interval."""
        with super().during(step), self._gate.during():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._gate.is_open():
            self._opened = True
            return super().__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            self._sites.of(kernel_name(func))
            self._ops += 1
            result = func(*args, **kwargs)
            if self._opened:  # what the forward kept for its backward descends from births of the interval
                known = {storage_key(tensor) for tensor in tensors_in([args, kwargs])}
                for tensor in tensors_in(result):
                    if storage_key(tensor) not in known:
                        self._taint.forget(tensor)  # the memory may have been another tensor's
                        self._given.pop(storage_key(tensor), None)
            return result

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._opened:
            super()._on_gradient(parameter)

    def _at_the_end(self, tensors: Sequence[Tensor]) -> None:
        self.ended = True
        origins = union(self._taint.births(tensor) for tensor in tensors if is_nonfinite(tensor))
        self.reached = tuple(self._births[index] for index in sorted(origins))
        raise StepHalted


class UpdateTrace(OpTraceProbe):
    """Traces what follows the backward: unscaling, clipping, the optimizers' steps, the user's own updates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            phase = self._sites.of(kernel_name(func)).phase
        if phase in ("optimizer", "scaler"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._ops += 1
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))

    def _on_gradient(self, parameter: Tensor) -> None:
        """Gradients are finite here, or this is not where to look."""


class Cleansing(TorchDispatchMode):
    """Lives through a step in which nothing non-finite is made in an interval: it becomes zero at once.

    What of the batch or the run's state is non-finite and read there becomes zero as well.

    Args:
        interval: Which.

    Attributes:
        cleansed: Tensors that were changed.
        micro_batch: In which the interval ended; None where the step did not get there.
        losses: (micro-batch, is it finite) of each backward of the step.
    """

    def __init__(self, interval: Interval) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._gate = _Gate(interval, self._at_the_end, self._at_a_loss)
        self.cleansed = 0
        self.micro_batch: int | None = None
        self.losses: list[tuple[int, bool]] = []

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """Hooks at the ends only."""
        self._session = session
        with self._gate.attach(session):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:  # noqa: ARG002 - the seam's signature
        """The mode is on."""
        owned = [tensor for _, _, tensor in state_tensors(self._session)]
        owned += [p.grad for p in self._session.model.parameters() if p.grad is not None]
        owned += [tensor for _, tensor in self._session.current_tensors()]
        self._owned = {storage_key(tensor) for tensor in owned}
        with self, self._gate.during():
            yield

    def finish(self, step: int, loss: Any) -> None:
        """Nothing is left to do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if not self._gate.is_open():
                return func(*args, **kwargs)
            # only what a snapshot or the tape brings back: a constant of the user's own is not ours to change
            self._cleanse(t for t in tensors_in([args, kwargs]) if is_watched(t) and storage_key(t) in self._owned)
            result = func(*args, **kwargs)
            if kernel_name(func) not in UNINITIALISED:
                self._cleanse(tensors_in(result))
            return result

    def _cleanse(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if is_nonfinite(tensor):
                self.cleansed += 1
                wide = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit formats have no such kernels
                with torch.no_grad():
                    tensor.copy_(wide.masked_fill(~torch.isfinite(wide), 0))

    def _at_the_end(self, _tensors: Sequence[Tensor]) -> None:
        self.micro_batch = self._session.micro_batch

    def _at_a_loss(self, losses: Sequence[Tensor]) -> None:
        self.losses.append((self._session.micro_batch, not any(map(is_nonfinite, losses))))


def _ignore(_tensors: Sequence[Tensor]) -> None:
    """For a trace, which ends before a loss could be asked for."""
