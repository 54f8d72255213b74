"""Which part of a step is running: an optimizer's step, a scaler's method, or the user's own code."""

from __future__ import annotations

from typing import Any, Literal

import torch

Part = Literal["optimizer", "scaler"]


class Phases:
    """The parts that are running, each inside the one before."""

    def __init__(self) -> None:
        self._running: list[Part | None] = []

    @property
    def part(self) -> Part | None:
        """The innermost running part; None for the user's own code."""
        return self._running[-1] if self._running else None

    def clear(self) -> None:
        """Forget the running parts."""
        self._running.clear()

    def enter(self, part: Part) -> int:
        """Note that a part begins; returns the argument for `leave`."""
        self._running.append(part)
        return len(self._running) - 1

    def leave(self, depth: int) -> None:
        """End the part, and whatever began inside it, also after an exception."""
        del self._running[depth:]

    def leave_optimizer(self) -> None:
        """End an optimizer's step if one is running."""
        if self.part == "optimizer":
            self._running.pop()

    def outside(self, argument: Any) -> Any:
        """Wrap an optimizer's closure (LBFGS, SAM): the forward and backward in it are not the optimizer's own."""
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
