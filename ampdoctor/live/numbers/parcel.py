"""Numbers of many kinds in one tensor a device, so that one copy brings them all to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampdoctor.live.numbers.norms import local
from ampdoctor.numerics.tensors import Unseen


class Parcel:
    """Collects sections and knows them again when their copy has arrived."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}  # with the section's place in the order
        self._packed: list[tuple[Tensor, list[tuple[int, int]]]] = []

    def add(self, key: str, numbers: Tensor) -> None:
        """Adds a section.

        Args:
            key: Any, and any number of sections with it.
            numbers: Any shape, real, any device; must not be written to before `pack`.
        """
        own = local(numbers) if numbers.is_floating_point() else numbers
        self._waiting.setdefault(own.device, []).append((len(self._keys), own))
        self._keys.append(key)

    def pack(self) -> None:
        """Copies what was added since the last time, each on its device: it may be written to from here on."""
        for sections in self._waiting.values():
            with Unseen(sections[0][1]):
                flat = [numbers.detach().reshape(-1) for _, numbers in sections]
                wide = torch.float64 if any(part.dtype == torch.float64 for part in flat) else torch.float32
                packed = torch.cat([part.to(wide) for part in flat])
            sizes = [(place, part.numel()) for (place, _), part in zip(sections, flat, strict=True)]
            self._packed.append((packed, sizes))
        self._waiting.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """What was packed: one-dimensional, float32, or float64 where a section is."""
        return [packed for packed, _ in self._packed]

    def opened(self, arrived: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Returns views of the sections by key, in the order in which they were added.

        Args:
            arrived: Copies of `tensors` on the CPU, in their order.
        """
        sections: dict[int, Tensor] = {}
        for values, (_, sizes) in zip(arrived, self._packed, strict=True):
            places = [place for place, _ in sizes]
            sections.update(zip(places, values.split([size for _, size in sizes]), strict=True))
        found: dict[str, list[Tensor]] = {}
        for place, key in enumerate(self._keys):
            found.setdefault(key, []).append(sections[place])
        return found
