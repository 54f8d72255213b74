"""Reads many tensors once, in bounded memory: while one thread waits for bytes, another examines its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.stored import BLOCK_ELEMENTS, Block, HoledBlock, ReadBuffer, StoredTensor
from ampdoctor.numerics.workers import imap_on_workers

READ_AHEAD_BYTES = 64 * 1024 * 1024
"""How far ahead the system is told what will be read: from a disk that is not in the cache, the bytes arrive while
earlier ones are counted. It costs no memory of the process."""

BATCH_BLOCKS = 256
"""Maximum number of blocks of small tensors in a batch: the result for each takes kilobytes until the batch is done."""

Key = TypeVar("Key")
Result = TypeVar("Result")

_Batch = list[tuple[Key, int, Block | HoledBlock]]


def stream(
    tensors: Iterable[tuple[Key, StoredTensor]], work: Callable[[Key, int, torch.Tensor], Result], *, jobs: int
) -> Iterator[tuple[Key, Result, int]]:
    """Apply `work` to every block of every tensor.

    Args:
        tensors: The tensors to read, each with a key of the caller's.
        work: Takes the key, the number of the block in its tensor, and its elements as a 1-D tensor that must not be
            kept. It runs on `jobs` threads, each with one torch thread.
        jobs: Number of threads, at least 1.

    Yields:
        Key, result and bytes of each block: tensors in the given order, and each tensor's blocks in order.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    local = threading.local()

    def examine(batch: _Batch[Key]) -> list[tuple[Key, Result, int]]:
        if not hasattr(local, "buffer"):
            local.buffer = ReadBuffer()
        return [(key, work(key, number, block.read(local.buffer)), block.nbytes) for key, number, block in batch]

    for results in imap_on_workers(examine, _announced(_batches(tensors)), jobs):
        yield from results


def _batches(tensors: Iterable[tuple[Key, StoredTensor]]) -> Iterator[_Batch[Key]]:
    """Yields blocks in groups that are worth a thread's work: small tensors go together."""
    batch: _Batch[Key] = []
    elements = 0
    for key, tensor in tensors:
        for number, block in enumerate(tensor.blocks()):
            batch.append((key, number, block))
            elements += block.nbytes // tensor.dtype.itemsize
            if elements >= BLOCK_ELEMENTS or len(batch) >= BATCH_BLOCKS:
                yield batch
                batch, elements = [], 0
    if batch:
        yield batch


def _announced(batches: Iterable[_Batch[Key]]) -> Iterator[_Batch[Key]]:
    """Yields the same, and tells the system of bytes some way ahead of the block that is read."""
    told: dict[int, int] = {}
    for batch in batches:
        for _, _, block in batch:
            if isinstance(block, Block) and isinstance(block.file, RegularFile):
                file, end = block.file, block.offset + block.nbytes
                if end > told.get(id(file), 0):
                    file.will_need(end, READ_AHEAD_BYTES)
                    told[id(file)] = end + READ_AHEAD_BYTES // 2
        yield batch
