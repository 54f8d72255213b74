"""Which births a non-finite tensor descends from, and what it would have been without them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

from ampdoctor.numerics.tensors import is_plain, parts_of
from ampdoctor.probes.ops.recompute import doubled

Births = frozenset[int]
NONE: Births = frozenset()
Memory: TypeAlias = StorageWeakRef | WeakIdRef
"""A weak reference: the values may be freed, but no later tensor is taken for this one while it is kept."""
FEWEST = 64
"""Entries from which on a map looks for memory that has been freed."""
_V = TypeVar("_V")


def storage_key(tensor: torch.Tensor) -> Memory:
    """Identity of the memory behind a tensor: views share it. An address alone is used again once it is freed."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except RuntimeError:  # sparse layouts have no storage of their own
        return WeakIdRef(tensor)


def covers_its_memory(tensor: torch.Tensor) -> bool:
    """No byte of the memory behind a tensor is left out by it; False where that is not known."""
    try:
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    except RuntimeError:
        return False


class ByMemory(dict[Memory, _V]):
    """What is known of memory, by its key; that of memory which has been freed goes whenever the map has doubled."""

    def __init__(self) -> None:
        super().__init__()
        self._most = FEWEST

    def __setitem__(self, key: Memory, value: _V) -> None:
        if len(self) >= self._most and key not in self:
            for freed in [known for known in self if is_freed(known)]:
                del self[freed]
            self._most = max(FEWEST, 2 * len(self))
        super().__setitem__(key, value)


def is_freed(key: Memory) -> bool:
    """No tensor shows this memory any more."""
    return bool(key.expired()) if isinstance(key, StorageWeakRef) else key() is None


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identity of a view among those of the same memory."""
    try:
        return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    except RuntimeError:
        return (tuple(tensor.shape),)


class Taint:
    """Ancestry of non-finite values, by storage; and their float64 shadows, by view."""

    def __init__(self) -> None:
        self._births: ByMemory[Births] = ByMemory()
        self._shadows: ByMemory[dict[tuple[Any, ...], torch.Tensor]] = ByMemory()

    def clear(self) -> None:
        """Forget everything."""
        self._births.clear()
        self._shadows.clear()

    def births(self, tensor: torch.Tensor) -> Births:
        """The births that a tensor's memory descends from; of a subclass, those of the tensors that it consists of."""
        if is_plain(tensor):
            return self._births.get(storage_key(tensor), NONE)
        return union(self._births.get(storage_key(part), NONE) for part in (parts_of(tensor) or [tensor]))

    def mark(self, tensor: torch.Tensor, births: Births, *, added: bool) -> None:
        """A result is non-finite.

        Args:
            tensor: The result.
            births: Where its non-finite values come from.
            added: The op wrote into memory that may hold earlier ones.
        """
        key = storage_key(tensor)
        self._births[key] = births | self._births.get(key, NONE) if added else births
        self._lift_shadow(tensor)  # `cast_shadow` follows where these values have one

    def clean(self, tensor: torch.Tensor) -> None:
        """A result is finite: if it fills its memory, nothing non-finite is left there."""
        key = storage_key(tensor)
        if key in self._births and _covers(tensor):
            del self._births[key]
        self._lift_shadow(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Nothing in its memory is to be followed."""
        self._births.pop(storage_key(tensor), None)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float64 tensor that would be here, had the births been computed in float64."""
        if not self._shadows:
            return None
        return self._shadows.get(storage_key(tensor), {}).get(view_key(tensor))

    def cast_shadow(self, tensor: torch.Tensor, reference: torch.Tensor) -> None:
        """Remember `reference` where `tensor` is non-finite and `reference` is not.

        Args:
            tensor: A result, non-finite somewhere.
            reference: The same result in float64, from inputs without the births.
        """
        real = doubled(tensor)
        fine = torch.isfinite(real)
        if bool((~fine & torch.isfinite(reference)).any()):
            key = storage_key(tensor)
            self._shadows[key] = {**self._shadows.get(key, {}), view_key(tensor): torch.where(fine, real, reference)}
        else:
            self._lift_shadow(tensor)

    def _lift_shadow(self, tensor: torch.Tensor) -> None:
        """The view has been written: what it would have been is not known any more."""
        if self._shadows:
            self._shadows.get(storage_key(tensor), {}).pop(view_key(tensor), None)


def union(births: Iterable[Births]) -> Births:
    """All births of several tensors."""
    return frozenset().union(*births)


def _covers(tensor: torch.Tensor) -> bool:
    """The tensor fills its memory; an expanded dimension shows the same elements again and fills nothing."""
    try:
        distinct = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        return distinct * tensor.element_size() >= int(tensor.untyped_storage().nbytes())
    except RuntimeError:  # sparse layouts: the key is the tensor's own
        return True
