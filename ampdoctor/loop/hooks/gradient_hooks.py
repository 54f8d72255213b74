"""Hooks on the gradients of tensors, which autograd also calls where there is no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    """`Tensor.register_hook`, of which the hook is told of gradients alone.

    A node of several outputs of which the loss needs one (a compiled model's, an unused chunk's, that of a function
    with `set_materialize_grads(False)`) gives the others an undefined gradient, and torch hands its hooks None.
    """

    def told(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else hook(gradient)

    return tensor.register_hook(told)  # type: ignore[no-any-return]
