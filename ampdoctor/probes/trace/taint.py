"""Which births a non-finite tensor descends from, and what it would have been without them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ampdoctor.probes.ops.recompute import doubled

Births = frozenset[int]
NONE: Births = frozenset()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor: views share it."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # sparse layouts have no storage of their own
        return id(tensor)


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identity of a view: the same memory seen in the same shape."""
    try:
        return storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    except RuntimeError:
        return storage_key(tensor), tuple(tensor.shape)


class Taint:
    """Ancestry of non-finite values, by storage; and their float64 shadows, by view.

    A storage may be freed and its address used again: every op's results are looked at when they are made, so a clean
    result clears what an earlier tensor left at its address.
    """

    def __init__(self) -> None:
        self._births: dict[int, Births] = {}
        self._shadows: dict[tuple[Any, ...], torch.Tensor] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._births.clear()
        self._shadows.clear()

    def births(self, tensor: torch.Tensor) -> Births:
        """The births that a tensor's memory descends from."""
        return self._births.get(storage_key(tensor), NONE)

    def mark(self, tensor: torch.Tensor, births: Births, *, added: bool) -> None:
        """A result is non-finite.

        Args:
            tensor: The result.
            births: Where its non-finite values come from.
            added: The op wrote into memory that may hold earlier ones.
        """
        key = storage_key(tensor)
        self._births[key] = births | self._births.get(key, NONE) if added else births
        if self._shadows:  # of an earlier tensor at this address; `cast_shadow` follows where this one has its own
            self._shadows.pop(view_key(tensor), None)

    def clean(self, tensor: torch.Tensor) -> None:
        """A result is finite: if it fills its memory, nothing non-finite is left there."""
        key = storage_key(tensor)
        if key in self._births and _covers(tensor):
            del self._births[key]
        if self._shadows:
            self._shadows.pop(view_key(tensor), None)

    def forget(self, tensor: torch.Tensor) -> None:
        """A result is fresh memory that holds nothing yet: what its address held before is gone."""
        self._births.pop(storage_key(tensor), None)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float64 tensor that would be here, had the births been computed in float64."""
        return self._shadows.get(view_key(tensor)) if self._shadows else None

    def cast_shadow(self, tensor: torch.Tensor, reference: torch.Tensor) -> None:
        """Remember `reference` where `tensor` is non-finite and `reference` is not.

        Args:
            tensor: A result, non-finite somewhere.
            reference: The same result in float64, from inputs without the births.
        """
        real = doubled(tensor)
        fine = torch.isfinite(real)
        if bool((~fine & torch.isfinite(reference)).any()):
            self._shadows[view_key(tensor)] = torch.where(fine, real, reference)
        else:
            self._shadows.pop(view_key(tensor), None)


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
