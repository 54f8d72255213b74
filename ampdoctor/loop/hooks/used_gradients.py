"""Whether an optimizer steps on gradients that it has used already; no value is read, and no device is waited for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ampdoctor.loop.torch_internals import replaced, version_of

_SAMPLES = 16
"""Parameters of an optimizer that are looked at: what gives one of them a new gradient gives it to nearly all."""


@dataclass(slots=True)
class _Use:
    """An optimizer's last update.

    Attributes:
        optimizer: The optimizer.
        runs: How often autograd's engine had run by then.
        of_backward: The engine had run since the update before: these gradients are a backward's, not made by hand.
        held: By `id` of a parameter: its gradient, and how often that was written to.
    """

    optimizer: weakref.ref[Any]
    runs: int
    of_backward: bool
    held: dict[int, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)


class UsedGradients:
    """Remembers what each optimizer's gradients were at its last update.

    They are the same as long as neither autograd's engine nor a CUDA graph has run, and each gradient that is looked
    at is the same tensor, written to by nobody but a clipping or a scaler. Gradients that are made by hand (evolution
    strategies, a server that receives them) may be written where no counter sees it: only a backward's are compared.
    """

    def __init__(self) -> None:
        self._runs = 0
        self._uses: dict[int, _Use] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a CUDA graph that is replayed counts as a run of the engine: it may hold a backward."""
        graph = getattr(torch.cuda, "CUDAGraph", None)
        original: Any = getattr(graph, "replay", None)
        if original is None:
            yield
            return

        def replay(*args: Any, **kwargs: Any) -> Any:
            self.engine_runs()
            return original(*args, **kwargs)

        with replaced(graph, "replay", replay):
            yield

    @property
    def runs(self) -> int:
        """How often autograd's engine has run."""
        return self._runs

    @property
    def any_backward(self) -> bool:
        """Autograd's engine has run."""
        return self._runs > 0

    def clear(self) -> None:
        """Forget all updates."""
        self._uses.clear()

    def engine_runs(self) -> None:
        """Note that autograd's engine runs, whatever becomes of what it computes."""
        self._runs += 1

    def used(self, optimizer: Any) -> None:
        """Note that the optimizer has stepped, or that a scaler has skipped its update."""
        before = self._use_of(optimizer)
        again = before is not None and before.runs == self._runs
        of_backward = before.of_backward if again and before is not None else self._runs > 0
        with suppress(TypeError):  # a wrapper that nothing refers to weakly
            self._uses[id(optimizer)] = _Use(weakref.ref(optimizer), self._runs, of_backward, dict(_held_by(optimizer)))

    def are_used(self, optimizer: Any) -> bool:
        """Return whether the gradients that the optimizer holds now are those of its last update."""
        use = self._use_of(optimizer)
        if use is None or not use.of_backward or use.runs != self._runs:
            return False
        now = dict(_held_by(optimizer))
        return bool(now) and all(
            key in use.held and use.held[key][0]() is gradient() and use.held[key][1] == version
            for key, (gradient, version) in now.items()
        )

    def clipped(self, gradients: Collection[int]) -> None:
        """Note that these gradients are about to be multiplied in place, once each.

        Args:
            gradients: The `id` of each.
        """
        for use in self._uses.values():
            for key, (there, version) in use.held.items():
                gradient = there()
                if gradient is not None and id(gradient) in gradients and version_of(gradient) == version:
                    use.held[key] = there, version + 1

    def unscaled(self, optimizer: Any) -> None:
        """Note that a scaler has divided gradients which were used already."""
        use = self._use_of(optimizer)
        if use is not None:
            use.held = dict(_held_by(optimizer))

    def _use_of(self, optimizer: Any) -> _Use | None:
        use = self._uses.get(id(optimizer))
        return use if use is not None and use.optimizer() is optimizer else None


def inside_own_step(optimizer: Any, *, known: int = 0) -> bool:
    """Return whether the optimizer's `step` has been called by its own `step`: `super().step()` is a part of a step.

    Args:
        optimizer: Whose `step` is about to run.
        known: How many of its calls are running for sure: 1 in a closure.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's own way up
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is optimizer:
            known -= 1
        frame = frame.f_back
    return known < 0


def _held_by(optimizer: Any) -> Iterator[tuple[int, tuple[weakref.ref[torch.Tensor], int]]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters[:: max(len(parameters) // _SAMPLES, 1)]:
        gradient = parameter.grad
        if gradient is not None and not gradient.is_inference():
            yield id(parameter), (weakref.ref(gradient), version_of(gradient))
