"""`Intake`: what the host knows of a loop's data and memory when a step is about to be taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampdoctor.live.intake.batches import Batches, Counted
from ampdoctor.live.intake.data_wait import DataWait
from ampdoctor.live.intake.memory import Memory, MemoryReadings


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """Of one step.

    Attributes:
        counted: Samples and tokens of all ranks, from the beginning to this step.
        data_seconds: Waited for data since the optimizer's step before; None where that was not seen.
        memory: Of the device.
    """

    counted: Counted
    data_seconds: float | None
    memory: Memory


class Intake:
    """Hears what a loop takes in.

    Args:
        world_size: Number of processes.
    """

    def __init__(self, world_size: int) -> None:
        self._batches = Batches(world_size)
        self._wait = DataWait()
        self._memory = MemoryReadings()

    def world_is(self, size: int) -> None:
        """So many processes there are; told before the first update."""
        self._batches.world_size = size

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, waits for data are heard; afterwards nothing is left in place."""
        with self._wait.watching():
            yield

    def called(self, model: nn.Module, args: Any, kwargs: Any, *, backwards: int) -> torch.Tensor | None:
        """The loop has called a model, after so many backwards of the running step; returns a new batch of it."""
        return self._batches.called(model, args, kwargs, backwards=backwards)

    def stepping(self, name: str, optimizer: torch.optim.Optimizer) -> TakenIn:
        """An optimizer of this name is about to step, or its scaler to skip: once a step."""
        return TakenIn(
            counted=self._batches.stepping(name),
            data_seconds=self._wait.since(name),
            memory=self._memory.of(optimizer),
        )
