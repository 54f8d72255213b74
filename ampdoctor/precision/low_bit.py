"""Layers of libraries that compute a linear layer in FP8 or fewer bits: as the `nn.Linear` that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType

from torch import nn

_LIBRARIES = frozenset({"torchao"})
"""Packages whose subclasses of `nn.Linear` quantise what they multiply, and keep weight and bias as an `nn.Linear`."""


def computes_in_low_bits(module: nn.Module) -> bool:
    """Is it a linear layer that a library computes in fewer bits (torchao's `Float8Linear`, `MXLinear`)?"""
    kind = type(module)
    quantises = isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward
    return quantises and kind.__module__.partition(".")[0] in _LIBRARIES


@contextmanager
def as_plain_linears(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, such layers compute `x @ weight.T + bias` in their weights' own format, and nothing is quantised.

    Args:
        modules: Any modules; others than these are left alone.
    """
    with ExitStack() as stack:
        for module in modules:
            if computes_in_low_bits(module) and "forward" not in vars(module):
                module.forward = MethodType(nn.Linear.forward, module)
                stack.callback(vars(module).pop, "forward", None)
        yield
