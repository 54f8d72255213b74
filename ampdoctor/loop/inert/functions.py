"""torch's functions by their public names, and back by torch's own table alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.overrides import get_overridable_functions, resolve_name

from ampdoctor.loop.hooks.unwarned import unwarned

_ALSO = ("unflatten", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
"""Methods of tensors that make tensors, and are told of, but stand in no table of torch's."""
_NAMELESS: dict[Callable[..., Any], str] = {torch.autograd.grad: "torch.autograd.grad"}
"""Functions that are told of, and that torch itself finds no name for: a penalty on gradients is made of them."""

_TWO = (
    "add",
    "and",
    "div",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
)
_OPERATORS = frozenset(
    f"__{operator}__"
    for operator in (
        *(f"{side}{name}" for name in _TWO for side in ("", "r", "i")),
        *("eq", "ne", "lt", "le", "gt", "ge", "invert", "reversed", "getitem", "setitem", "get"),
    )
)
"""What may be named between two pairs of underscores; `get` reads an attribute. The others of a tensor's convert, copy
or pickle it."""
_NO_ARITHMETIC = frozenset(
    {"apply_", "map_", "module_load", "numpy", "register_hook", "register_post_accumulate_grad_hook", "share_memory_"}
    | {"storage", "storage_type", "untyped_storage"}
)
"""Methods that call what they are given, or hand a tensor's memory out."""


@cache
def _table() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            name = resolve_name(function)
            if name is not None and _computes(name):
                found.setdefault(name, function)
    for name in _ALSO:
        found[f"torch.Tensor.{name}"] = getattr(torch.Tensor, name)
    found |= {name: function for function, name in _NAMELESS.items()}
    return found


def _computes(name: str) -> bool:
    parts = name.split(".")
    return not any((part.startswith("_") and part not in _OPERATORS) or part in _NO_ARITHMETIC for part in parts)


def name_of(function: Callable[..., Any]) -> str | None:
    """Returns the name by which `function_named` finds a function of torch's; None for any other."""
    with unwarned():  # torch changes Python's filters where it looks a name up
        try:
            name = _NAMELESS.get(function) or resolve_name(function)
        except (AttributeError, TypeError):
            return None
        return name if name is not None and _table().get(name) == function else None


def function_named(name: str) -> Callable[..., Any] | None:
    """Returns torch's function of this name ("torch.nn.functional.gelu", "torch.Tensor.T.__get__"); None without one.

    Only names in torch's table of functions that may be overridden are found, and of these the public ones that
    compute; nothing is imported.
    """
    return _table().get(name)
