"""Tensors inside whatever a model takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

REDUCED: Final = frozenset({torch.float16, torch.bfloat16})
"""The dtypes that mixed precision computes in."""


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply `fn` to every tensor in a nested structure.

    Lists, tuples, named tuples, mappings (ordered ones, defaultdicts, model outputs) and dataclass instances are
    rebuilt with their own type; other objects (a cache that the model writes into, a string) are handed on as they
    are. A container in which nothing changes is returned itself.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, fn) for item in value]
        return value if _same(items, value) else _sequence(value, items)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, fn) for key, item in value.items()}
        return value if _same(mapped.values(), value.values()) else _mapping(value, mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        changed = {name: map_tensors(getattr(value, name), fn) for name in fields}
        return value if _same(changed.values(), [getattr(value, name) for name in fields]) else _object(value, changed)
    return value


def cast_up(value: Any) -> Any:
    """Every fp16 and bf16 tensor of a nested structure in fp32, seen by autograd."""
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in REDUCED else tensor)


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _sequence(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if hasattr(value, "_fields"):
        return kind(*items)
    if isinstance(value, torch.Size):
        return value
    return kind(items)


def _mapping(value: Any, mapped: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return mapped
    rebuilt = copy.copy(value)  # keeps what the class carries beside its items: a default factory, an encoding
    try:
        if hasattr(rebuilt, "data") and isinstance(rebuilt.data, dict):
            rebuilt.data = mapped  # a UserDict shares its dict with the copy
        for key, item in mapped.items():
            rebuilt[key] = item
    except TypeError:  # an immutable mapping
        return mapped
    return rebuilt


def _object(value: Any, changed: dict[str, Any]) -> Any:
    rebuilt = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(rebuilt, name, item)  # works on frozen ones too
    return rebuilt
