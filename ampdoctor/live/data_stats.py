"""Statistics on the host about a loop's data: samples and tokens, the wait for data, the memory of its devices."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import (
    monotonic,  # bound here, because a script may patch it
    perf_counter,  # bound here, because a script may patch it
)
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.numerics.tensors import is_plain

# -- samples and tokens, counted from the models' arguments --

_IDS = frozenset({torch.int64, torch.int32})


@dataclass(frozen=True, slots=True)
class SampleCount:
    """A number of samples and of tokens; None where it is not certain."""

    samples: int | None = 0  # rows of batches
    tokens: int | None = 0  # elements of batches of ids, padding included

    def __add__(self, other: SampleCount) -> SampleCount:
        return SampleCount(_sum(self.samples, other.samples), _sum(self.tokens, other.tokens))


_UNKNOWN = SampleCount(None, None)


class Batches:
    """Counts the batch of the first call before each backward of a step; after an uncertain one, nothing is counted."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._step = SampleCount()
        self._over = False  # an optimizer has used the step's count, and another one may use it too
        self._counted_at: int | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._batch: weakref.ref[Tensor] | None = None
        self._totals: dict[str, SampleCount] = {}
        self._factors: dict[int, tuple[weakref.ref[nn.Module], int | None]] = {}

    def called(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backwards: int
    ) -> Tensor | None:
        """Counts a call after `backwards` backwards of the step; returns the batch's tensor if new and certain."""
        if self._over:
            self._step, self._over, self._counted_at = SampleCount(), False, None
            self._model = self._batch = None
        if self._counted_at == backwards:
            return None
        self._counted_at = backwards
        if self._model is not None and self._model() is not model:
            self._step = _UNKNOWN
        self._model = weakref.ref(model)
        found = _batch_in(args, kwargs)
        if found is None:
            self._step = _UNKNOWN
            return None
        if self._batch is not None and self._batch() is found:  # a closure that is evaluated again
            return None
        self._batch = weakref.ref(found)
        ranks = self._ranks(model)
        self._step += _UNKNOWN if ranks is None else _size(found, ranks)
        return found

    def stepping(self, optimizer: str) -> SampleCount:
        """Called before an optimizer's step; returns the total of its samples and tokens, this step included."""
        untold = self._counted_at is None
        self._over = True
        total = self._totals.get(optimizer, SampleCount()) + (_UNKNOWN if untold else self._step)
        self._totals[optimizer] = total
        return total

    def _ranks(self, model: nn.Module) -> int | None:
        known = self._factors.get(id(model))
        if known is None or known[0]() is not model:
            # torch's recurrent layers may have the batch second
            second = any(getattr(part, "batch_first", True) is False for part in model.modules())
            known = weakref.ref(model), None if second else self._replicas(model)
            self._factors[id(model)] = known
        return known[1]

    def _replicas(self, model: nn.Module) -> int | None:
        """Returns the number of processes that have a batch each; None where that is not certain."""
        if self.world_size == 1:
            return 1
        group = getattr(model, "process_group", None)  # DistributedDataParallel, and the first FSDP
        mesh = getattr(next(model.parameters(), None), "device_mesh", None)  # the second
        if group is not None:
            size = group.size()
        else:
            is_fsdp = any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)
            size = mesh.size() if mesh is not None and mesh.ndim == 1 and is_fsdp else 0
        return size if size == self.world_size else None


def _batch_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the tensor that represents the batch: `input_ids`, else the first one; None where there is none."""
    named: list[tuple[str, Any]] = [("", value) for value in args]
    named += kwargs.items()
    found: list[tuple[str, Tensor]] = []
    for name, value in named:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, dict | Mapping):  # `dict` is the quicker check
            found += [(str(key), inner) for key, inner in value.items() if isinstance(inner, Tensor)]
        elif isinstance(value, list | tuple) and any(isinstance(inner, Tensor) for inner in value):
            return None
    shaped = [(name, tensor) for name, tensor in found if tensor.dim() > 0]
    if not shaped or not all(is_plain(tensor) and not tensor.is_nested for _, tensor in shaped):
        return None
    if len({tensor.shape[0] for _, tensor in shaped} - {1}) > 1:
        return None
    rows = max(tensor.shape[0] for _, tensor in shaped)
    ids = (tensor for name, tensor in shaped if name == "input_ids")
    batch = next(ids, shaped[0][1])
    return batch if batch.shape[0] == rows else None


def _size(batch: Tensor, ranks: int) -> SampleCount:
    is_ids = batch.dtype in _IDS and batch.dim() == 2
    return SampleCount(batch.shape[0] * ranks, batch.numel() * ranks if is_ids else None)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


# -- waiting for data, in the one method that all iterators of DataLoaders use --


class _Here(threading.local):
    """A thread's waits: a loop does not wait for data that another thread loads ahead."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches = 0
        self.inside = False


class DataWait:
    """Adds up the time in the `__next__` of DataLoaders' iterators, by thread."""

    def __init__(self) -> None:
        self._here = _Here()
        self._marks: dict[str, tuple[float, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures inside, and restores the method afterwards."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original, here, listens = _BaseDataLoaderIter.__next__, self._here, [True]

        @functools.wraps(original)
        def drawn(iterator: Any) -> Any:
            if here.inside or not listens:  # a dataset with its own DataLoader: the outer call counts the time
                return original(iterator)
            here.inside, began = True, perf_counter()
            try:
                return original(iterator)
            finally:
                here.seconds += perf_counter() - began
                here.batches += 1
                here.inside = False

        with replaced(_BaseDataLoaderIter, "__next__", drawn):
            try:
                yield
            finally:
                listens.clear()  # a program that has wrapped our function still calls it

    def since(self, optimizer: str) -> float | None:
        """Returns the seconds that this thread has waited since the last call for this optimizer; None if unknown."""
        here = self._here
        seconds, batches = self._marks.get(optimizer, (0.0, here.batches))
        self._marks[optimizer] = here.seconds, here.batches
        return here.seconds - seconds if here.batches > batches else None


# -- counters of a device's allocator, which are on the host: no wait --

_PAUSE_S = 0.05
"""Between two readings: one costs tens of microseconds, and memory changes over many steps."""


class DataStats:
    """Collects the statistics of a loop's data."""

    def __init__(self, world_size: int) -> None:
        self.batches = Batches(world_size)
        self.wait = DataWait()
        self._asked = float("-inf")

    def stepping(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Called once a step, before the optimizer steps or its scaler skips; returns fields of its `StepLine`."""
        counted = self.batches.stepping(name)
        return {
            "samples": counted.samples,
            "tokens": counted.tokens,
            "data_seconds": self.wait.since(name),
            **self._memory_of(optimizer),
        }

    def _memory_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the counters of a GPU's allocator, now and then; the peak is not reset, for the loop may read it."""
        first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
        now = monotonic()
        if first is None or first.device.type != "cuda" or now - self._asked < _PAUSE_S:
            return {}
        self._asked = now
        counters = torch.cuda.memory_stats_as_nested_dict(first.device)
        peak = counters.get("allocated_bytes", {}).get("all", {}).get("peak")
        return {"memory_bytes": peak, "memory_retries": counters.get("num_alloc_retries")}
