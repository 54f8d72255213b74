"""Doors of torch's that a recorder stands in: what has no hook is put back as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.torch_internals import replaced


@contextmanager
def before_backwards(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, `tell` is called before a backward comes to a mode, from within which no mode can be left."""
    to: Callable[[], None] | None = tell
    with ExitStack() as stack:
        for owner in (torch.Tensor, torch.autograd):
            original = getattr(owner, "backward")  # noqa: B009 - the types of the two differ

            def backward(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if to is not None:
                    to()
                return _original(*args, **kwargs)

            stack.enter_context(replaced(owner, "backward", functools.wraps(original)(backward)))
        try:
            yield
        finally:
            to = None


@contextmanager
def told_of_zeroed(told: Callable[[Any], None]) -> Iterator[None]:
    """Inside, a model's or an optimizer's `zero_grad` is told, whatever it is to set gradients to."""
    to: Callable[[Any], None] | None = told
    with ExitStack() as stack:
        for owner in (nn.Module, torch.optim.Optimizer):
            original = owner.zero_grad

            def zero_grad(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if to is not None:
                    to(self)
                return _original(self, *args, **kwargs)

            stack.enter_context(replaced(owner, "zero_grad", zero_grad))
        try:
            yield
        finally:
            to = None
