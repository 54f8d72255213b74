"""Tensors inside the nested values that modules and ops take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ampdoctor.hooks.torch_internals import of_transform
from ampdoctor.numerics.tensors import is_plain, is_readable

_DEPTH = 8
"""Outputs nested deeper than this are not a model's outputs but an object graph."""


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value (mappings, dataclasses, `ModelOutput`, sequences), in order.

    Args:
        value: What a module's forward or an op returned.
        depth: Recursion depth so far.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > _DEPTH or isinstance(value, str | bytes | int | float | None):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 of one that has none of its own (a subclass that wraps others, meta)."""
    if not is_plain(tensor) or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def takes_apart(types: Any, values: Any) -> bool:
    """Does a tensor subclass have to run this op, of others on the tensors that it consists of?

    A mode that returns `NotImplemented` for it sees those ops: of an FP8 product the casts, the product and the
    division, each with its numbers. The subclass itself refuses most of the ops by which a tensor is looked at.

    Args:
        types: As a mode's `__torch_dispatch__` gets them.
        values: The op's arguments.
    """
    if all(kind is torch.Tensor or kind is torch.nn.Parameter for kind in types):
        return False
    own = (tensor for tensor in tensors_in(values) if not is_plain(tensor))
    return any(not tensor.is_nested and not hasattr(tensor, "fake_mode") for tensor in own)


def is_watched(tensor: torch.Tensor) -> bool:
    """Only floating-point and complex tensors with data can be non-finite.

    A double backward hands zero tensors around that have a shape and no memory. Inside `vmap` and `grad` a tensor
    stands for a level of theirs: a flag made from it would outlive the level. Nested tensors lack most reductions: what
    is made from them is looked at again where it is dense. A subclass that refuses to give its numbers is left out.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor._is_zerotensor():
        return False
    return not tensor.is_nested and not of_transform(tensor) and is_readable(tensor)
