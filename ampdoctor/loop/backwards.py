"""The backwards of one step: the scale of each gradient, and which gradients were edited since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

PLAIN = 1.0
"""Scale of a loss that no scaler has scaled, and of unscaled gradients."""


class Backwards:
    """Records for each parameter the scales of the losses that its gradient is summed from.

    A backward counts as scaled if it runs through the output of a scaler's `scale`, however the step computed from that
    output the tensor that it calls `backward` on.

    Args:
        model: The model whose parameters are watched.
        on_kept_graph: Called when gradients of a scaled loss are asked for with their graph, outside any backward.
    """

    def __init__(self, model: nn.Module, on_kept_graph: Callable[[], None]) -> None:
        self._model = model
        self._on_kept_graph = on_kept_graph
        self.clear()

    def clear(self) -> None:
        """Forget the last step."""
        self._versions: dict[int, int] = {}
        self._parts: dict[int, set[float]] = {}  # id(parameter) -> the scales of the losses in its gradient
        self._depth = 0
        self.scale: float | None = None

    @property
    def inside(self) -> bool:
        """True while a backward runs; `scale` is then the scale of its loss, None for a plain one."""
        return self._depth > 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the hooks and the wrapped `torch.autograd.backward` are in place; they are gone afterwards."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if not self._depth:  # a backward inside another (reentrant checkpointing) is a part of it
                self.scale = None
                self._forget_cleared()
            self._depth += 1
            try:
                original(*args, **kwargs)
            finally:
                self._depth = max(self._depth - 1, 0)

        with ExitStack() as stack:
            for parameter in self._watched_parameters():
                stack.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)
            torch.autograd.backward = backward
            stack.callback(setattr, torch.autograd, "backward", original)
            yield

    def watch_scaled(self, outputs: Any, scale: float) -> None:
        """Watch for backwards that run through these tensors, which a scaler has just multiplied by its scale."""
        for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(partial(self._on_scaled, scale))

    def unscaled(self, optimizer: Any) -> None:
        """Note that a scaler has divided the optimizer's gradients by its scale."""
        for parameter in _parameters_of(optimizer):
            self._note_version(parameter)
            if id(parameter) in self._parts:
                self._parts[id(parameter)] = {PLAIN}

    def edited(self, optimizer: Any) -> int:
        """Returns how many of the optimizer's gradients were edited in place after a backward or scaler wrote them."""
        return sum(
            parameter.grad is not None and parameter.grad._version != self._versions.get(id(parameter), -1)
            for parameter in _parameters_of(optimizer)
            if id(parameter) in self._versions
        )

    def scales(self, optimizer: Any) -> tuple[float, ...]:
        """Returns the scales of the losses that the optimizer's gradients come from, in ascending order."""
        return tuple(sorted({scale for parts in self._held_by(optimizer) for scale in parts}))

    def misscaled(self, optimizer: Any, scale: float) -> int:
        """Returns how many of the optimizer's gradients have a part with another scale."""
        return sum(any(part != scale for part in parts) for parts in self._held_by(optimizer))

    def _held_by(self, optimizer: Any) -> Iterator[set[float]]:
        for parameter in _parameters_of(optimizer):
            if parameter.grad is not None and id(parameter) in self._parts:
                yield self._parts[id(parameter)]

    def _watched_parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self._model.parameters() if p.requires_grad and p.is_leaf)

    def _on_scaled(self, scale: float, _: torch.Tensor) -> None:
        if self._depth:
            self.scale = scale
        elif torch.is_grad_enabled():  # the engine's mode is `create_graph`
            self._on_kept_graph()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._note_version(parameter)
        if self._depth:  # else the engine was called without `torch.autograd.backward`, and its root is unknown
            self._parts.setdefault(id(parameter), set()).add(PLAIN if self.scale is None else self.scale)

    def _note_version(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._versions[id(parameter)] = parameter.grad._version

    def _forget_cleared(self) -> None:
        """Forget the parts of gradients that were cleared or zeroed in place: they will only hold the next backward."""
        for parameter in self._watched_parameters():
            if id(parameter) in self._parts and _is_cleared(parameter.grad, self._versions.get(id(parameter))):
                del self._parts[id(parameter)]


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_cleared(grad: torch.Tensor | None, version: int | None) -> bool:
    if grad is None:
        return True
    if grad._version == version:
        return False
    return not bool((grad if grad.layout is torch.strided else grad.to_dense()).any())
