"""Tensors in batches of any shape: mappings, dataclasses, named tuples, packed sequences and objects of the user's."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import MutableMapping

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
Leaf = Callable[[Any], Any]

_COMMON = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""The commonest of `_ATOMS`: to ask for an exact type takes a tenth of the time."""
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum),
    *(torch.Size, torch.dtype, torch.device),
    nn.Module,  # a teacher or a loss object in the batch is not data
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
)
"""Types that are neither searched for tensors nor copied."""


def map_tensors(function: TensorFunction, value: Any) -> Any:
    """Returns `value` with each tensor replaced by `function(tensor)`, in containers of the same types."""
    return _Walk(function).map(value)


def map_kind(kind: type | UnionType, function: Leaf, value: Any) -> Any:
    """As `map_tensors`, for objects of another kind instead of tensors."""
    return _Walk(function, kind=kind).map(value)


def iter_tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor in `value` once, with its path ("input_ids", "1.mask"; "" for a bare tensor)."""
    return iter_kind(torch.Tensor, value)


def iter_kind(kind: type | UnionType, value: Any) -> Iterator[tuple[str, Any]]:
    """As `iter_tensors`, for objects of another kind instead of tensors."""
    seen: dict[int, Any] = {}  # holds the objects themselves: an id is only valid while its object lives
    # a stack, not recursion, because of the depth; reversed, to keep the batch's order
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, part = todo.pop()
        if type(part) in _COMMON or isinstance(part, _ATOMS) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, kind):
            yield path, part
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in _children(part)]
        todo.extend(reversed(children))


def move_batch(batch: Any, device: torch.device | str, move: Callable[[Any, Any], Any] | None = None) -> Any:
    """Returns the batch on `device`, by objects' own `to` (perhaps in place) or the user's `move(batch, device)`."""
    if move is not None:
        return move(batch, device)
    return _Walk(lambda tensor: _as_leaf(tensor, tensor.to(device)), device=device).map(batch)


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Returns the batch with floating-point tensors of 16 bits and more as `dtype`; float32 leaves float64 alone."""

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        if tensor.dtype is torch.float64 and dtype is torch.float32:
            return tensor  # as `cast_model` leaves a float64 model alone
        return _as_leaf(tensor, tensor.to(dtype)) if wide else tensor

    return map_tensors(cast_one, batch)


def copy_batch(batch: Any) -> Any:
    """Returns a copy that shares nothing mutable, except what cannot be copied (open files, iterators, modules)."""
    clones = {id(tensor): _like(tensor, tensor.detach().clone()) for _, tensor in iter_tensors(batch)}
    return _Walk(lambda tensor: clones[id(tensor)], leaf=_copy_leaf, clones=clones).map(batch)


def bytes_of(batch: Any) -> int:
    """Returns the bytes of the tensors' stored elements; of a sparse tensor those of its values."""
    return sum(
        tensor.coalesce().values().nbytes if tensor.layout is torch.sparse_coo else tensor.nbytes
        for _, tensor in iter_tensors(batch)
    )


class _Walk:
    """One pass over a nested value: `function` maps tensors, `leaf` maps objects without tensors."""

    def __init__(
        self,
        function: Leaf,
        leaf: Leaf | None = None,
        *,
        device: torch.device | str | None = None,
        clones: Mapping[int, torch.Tensor] | None = None,
        kind: type | UnionType = torch.Tensor,
    ) -> None:
        self._function = function
        self._kind = kind
        self._leaf = leaf
        self._device = device
        self._clones = clones
        # the originals are kept with their results: an id is only valid while its object lives
        self._done: dict[int, tuple[Any, Any]] = {}

    def map(self, value: Any) -> Any:
        if type(value) in _COMMON or isinstance(value, _ATOMS):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, self._kind):
            return self._keep(value, self._function(value))
        if isinstance(value, PackedSequence):
            return self._keep(value, self._packed(value))
        if isinstance(value, Mapping) and (new := self._mapping(value)) is not None:
            return new
        if isinstance(value, list | deque):
            new = self._keep(value, copy.copy(value))
            items = [self.map(item) for item in value]
            new.clear()
            new.extend(items)
            return new
        if isinstance(value, tuple | set | frozenset):
            return self._rebuilt(value)
        return self._object(value)

    def _keep(self, value: Any, new: Any) -> Any:
        self._done[id(value)] = (value, new)
        return new

    def _packed(self, value: PackedSequence) -> PackedSequence:
        order, back = (None if i is None else self.map(i) for i in (value.sorted_indices, value.unsorted_indices))
        sizes = value.batch_sizes if self._leaf is None else value.batch_sizes.clone()
        return type(value)(self.map(value.data), sizes, order, back)

    def _mapping(self, value: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
        """Maps a mapping whose shallow copy surely has its own items; None if it must be treated as an object."""
        if isinstance(value, dict | UserDict):
            new = cast("MutableMapping[Any, Any]", self._keep(value, copy.copy(value)))
            for key, item in value.items():
                new[key] = self.map(item)
            return new
        if isinstance(value, types.MappingProxyType):
            items = {key: self.map(item) for key, item in value.items()}
            return cast("Mapping[Any, Any]", self._keep(value, types.MappingProxyType(items)))
        return None

    def _rebuilt(self, value: Any) -> Any:
        items = [self.map(item) for item in value]
        if id(value) in self._done:  # it contains itself
            return self._done[id(value)][1]
        make = getattr(type(value), "_make", type(value))  # a named tuple's constructor takes single fields
        return self._keep(value, make(items))

    def _object(self, value: Any) -> Any:
        if self._device is not None and callable(getattr(value, "to", None)) and not dataclasses.is_dataclass(value):
            # some `to` methods move in place and return nothing
            moved = value.to(self._device)
            return self._keep(value, value if moved is None else moved)
        if next(iter_kind(self._kind, value), None) is None:
            return self._keep(value, value if self._leaf is None else self._leaf(value))
        if self._clones is not None and "__deepcopy__" in dir(type(value)):
            memo = {id(tensor): self._clones[id(tensor)] for _, tensor in iter_tensors(value)}
            return self._keep(value, copy.deepcopy(value, cast("dict[int, Any]", memo)))
        try:
            new = self._keep(value, object.__new__(type(value)))
        except TypeError:  # a C type
            return self._keep(value, value if self._leaf is None else self._leaf(value))
        for name, item in _attributes(value):
            object.__setattr__(new, name, self.map(item))  # not by a frozen dataclass's, or a user's, `__setattr__`
        return new


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, PackedSequence):
        return [
            ("data", value.data),
            ("sorted_indices", value.sorted_indices),
            ("unsorted_indices", value.unsorted_indices),
        ]
    if isinstance(value, dict | UserDict | types.MappingProxyType):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, list | deque | tuple | set | frozenset):
        return [(str(index), item) for index, item in enumerate(value)]
    return _attributes(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(found.items())


def _copy_leaf(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 copying may raise anything: the value is shared then
        return value


def _as_leaf(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Returns `new`, which was made from `old`, as a leaf that requires a gradient if `old` is such a leaf."""
    if new is old or not (old.is_leaf and old.requires_grad):
        return new
    return new.detach().requires_grad_()


def _like(old: torch.Tensor, clone: torch.Tensor) -> torch.Tensor:
    if isinstance(old, nn.Parameter):
        return nn.Parameter(clone, requires_grad=old.requires_grad)
    return clone.requires_grad_(old.requires_grad)
