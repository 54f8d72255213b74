"""A few numbers of the gradients at each stage of a step, to find what a loop's own code does to them in between."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.evidence.location import NonFinite
from ampdoctor.evidence.run_facts import Change
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.callbacks import FunctionObserver
from ampdoctor.hooks.program import Line
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.recording.tape import is_lost
from ampdoctor.numerics.tensors import is_plain
from ampdoctor.probes.user_code import user_line

_PARAMETERS, _ELEMENTS = 8, 64
"""Sampled of an owner's gradients: evenly spread, so that a change of all gradients shows."""
_FIRST, _EVERY, _IN_A_ROW = 48, 64, 4
"""The first updates are sampled, then some in a row out of each `_EVERY`: a loop makes the same calls in each step."""
_SAME = 1e-4
"""Factors with at most this relative spread count as equal: the error of float32 arithmetic is 100 times smaller."""
_FEWEST = 4
"""Nonzero elements that a result needs."""


class GradientSamples:
    """Takes the samples; only `while_scaled` and `last` wait for a device."""

    def __init__(self) -> None:
        self._updates = 0
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # by parameter
        self._scaled: dict[int, _Pair] = {}  # by optimizer

    @property
    def active(self) -> bool:
        """Whether the gradients of this step are sampled."""
        return self._updates < _FIRST or self._updates % _EVERY < _IN_A_ROW

    def left(self, owners: Iterable[Any]) -> None:
        """Samples the gradients of models or optimizers as a backward, or a scaler, has left them."""
        if not self.active:
            return
        for owner in owners:
            parameters = list(parameters_of(owner))
            for parameter in parameters[:: max(len(parameters) // _PARAMETERS, 1)]:
                taken = _sample_of(parameter.grad)
                if taken is not None:
                    self._left[id(parameter)] = weakref.ref(parameter), taken

    def unscaling(self, optimizer: Any) -> None:
        """Called before a scaler divides an optimizer's gradients by its scale."""
        pair = self._pair_of(optimizer)
        if pair is not None:
            self._scaled[id(optimizer)] = pair

    def while_scaled(self, optimizer: Any) -> Change | None:
        """Returns the change of an optimizer's gradients before they were unscaled; None where it is unknown."""
        pair = self._scaled.get(id(optimizer))
        return None if pair is None or pair.optimizer() is not optimizer else pair.change()

    def last(self, optimizer: Any) -> Change | None:
        """Returns the change of an optimizer's gradients since the last backward or unscaling; None if unknown."""
        pair = self._pair_of(optimizer)
        return None if pair is None else pair.change()

    def updated(self, optimizer: Any) -> None:
        """Called after an optimizer has used its gradients."""
        self._updates += 1
        self._scaled.pop(id(optimizer), None)
        for parameter in parameters_of(optimizer) if self._left else ():
            self._left.pop(id(parameter), None)

    def clear(self) -> None:
        """Drops all samples."""
        self._left.clear()
        self._scaled.clear()

    def _pair_of(self, optimizer: Any) -> _Pair | None:
        if not self.active or not hasattr(optimizer, "param_groups"):
            return None
        before, after, gradients = [], [], []
        for parameter in parameters_of(optimizer):
            there, taken = self._left.get(id(parameter), (None, None))
            if parameter.grad is not None and _is_numbers(parameter.grad):
                gradients.append(parameter.grad)
            if taken is None or there is None or there() is not parameter:
                continue
            now = _sample_of(parameter.grad)
            if now is None or now.shape != taken.shape or now.device != taken.device:
                return None
            before.append(taken)
            after.append(now)
        if not before or len({one.device for one in before}) > 1 or len({one.device for one in gradients}) > 1:
            return None
        with unseen():
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])  # noqa: SLF001 - public as `clip_grad_norm_`
            total = torch.linalg.vector_norm(norms).reshape(1)
            return _Pair(weakref.ref(optimizer), torch.cat(before), torch.cat(after), total)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Samples of an optimizer's gradients at two moments, 1-dim and float32, and the norm of all at the second."""

    optimizer: weakref.ref[Any]
    before: torch.Tensor
    after: torch.Tensor
    total: torch.Tensor

    def change(self) -> Change | None:
        """Returns the change from `before` to `after`; None where it is unknown. Waits for a device."""
        with unseen():
            before, after, norm = (one.cpu().double() for one in (self.before, self.after, self.total))
            total = float(norm)
            if not (math.isfinite(total) and bool(before.isfinite().all()) and bool(after.isfinite().all())):
                return None
            here = before != 0
            before, after = before[here], after[here]
            if len(before) < _FEWEST:
                return None
            most = float(before.abs().max())
            factors = after / before
            low, high = float(factors.min()), float(factors.max())
            if high - low <= _SAME * abs(high):
                return Change(factor=1.0 if low == high == 1.0 else (low + high) / 2, bound=None, most=most, norm=total)
            return Change(factor=None, bound=_bound_of(before, after), most=most, norm=total)


def _bound_of(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Returns the magnitude at which numbers were cut off; None where they were changed in another way."""
    bound = float(after.abs().max())
    expected = before.clamp(-bound, bound)
    return bound if bound > 0 and bool(((after - expected).abs() <= _SAME * expected.abs()).all()) else None


def _is_numbers(gradient: torch.Tensor) -> bool:
    """Whether a gradient is stored in this process as plain real numbers."""
    return (
        type(gradient) is torch.Tensor
        and is_plain(gradient)
        and gradient.is_floating_point()
        and gradient.layout is torch.strided
        and not gradient.is_meta
    )


def _sample_of(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not _is_numbers(gradient) or not gradient.numel():
        return None
    with unseen():
        flat = gradient.detach().reshape(-1)
        return flat[:: max(len(flat) // _ELEMENTS, 1)][:_ELEMENTS].to(torch.float32, copy=True)


# -- updates that a loop without an optimizer of torch's makes by its own code (`p.sub_(p.grad * rate)`) --


@dataclass(frozen=True, slots=True, kw_only=True)
class LostByHand:
    """A parameter that the loop's own code has made non-finite, and the function that made the first such value."""

    parameter: str
    function: str
    nonfinite: NonFinite  # the parameter's first kind of such values
    line: Line
    number: float | None  # a Python number among its arguments that is not finite


class HandUpdates(FunctionObserver):
    """Observes the functions between a backward and the next call of a model; only values on a CPU are looked at."""

    def __init__(self, names: Callable[[], Mapping[int, str]], failed: Callable[[Exception], None]) -> None:
        super().__init__(self._function)
        self._names, self._failed = names, failed
        self._first: tuple[str, Line, float | None] | None = None
        self.lost: LostByHand | None = None

    def listen(self) -> None:
        """Starts to observe."""
        self._first = None
        super().listen()

    def _function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        try:
            with unseen():
                self._called(str(getattr(function, "__name__", "")).strip("_"), args, result)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self._failed(error)
        return result

    def _called(self, function: str, args: tuple[Any, ...], result: Any) -> None:
        if self.lost is not None or not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            return
        if not is_lost(result, signed=True):
            return
        inputs = [one for one in args if isinstance(one, torch.Tensor) and one is not result]
        if self._first is None and not any(is_lost(one, signed=True) for one in inputs):
            numbers = (one for one in args if isinstance(one, float) and not math.isfinite(one))
            self._first = function, user_line(), next(numbers, None)
        name = self._names().get(id(result))
        if name is not None and self._first is not None:  # the result is the tensor that was written to
            function, line, number = self._first
            kind: NonFinite = "nan" if bool(result.detach().isnan().any()) else "inf"
            self.lost = LostByHand(parameter=name, function=function, nonfinite=kind, line=line, number=number)
