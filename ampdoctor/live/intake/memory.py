"""What a device's allocator says of itself: counters on the host, for which no device is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic  # a script may put another in its place

import torch

_PAUSE_S = 0.05
"""From one reading to the next: one costs tens of microseconds, and memory changes over many steps."""


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocator's counters.

    Attributes:
        most_bytes: The most that tensors have held since the process, or the loop itself, began to count.
        retries: How often it had to free its cache and try again.
    """

    most_bytes: int | None = None
    retries: int | None = None


_NONE = Memory()


class MemoryReadings:
    """Reads the allocator of the device that trains, now and then.

    The count of the most is never begun anew, as that would be seen by a loop that reads it as well.
    """

    def __init__(self) -> None:
        self._last = float("-inf")

    def of(self, optimizer: torch.optim.Optimizer) -> Memory:
        """Returns the counters of an optimizer's device; none on a CPU, and none so soon after the last time."""
        first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
        if first is None or first.device.type != "cuda":
            return _NONE
        now = monotonic()
        if now - self._last < _PAUSE_S:
            return _NONE
        self._last = now
        counters = torch.cuda.memory_stats_as_nested_dict(first.device)
        held = counters.get("allocated_bytes", {}).get("all", {}).get("peak")
        return Memory(most_bytes=held, retries=counters.get("num_alloc_retries"))
