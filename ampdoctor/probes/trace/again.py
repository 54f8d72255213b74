"""An op once more in float64, at the elements that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ampdoctor.probes.ops.arguments import Ran, Split
from ampdoctor.probes.ops.recompute import doubled, widely

FEW = 8
"""Where at least this many times as many elements are there as are asked for, gathering those is cheaper than all."""


class _NotByElementError(Exception):
    """An argument has another shape than the result."""


class Again:
    """Runs an op in float64 on the inputs that it had, and on other ones.

    An op that works on each element by itself runs on few: a cast of 38 million weights flushes a handful of them.

    Args:
        ran: The op as it ran.
        call: The call that is repeated: its own, or one with other values in some places.
    """

    def __init__(self, ran: Ran, call: Split) -> None:
        self._ran = ran
        self._call = call
        self._whole: list[torch.Tensor] | None = None

    def at(self, position: int, places: torch.Tensor) -> torch.Tensor | None:
        """Returns a result's elements in float64.

        Args:
            position: Which result.
            places: Positions in it, as if it were contiguous.

        Returns:
            Parallel to `places`; None where the op has no float64 kernel, draws random numbers, or gives other shapes.
        """
        few = self._few(position, places)
        if few is not None:
            return few
        if self._whole is None:
            self._whole = widely(self._ran.func, self._call)
        if [wide.shape for wide in self._whole] != [result.shape for result in self._ran.results]:
            return None
        return doubled(self._whole[position]).reshape(-1)[places]

    def _few(self, position: int, places: torch.Tensor) -> torch.Tensor | None:
        """The op on those elements alone; None where it does not work so."""
        ran = self._ran
        result = ran.results[position]
        if len(ran.results) != 1 or len(places) * FEW > result.numel() or not _is_elementwise(ran.func, ran.kernel):
            return None
        try:
            found = widely(ran.func, _picked(self._call, result.shape, places))
        except _NotByElementError:
            return None
        return doubled(found[0]) if [wide.shape for wide in found] == [places.shape] else None


def _picked(call: Split, shape: torch.Size, places: torch.Tensor) -> Split:
    def pick(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.dim() == 0:
            return item
        if item.shape != shape or item.layout is not torch.strided:
            raise _NotByElementError
        return item.detach().reshape(-1)[places]

    return replace(call, args=tree_map(pick, call.args), kwargs=tree_map(pick, call.kwargs))


@lru_cache(maxsize=1024)
def _is_elementwise(func: Callable[..., Any], kernel: str) -> bool:
    """Does torch say so of the op, or, for one over lists, of the op of a single tensor?"""
    packet = getattr(torch.ops.aten, kernel, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return kernel == "_to_copy" or any(torch.Tag.pointwise in op.tags for op in (func, *overloads))
