"""A tensor that still lies in its file: where its bytes are, and how they are read in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import LimitExceededError

CHUNK_BYTES = 32 * 1024 * 1024
"""Size of the read buffer. Measured on a 512 MB file: large enough to read at memory speed, small enough that peak
memory stays near 36 MB."""

MAX_STRIDED_BYTES = 1024 * 1024 * 1024
"""A view with holes (`w[:, ::2]`, saved with its whole storage) is read whole before the holes are left out; beyond
this it is refused."""


class ReadBuffer:
    """One reusable buffer, so that a scan's memory does not grow with the file; allocated at first use."""

    def __init__(self, size: int = CHUNK_BYTES) -> None:
        self.size = size
        self._bytes = bytearray()

    def fill(self, file: RegularFile, offset: int, count: int) -> bytearray:
        """The buffer, its first `count` bytes (at most `size`) read from `offset`."""
        if len(self._bytes) < count:
            self._bytes = bytearray(min(self.size, max(count, 64 * 1024)))
        file.read_into(offset, memoryview(self._bytes)[:count])
        return self._bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A strided tensor inside a file.

    Attributes:
        file: The file.
        offset: Byte position of its storage in the file.
        storage_bytes: Length of that storage; the reader has checked that it lies inside the file.
        dtype: Element type.
        shape: Sizes.
        stride: Strides in elements.
        start: Index of the first element in the storage, in elements.
    """

    file: RegularFile
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements: what a scan of it reads (an expanded tensor counts its storage once)."""
        return self._span() * self.dtype.itemsize

    @property
    def identity(self) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...]]:
        """Equal for two names of one and the same tensor (tied weights)."""
        return self.file.name, self.offset, self.start, self.shape, self.stride

    def within_storage(self) -> bool:
        """Whether every element lies inside the storage: a lying size or stride would read a neighbour's bytes."""
        if (
            self.start < 0
            or any(s < 0 for s in self.shape)
            or any(s < 0 for s in self.stride)
            or len(self.shape) != len(self.stride)
        ):
            return False
        return self.numel == 0 or (self.start + self._span()) * self.dtype.itemsize <= self.storage_bytes

    def chunks(self, buffer: ReadBuffer) -> Iterator[torch.Tensor]:
        """The distinct stored elements as 1-D tensors of the stored dtype, in storage order.

        Each is a view of `buffer` and is overwritten by the next. Holes of a strided view are left out; elements that
        an expanded view repeats come once, so that the work is bounded by the bytes in the file.

        Raises:
            CheckpointError: The bytes cannot be read.
            LimitExceededError: A view with holes needs more than `MAX_STRIDED_BYTES`.
        """
        span = self._span()
        if self._has_holes():
            values = self.load().flatten()
            step = max(1, buffer.size // self.dtype.itemsize)
            for first in range(0, values.numel(), step):
                yield values[first : first + step]
            return
        item = self.dtype.itemsize
        position = self.offset + self.start * item
        while span > 0:
            count = min(span, buffer.size // item)
            data = buffer.fill(self.file, position, count * item)
            yield torch.frombuffer(data, dtype=self.dtype, count=count)
            position += count * item
            span -= count

    def load(self) -> torch.Tensor:
        """The tensor itself, in memory of its own, with its logical shape and dtype.

        Repeated elements (stride 0) stay shared, as `torch.load` keeps them.

        Raises:
            CheckpointError: The bytes cannot be read.
            LimitExceededError: A view with holes needs more than `MAX_STRIDED_BYTES`.
        """
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        size = self._span() * self.dtype.itemsize
        if self._has_holes() and size > MAX_STRIDED_BYTES:
            raise LimitExceededError(f"{self.file.name}: bytes of a strided tensor", MAX_STRIDED_BYTES, size)
        data = bytearray(size)
        self.file.read_into(self.offset + self.start * self.dtype.itemsize, memoryview(data))
        return torch.frombuffer(data, dtype=self.dtype).as_strided(self.shape, self.stride)

    def _span(self) -> int:
        """Elements from the first to the last that the view can reach."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def _has_holes(self) -> bool:
        distinct = math.prod(size for size, step in zip(self.shape, self.stride, strict=True) if step)
        return 0 < distinct < self._span()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; sizes of 0 count as 1, as torch has it."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
