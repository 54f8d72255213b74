"""Another loss scale for a step that scales its loss by hand. The code is the user's: it is tried in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.hooks.callbacks import on_gradient

if TYPE_CHECKING:
    from ampdoctor.hooks.backwards import Backwards
    from ampdoctor.replay.session import Session


def rescaled(factor: float) -> Callable[[Session], AbstractContextManager[Any]]:
    """Returns a change: the backward runs on `factor` times the loss, and the parameters' gradients are divided by it.

    In between, where gradients are half, everything is as if the step's code had another constant. Gradients that the
    step asks for (`torch.autograd.grad`) are of no such loss, and stay as they are.

    Args:
        factor: A power of two, so that both multiplications are exact.
    """

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        backwards = session.events.backwards

        def divided(grad: torch.Tensor) -> torch.Tensor | None:
            return grad / factor if backwards.inside else None

        with ExitStack() as stack:
            for parameter in session.model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    handle = on_gradient(parameter, divided)
                    stack.callback(handle.remove)
            stack.enter_context(_roots_scaled(factor, backwards))
            yield

    return change


@contextmanager
def noted_roots() -> Iterator[list[float]]:
    """Yields the values from which backwards start, in order: divided by the loss, they show how a step scales it."""
    noted: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **keywords: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        noted.extend(float(root.detach().float().sum()) for root in roots)
        original(tensors, *args, **keywords)

    torch.autograd.backward = backward
    try:
        yield noted
    finally:
        torch.autograd.backward = original


@contextmanager
def _roots_scaled(factor: float, backwards: Backwards) -> Iterator[None]:
    """Make `loss.backward()` and `torch.autograd.backward(loss)` start with `factor` instead of 1.

    A backward inside another (reentrant checkpointing) starts with what has that factor already.
    """
    original = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        if backwards.inside:
            original(tensors, grad_tensors, *args, **keywords)
            return
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else grad_tensors
        starts = tuple(given) if len(tuple(given)) == len(roots) else (None,) * len(roots)
        scaled = [
            torch.full_like(root, factor) if start is None else start * factor
            for root, start in zip(roots, starts, strict=True)
        ]
        original(roots, scaled, *args, **keywords)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
