"""Which part of a step is running: an optimizer's step, a scaler's method, or the user's own code."""

from __future__ import annotations

from typing import Any, Literal

import torch

Part = Literal["optimizer", "scaler"]


class Phases:
    """The parts that are running, one inside the other."""

    def __init__(self) -> None:
        self._running: list[Part | None] = []

    @property
    def part(self) -> Part | None:
        """The innermost one; None for the user's own code."""
        return self._running[-1] if self._running else None

    def clear(self) -> None:
        """Nothing is running."""
        self._running.clear()

    def enter(self, part: Part) -> int:
        """A part begins; gives what `leave` takes."""
        self._running.append(part)
        return len(self._running) - 1

    def leave(self, depth: int) -> None:
        """That part ends, and whatever has begun in it, also where it raised."""
        del self._running[depth:]

    def leave_optimizer(self) -> None:
        """An optimizer's step ends, where one is running."""
        if self.part == "optimizer":
            self._running.pop()

    def outside(self, argument: Any) -> Any:
        """An optimizer's argument: a closure (LBFGS, SAM) is forward and backward, none of its own arithmetic."""
        if not callable(argument) or isinstance(argument, torch.optim.Optimizer):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._running)
            self._running.append(None)
            try:
                return argument(*args, **kwargs)
            finally:
                self.leave(depth)

        return closure
