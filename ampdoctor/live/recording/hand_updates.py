"""Updates that a loop without an optimizer of torch's makes by its own code (`p.sub_(p.grad * rate)`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.evidence.location import NonFinite
from ampdoctor.hooks.callbacks import FunctionObserver
from ampdoctor.hooks.program import Line
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.recording.tape import is_lost
from ampdoctor.probes.user_code import user_line


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
