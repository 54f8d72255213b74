"""Numbers packed into one tensor a device, and read when the device is done: nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ampdoctor.live.numbers.norms_and_samples import local
from ampdoctor.numerics.tensors import Unseen

Tag = TypeVar("Tag")

AHEAD = 16
"""Readings that may be on their way: a host that is further ahead of its device loses the newest, and is not held up.
A training loop is at most a few steps ahead, since it reads its loss now and then."""

_SIZES = 8
"""Sizes of reading for which buffers are kept; a loop has a few, by optimizer and number of micro-batches."""


class Arrival(Protocol):
    """When a copy has arrived. The seam is here so that a test can be the device; on CUDA it is an event."""

    def query(self) -> bool:
        """Returns whether it has, without waiting."""

    def synchronize(self) -> None:
        """Waits until it has."""


Send = Callable[[Tensor, Tensor | None], tuple[Tensor, Arrival]]
"""Begins to copy a device tensor to the host, into a buffer of an earlier one of its size and dtype where there is one;
returns the buffer and when it may be read."""


def send(tensor: Tensor, buffer: Tensor | None) -> tuple[Tensor, Arrival]:
    """Begins to copy a CUDA tensor into pinned memory on the current stream.

    Into other memory a copy that does not wait races with its reader (torchrec#4421: norms of 1e-22).
    """
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
    arrivals: list[Arrival]
    borrowed: list[Tensor]


class Later(Generic[Tag]):
    """A ring of readings, which are told in the order in which they were put in.

    Args:
        send: Copies a tensor that is not the CPU's.
        ahead: Number of readings that may be on their way.

    Attributes:
        lost: Readings that found the ring full.
    """

    def __init__(self, send: Send = send, *, ahead: int = AHEAD) -> None:
        self._send = send
        self._ahead = ahead
        self._waiting: deque[_OnTheWay[Tag]] = deque()
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.lost = 0

    def put(self, tag: Tag, tensors: Sequence[Tensor]) -> bool:
        """Begins to read tensors, which nobody may write to afterwards.

        Args:
            tag: What `ready` returns them with.
            tensors: One-dimensional, of any devices; those on the CPU are there at once.

        Returns:
            Whether they will arrive.
        """
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
        """Yields the readings that have arrived; their tensors hold good until the next is taken."""
        while self._waiting and all(arrival.query() for arrival in self._waiting[0].arrivals):
            yield from self._take()

    def drain(self) -> Iterator[tuple[Tag, list[Tensor]]]:
        """Yields all that are on their way, and waits for them: for the end of a training."""
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


# Numbers of many kinds in one tensor a device, so that one copy brings them all to the host.


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
