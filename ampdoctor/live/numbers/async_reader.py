"""Packs numbers into one tensor a device, and reads it when the device has finished, without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ampdoctor.live.numbers.norms_and_samples import local
from ampdoctor.numerics.tensors import Unseen

Tag = TypeVar("Tag")

AHEAD = 16
"""Readings that may wait for their device; a host that is further ahead loses the newest, and does not wait. A training
loop is at most a few steps ahead, because it reads its loss now and then."""

_SIZES = 8
"""Sizes of readings for which buffers are kept; a loop has a few, by optimizer and number of micro-batches."""


Send = Callable[[Tensor, Tensor | None], tuple[Tensor, Any]]
"""Starts to copy a device tensor to the host, into a used buffer of its size and dtype if there is one; returns the
buffer and its arrival."""


def send(tensor: Tensor, buffer: Tensor | None) -> tuple[Tensor, Any]:
    """Starts to copy a CUDA tensor into pinned memory; from unpinned memory a reader may be early (torchrec#4421)."""
    if buffer is None:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    buffer.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return buffer, event


@dataclass(slots=True, eq=False)
class _OnTheWay(Generic[Tag]):
    tag: Tag
    values: list[Tensor]
    arrivals: list[Any]  # as CUDA's events
    borrowed: list[Tensor]


class AsyncReader(Generic[Tag]):
    """A ring of at most `ahead` readings, returned in the order of `put`. `send` copies a device tensor to the host."""

    def __init__(self, send: Send = send, *, ahead: int = AHEAD) -> None:
        self._send = send
        self._ahead = ahead
        self._waiting: deque[_OnTheWay[Tag]] = deque()
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.lost = 0  # readings that found the ring full

    def put(self, tag: Tag, tensors: Sequence[Tensor]) -> bool:
        """Starts to read one-dimensional tensors, not to be written to any more; False where the ring is full."""
        if len(self._waiting) >= self._ahead:
            self.lost += 1
            return False
        reading: _OnTheWay[Tag] = _OnTheWay(tag, [], [], [])
        for tensor in tensors:
            if tensor.device.type == "cpu":
                reading.values.append(tensor)
                continue
            spare = self._spare.get((tensor.numel(), tensor.dtype))
            with Unseen(tensor):
                buffer, arrival = self._send(tensor, spare.pop() if spare else None)
            reading.values.append(buffer)
            reading.borrowed.append(buffer)
            reading.arrivals.append(arrival)
        self._waiting.append(reading)
        return True

    def ready(self) -> Iterator[tuple[Tag, list[Tensor]]]:
        """Yields the readings that have arrived; each tensor is a reused buffer, valid until the next iteration."""
        while self._waiting and all(arrival.query() for arrival in self._waiting[0].arrivals):
            yield from self._take()

    def drain(self) -> Iterator[tuple[Tag, list[Tensor]]]:
        """Yields all readings, and waits for them: for the end of a training."""
        while self._waiting:
            for arrival in self._waiting[0].arrivals:
                arrival.synchronize()
            yield from self._take()

    def _take(self) -> Iterator[tuple[Tag, list[Tensor]]]:
        reading = self._waiting.popleft()
        yield reading.tag, reading.values
        for buffer in reading.borrowed:
            self._spare.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
        while len(self._spare) > _SIZES:
            del self._spare[next(iter(self._spare))]


class PackedTensors:
    """Packs sections of numbers into one tensor a device, so that one copy brings all of them to the host."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}  # with the section's place in the order
        self._packed: list[tuple[Tensor, list[tuple[int, int]]]] = []

    def add(self, key: str, numbers: Tensor) -> None:
        """Adds a section of real numbers, not to be written to before `pack`; several sections may share a key."""
        own = local(numbers) if numbers.is_floating_point() else numbers
        self._waiting.setdefault(own.device, []).append((len(self._keys), own))
        self._keys.append(key)

    def pack(self) -> None:
        """Copies the sections added since the last call, each on its device: they may be written to afterwards."""
        for sections in self._waiting.values():
            with Unseen(sections[0][1]):
                flat = [numbers.reshape(-1) for _, numbers in sections]
                wide = torch.float64 if any(part.dtype == torch.float64 for part in flat) else torch.float32
                packed = torch.cat([part.to(wide) for part in flat])
            sizes = [(place, part.numel()) for (place, _), part in zip(sections, flat, strict=True)]
            self._packed.append((packed, sizes))
        self._waiting.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The packed tensors: one-dimensional, float32, or float64 where a section is."""
        return [packed for packed, _ in self._packed]

    def opened(self, arrived: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Returns views of the sections by key, in the order of `add`, from copies of `tensors` on the CPU."""
        sections: dict[int, Tensor] = {}
        for values, (_, sizes) in zip(arrived, self._packed, strict=True):
            places = [place for place, _ in sizes]
            sections.update(zip(places, values.split([size for _, size in sizes]), strict=True))
        found: dict[str, list[Tensor]] = {}
        for place, key in enumerate(self._keys):
            found.setdefault(key, []).append(sections[place])
        return found
