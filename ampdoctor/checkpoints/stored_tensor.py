"""A tensor that is still in its file: where its bytes are, and how they are read in bounded memory."""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ampdoctor.checkpoints.files import ByteSource
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.report import Skipped
from ampdoctor.numerics.tensors import E8M0

BLOCK_ELEMENTS = 1 << 20
"""Elements examined at a time: still in the cache when they are counted, and calls cost nothing."""

READ_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, *E8M0,
        torch.complex128, torch.complex64, torch.complex32,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8,
        torch.bool,
    }
)  # fmt: skip
"""Element types whose values can be examined; torch only moves the bytes of the others (`float4_e2m1fn_x2`)."""

_FINITE_DTYPE = re.compile(r"q?u?int\d|bits\d|[IU]\d|bool|float4_|F4|F6_", re.ASCII | re.IGNORECASE)
"""Names of dtypes without NaN and Inf, in torch and in safetensors: integers, E2M1, E2M3, E3M2."""

MAX_DIMENSIONS = 64
"""Maximum for a tensor: as many as most of torch's own operations take."""
MAX_STRIDED_BYTES = 256 * 1024 * 1024
"""A view with holes (`w[:, ::2]`, saved with its whole storage) is read with its holes; a larger one is refused."""


class ReadBuffer:
    """A reusable buffer for one reader: it grows to the largest block, so memory does not grow with the file."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def fill(self, file: ByteSource, offset: int, count: int) -> bytearray:
        """Returns the buffer, with `count` bytes from `offset` at its beginning."""
        if len(self._bytes) < count:
            self._bytes = bytearray(count)
        file.read_into(offset, memoryview(self._bytes)[:count])
        return self._bytes


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive elements of a tensor in a file."""

    file: ByteSource
    offset: int  # byte position of the first element
    count: int  # of elements
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes that are read for it."""
        return self.count * self.dtype.itemsize

    def read(self, buffer: ReadBuffer) -> torch.Tensor:
        """Returns the elements as a 1-D view of the buffer, which the buffer's next use overwrites."""
        data = buffer.fill(self.file, self.offset, self.nbytes)
        return torch.frombuffer(data, dtype=self.dtype, count=self.count)


@dataclass(frozen=True, slots=True)
class HoledBlock:
    """Elements of a view with holes: elements and holes have to be read together."""

    tensor: StridedTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, _buffer: ReadBuffer) -> torch.Tensor:
        """Returns the elements, 1-D, in new memory; one that overlapping rows share may come more than once."""
        return self.tensor.load().flatten()


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """Elements of a tensor in memory."""

    values: torch.Tensor  # 1-D

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.dtype.itemsize

    def read(self, _buffer: ReadBuffer) -> torch.Tensor:
        """Returns the elements where they are: a device measures its own tensors."""
        return self.values


AnyBlock: TypeAlias = Block | HoledBlock | LiveBlock


class StoredTensor(ABC):
    """A tensor inside a checkpoint, in one place or in several."""

    __slots__ = ()

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the distinct elements, which a scan reads (an expanded tensor counts its storage once)."""

    @property
    @abstractmethod
    def identity(self) -> object:
        """A key that is equal for two names of one tensor (tied weights)."""

    @property
    @abstractmethod
    def file_name(self) -> str:
        """The file that holds it, or its beginning."""

    @abstractmethod
    def blocks(self, elements: int = BLOCK_ELEMENTS) -> Iterator[AnyBlock]:
        """Yields the distinct stored elements in pieces of at most `elements`, in a fixed order.

        Elements that an expanded view repeats come once, so that the bytes in the file bound the work.
        """

    def chunks(self, elements: int = BLOCK_ELEMENTS) -> Iterator[torch.Tensor]:
        """Yields the same as 1-D tensors of the stored dtype; the next overwrites each."""
        buffer = ReadBuffer()
        return (block.read(buffer) for block in self.blocks(elements))

    @abstractmethod
    def load(self) -> torch.Tensor:
        """Returns the tensor in new memory; raises LimitExceededError for a view with more than `MAX_STRIDED_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedTensor(StoredTensor):
    """A strided view of one storage; the reader has checked that the storage lies inside the file."""

    file: ByteSource
    offset: int  # byte position of the storage in the file
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    start: int = 0  # the first element's index in the storage

    @property
    def nbytes(self) -> int:
        return self._span() * self.dtype.itemsize

    @property
    def identity(self) -> object:
        return self.file.name, self.file.origin + self.offset, self.dtype, self.start, self.shape, self.stride

    @property
    def file_name(self) -> str:
        return self.file.name

    def within_storage(self) -> bool:
        """Whether every element is inside the storage; otherwise reads would get a neighbour's bytes."""
        if self.start < 0 or len(self.shape) != len(self.stride) or min((*self.shape, *self.stride), default=0) < 0:
            return False
        return self.numel == 0 or (self.start + self._span()) * self.dtype.itemsize <= self.storage_bytes

    def blocks(self, elements: int = BLOCK_ELEMENTS) -> Iterator[AnyBlock]:
        if self._has_holes():
            dims = self._steps()  # without repeated dimensions
            yield HoledBlock(replace(self, shape=tuple(n for _, n in dims), stride=tuple(step for step, _ in dims)))
            return
        item = self.dtype.itemsize
        left, position = self._span(), self.offset + self.start * item
        while left > 0:
            count = min(left, elements)
            yield Block(self.file, position, count, self.dtype)
            position += count * item
            left -= count

    def load(self) -> torch.Tensor:
        """As in `StoredTensor`; repeated elements (stride 0) stay shared, as `torch.load` keeps them."""
        if self.numel == 0:
            return torch.empty(0, dtype=self.dtype).as_strided(self.shape, self.stride)
        size = self._span() * self.dtype.itemsize
        if self._has_holes() and size > MAX_STRIDED_BYTES:
            raise LimitExceededError(f"{self.file.name}: bytes of a strided tensor", MAX_STRIDED_BYTES, size)
        data = bytearray(size)
        self.file.read_into(self.offset + self.start * self.dtype.itemsize, memoryview(data))
        return torch.frombuffer(data, dtype=self.dtype).as_strided(self.shape, self.stride)

    def _span(self) -> int:
        """Returns the number of elements from the first to the last that the view can reach."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def _steps(self) -> list[tuple[int, int]]:
        """Stride and size of the dimensions that move, smallest stride first; dimensions of one stride are merged."""
        sizes: dict[int, int] = {}
        for size, step in zip(self.shape, self.stride, strict=True):
            if step and size > 1:
                sizes[step] = sizes.get(step, 1) + size - 1
        return sorted(sizes.items())

    def _has_holes(self) -> bool:
        """Whether it has fewer elements than its span, so that some between the first and the last are not its own."""
        return 0 < math.prod(size for _, size in self._steps()) < self._span()


@dataclass(frozen=True, slots=True)
class LiveTensor(StoredTensor):
    """A tensor of a run, which is measured as those of a file are."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def identity(self) -> object:
        return id(self.tensor)

    @property
    def file_name(self) -> str:
        return ""

    def blocks(self, elements: int = BLOCK_ELEMENTS) -> Iterator[AnyBlock]:
        return map(LiveBlock, self.tensor.detach().reshape(-1).split(elements) if self.numel else ())

    def load(self) -> torch.Tensor:
        return self.tensor.detach().cpu().clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A piece; `at` is its first element's index in each dimension of the whole, or in the flattened whole."""

    stored: StridedTensor
    at: tuple[int, ...] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTensor(StoredTensor):
    """A tensor whose pieces (at least one) lie in several places; they have been checked to fill it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.stored.nbytes for shard in self.shards)

    @property
    def identity(self) -> object:
        return self.shape, tuple((shard.at, shard.stored.identity) for shard in self.shards)

    @property
    def file_name(self) -> str:
        return self.shards[0].stored.file_name

    def blocks(self, elements: int = BLOCK_ELEMENTS) -> Iterator[AnyBlock]:
        return itertools.chain.from_iterable(shard.stored.blocks(elements) for shard in self.shards)

    def load(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for shard in self.shards:
            piece = shard.stored.load()
            if isinstance(shard.at, int):
                whole.view(-1)[shard.at : shard.at + piece.numel()] = piece.flatten()
            else:
                whole[tuple(slice(a, a + n) for a, n in zip(shard.at, piece.shape, strict=True))] = piece
        return whole


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns row-major strides in elements; sizes of 0 count as 1, as in torch."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns an element type as reports write it ("float16")."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTensor(Skipped):
    """A sparse tensor: it is not built; its stored `values` are a tensor of their own."""

    values: StoredTensor


def unread(reason: str, what: str = "") -> Skipped:
    """Stands for a tensor (`what`) whose values are not read and may be anything; `reason` is a clause."""
    return Skipped(what=what, reason=reason, kind="unread")


def unread_dtype(dtype: str, what: str = "", where: str = "") -> Skipped:
    """Stands for a tensor of a dtype that is not read, which may still be known to be finite; `where` is in words."""
    name = dtype.removeprefix("torch.")[:40]
    reason = f"dtype {name!r}{where} is not one that is read"
    return Skipped(what=what, reason=reason, kind="left_out" if _FINITE_DTYPE.match(name) else "unread")


# -- several tensors of one shape, element by element, in bounded memory --

MAX_LOADED_BYTES = 256 * 1024 * 1024
"""Tensors with different orders of elements (pieces beside a whole) are loaded to be compared up to this size."""


PAIRED_ELEMENTS = 1 << 17
"""Elements of each tensor that are compared at a time: with intermediate results they still fit the cache."""


def side_by_side(*tensors: StoredTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same elements of several tensors, 1-D; raises LimitExceededError if they are too large to reorder."""
    first, *others = tensors
    if all(_aligned(first, other) for other in others):
        yield from zip(*(tensor.chunks(PAIRED_ELEMENTS) for tensor in tensors), strict=True)
        return
    for tensor in tensors:
        if tensor.numel * tensor.dtype.itemsize > MAX_LOADED_BYTES:
            size = tensor.numel * tensor.dtype.itemsize
            raise LimitExceededError("bytes of tensors whose elements lie in different orders", MAX_LOADED_BYTES, size)
    yield tuple(tensor.load().flatten() for tensor in tensors)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D tensor in a dtype that supports arithmetic and holds the values exactly: float32 or float64."""
    if values.dtype.is_complex:
        values = torch.view_as_real(values).flatten()
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _aligned(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether both are streamed in the same order of elements."""
    if isinstance(one, LiveTensor) and isinstance(other, LiveTensor):
        return True
    if isinstance(one, StridedTensor) and isinstance(other, StridedTensor):
        return _order(one) == _order(other) is not None
    if isinstance(one, JoinedTensor) and isinstance(other, JoinedTensor) and len(one.shards) == len(other.shards):
        return all(
            a.at == b.at and a.stored.shape == b.stored.shape and _aligned(a.stored, b.stored)
            for a, b in zip(one.shards, other.shards, strict=True)
        )
    return False


def _order(tensor: StridedTensor) -> tuple[tuple[int, int], ...] | None:
    """Returns the sizes and strides that matter; None for a view with holes, which is not streamed in pieces."""
    distinct = math.prod(size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step)
    if tensor.numel and distinct * tensor.dtype.itemsize < tensor.nbytes:
        return None
    return tuple((size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size != 1)
