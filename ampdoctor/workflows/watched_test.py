"""The watch of a test: its parts live until its end, and the state that each update leaves is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.probes.nonfinite import any_nonfinite, is_mask, is_nonfinite

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.hooks.program import Program


class WatchedTest:
    """Holds the parts of a test's loop, which end before its watch, and copies of what the next update changes."""

    def __init__(self, model: nn.Module | None) -> None:
        self._held: dict[int, Any] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self._optimizer: Any = None
        self.began_finite = model is not None and not any_nonfinite(model.parameters())

    def hold(self, *parts: Any) -> None:
        """Keeps models alive."""
        self._held.update((id(part), part) for part in parts)

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies the weights and the state of an optimizer before its update."""
        self._optimizer = optimizer
        with unseen(), torch.no_grad():
            self._copies = [(p, p.detach().clone()) for p in parameters_of(optimizer)]
            self._state = {p: {key: _copied(one) for key, one in held.items()} for p, held in optimizer.state.items()}

    def may_be_lost(self, optimizer: torch.optim.Optimizer, buffers: Iterable[torch.Tensor]) -> bool:
        """Whether a weight or a moment after an update, or one of the models' `buffers`, is not finite."""
        return optimizer is self._optimizer and any_nonfinite(chain(self._updated(), buffers))

    def is_lost(self, program: Program) -> bool:
        """Whether a step's update, or its forward, has made a weight, a moment or a buffer of the model non-finite."""
        if program.optimizer is not self._optimizer:  # what the program's backwards do not reach
            return False
        if any_nonfinite(self._updated()):
            return True
        now = dict(program.model.named_buffers())
        before = [(now[name], value) for name, value in program.buffers.items()]  # of those that have changed
        return any(is_nonfinite(one) and not is_mask(one) and not is_nonfinite(value) for one, value in before)

    def _updated(self) -> Iterator[torch.Tensor]:
        for parameter in (p for p in parameters_of(self._optimizer) if p.grad is not None):
            held = self._optimizer.state.get(parameter, {}).values()
            yield from (parameter, *(one for one in held if isinstance(one, torch.Tensor)))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, weights and the optimizer's state are as before its update."""
        state: dict[torch.Tensor, Any] = self._optimizer.state
        after, then = dict(state), [(p, p.detach().clone()) for p, _ in self._copies]
        with ExitStack() as stack:
            for p, _ in then:
                stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(p))  # noqa: SLF001 - torch has no other way to write unseen
            try:
                _write(self._copies, state, self._state)
                yield
            finally:
                _write(then, state, after)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write(values: list[tuple[torch.Tensor, torch.Tensor]], state: dict[Any, Any], held: dict[Any, Any]) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
    state.clear()
    state.update(held)
