"""Reads many tensors once, in bounded memory: while one thread waits for bytes, another examines its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.stored import BLOCK_ELEMENTS, Block, HoledBlock, ReadBuffer, StoredTensor
from ampdoctor.numerics.counting import imap_on_workers

READ_AHEAD_BYTES = 64 * 1024 * 1024
"""How far ahead the system is told what will be read: from a disk that is not in the cache, the bytes arrive while
earlier ones are counted. It costs no memory of the process."""

BATCH_ELEMENTS = 8 * BLOCK_ELEMENTS
"""Number of elements that a thread takes at a time: enough that threads rarely wait for each other's Python, and few
enough that all of them have work in a tensor of ordinary size."""
BATCH_RUNS = 256
"""Maximum number of runs of small tensors in a batch: the result for each takes kilobytes until the batch is done."""

Key = TypeVar("Key")
Result = TypeVar("Result")
Numbered = Iterator[tuple[int, torch.Tensor]]
"""Blocks of one tensor, each with its number in it, as a 1-D tensor that the next one overwrites."""

_Blocks = list[tuple[int, Block | HoledBlock]]
_Batch = list[tuple[Key, _Blocks]]


def stream(
    tensors: Iterable[tuple[Key, StoredTensor]], work: Callable[[Key, Numbered], Result], *, jobs: int
) -> Iterator[tuple[Key, Result, int]]:
    """Apply `work` to every tensor, a run of its blocks at a time.

    Args:
        tensors: The tensors to read, each with a key of the caller's.
        work: Takes the key and consecutive blocks, and reads them all. It runs on `jobs` threads, each with one torch
            thread.
        jobs: Number of threads, at least 1.

    Yields:
        Key, result and bytes of each run: tensors in the given order, and each tensor's runs in order.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    local = threading.local()

    def examine(batch: _Batch[Key]) -> list[tuple[Key, Result, int]]:
        if not hasattr(local, "buffer"):
            local.buffer = ReadBuffer()
        return [
            (key, work(key, ((number, block.read(local.buffer)) for number, block in run)), _bytes(run))
            for key, run in batch
        ]

    for results in imap_on_workers(examine, _announced(_batches(tensors)), jobs):
        yield from results


def _batches(tensors: Iterable[tuple[Key, StoredTensor]]) -> Iterator[_Batch[Key]]:
    """Yields runs in groups that are worth a thread's work: small tensors go together, large ones are divided."""
    batch: _Batch[Key] = []
    elements = 0
    for key, tensor in tensors:
        run: _Blocks = []
        for number, block in enumerate(tensor.blocks()):
            if not run:
                batch.append((key, run))
            run.append((number, block))
            elements += block.nbytes // tensor.dtype.itemsize
            if elements >= BATCH_ELEMENTS:
                yield batch
                batch, run, elements = [], [], 0
        if len(batch) >= BATCH_RUNS:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


def _bytes(run: _Blocks) -> int:
    return sum(block.nbytes for _, block in run)


def _announced(batches: Iterable[_Batch[Key]]) -> Iterator[_Batch[Key]]:
    """Yields the same, and tells the system of bytes some way ahead of the block that is read."""
    told: dict[int, int] = {}
    for batch in batches:
        for block in (block for _, run in batch for _, block in run):
            if isinstance(block, Block) and isinstance(block.file, RegularFile):
                file, end = block.file, block.offset + block.nbytes
                if end > told.get(id(file), 0):
                    file.will_need(end, READ_AHEAD_BYTES)
                    told[id(file)] = end + READ_AHEAD_BYTES // 2
        yield batch
