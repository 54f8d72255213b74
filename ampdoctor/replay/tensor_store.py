"""Stores tensors' values in memory or in a file; equal values at several moments are stored once."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ampdoctor.errors import ReplayError

SMALL = 2**16  # bytes up to which a tensor stays in memory: a seek costs more than it frees
_BLOCK = 2**22  # bytes of a file that are compared at once; they fit in a processor's cache
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, slots=True)
class InMemory:
    """Values in memory."""

    values: torch.Tensor

    def put_into(self, memory: torch.Tensor) -> None:
        """Write them into a tensor of the same dtype and shape."""
        memory.copy_(self.values)

    def are_in(self, memory: torch.Tensor) -> bool:
        """True if the tensor is bit-identical. May return False when comparing would be expensive."""
        if (memory.dtype, memory.shape) != (self.values.dtype, self.values.shape):
            return False
        if memory.stride() != self.values.stride():
            return False
        mine, theirs = _words(self.values), _words(memory)
        return mine is not None and theirs is not None and torch.equal(mine, theirs)


class _File:
    """A temporary file without a name; it is deleted with the last values in it."""

    def __init__(self, folder: Path) -> None:
        with _said(folder):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this lives
        weakref.finalize(self, self._file.close)
        self._folder = folder
        self._end = 0

    def append(self, values: torch.Tensor) -> int:
        """Write a dense CPU tensor; returns its start."""
        at, left = self._end, _buffer(values)
        with _said(self._folder):
            self._file.seek(at)
            while left:
                left = left[self._file.write(left) :]
        self._end += values.nbytes
        return at

    def read(self, at: int, into: torch.Tensor) -> None:
        """Fill a dense CPU tensor from position `at`."""
        left = _buffer(into)
        with _said(self._folder):
            self._file.seek(at)
            while left:
                done = self._file.readinto(left)
                if not done:
                    raise OSError(f"the file ends at byte {self._file.tell()}")
                left = left[done:]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Values in a file, from byte `at`."""

    file: _File
    at: int
    dtype: torch.dtype
    shape: torch.Size

    def put_into(self, memory: torch.Tensor) -> None:
        """As for `InMemory`."""
        if memory.device.type == "cpu" and memory.is_contiguous():
            self.file.read(self.at, memory)
        else:
            values = torch.empty(self.shape, dtype=self.dtype)
            self.file.read(self.at, values)
            memory.copy_(values)

    def are_in(self, memory: torch.Tensor) -> bool:
        """As for `InMemory`."""
        if memory.dtype != self.dtype or memory.shape != self.shape or not memory.is_contiguous():
            return False
        theirs = _bytes(memory)
        block = torch.empty(min(_BLOCK, len(theirs)), dtype=torch.uint8)
        for begin in range(0, len(theirs), _BLOCK):
            piece = theirs[begin : begin + _BLOCK].cpu()
            mine = block[: len(piece)]
            self.file.read(self.at + begin, mine)
            if not torch.equal(_of_words(mine), _of_words(piece)):
                return False
        return True


Values = InMemory | OnDisk
"""The elements of a tensor at one moment."""


@dataclass(slots=True)
class TensorStore:
    """Stores tensors' values; large ones in files of `folder`, if there is one."""

    folder: Path | None = None
    _file: _File | None = field(default=None, init=False)

    def keep(self, memory: torch.Tensor, known: Values | None = None) -> Values:
        """Stores a tensor's values, or returns `known` if they are equal; raises ReplayError if the folder is full."""
        if not _is_plain(memory):
            return InMemory(memory.clone())
        if known is not None and known.are_in(memory):
            return known
        if self.folder is None or memory.nbytes < SMALL:
            return InMemory(memory.clone())
        self._file = self._file or _File(self.folder)
        values = memory.cpu().contiguous()
        return OnDisk(self._file, self._file.append(values), memory.dtype, memory.shape)


def _is_plain(memory: torch.Tensor) -> bool:
    """Are its elements the bytes in its memory? Not for quantized tensors, lazy negatives or subclasses."""
    if type(memory) not in {torch.Tensor, torch.nn.Parameter} or memory.layout is not torch.strided:
        return False
    return not (memory.is_quantized or memory.is_conj() or memory.is_neg())


def lies_in_memory(folder: Path) -> bool:
    """Is the folder on a file system in memory, where files save no memory? False if unknown."""
    place = str(folder.resolve())
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False
    above = [(len(at), kind) for at, kind in mounts if place == at or place.startswith(at.rstrip("/") + "/")]
    return bool(above) and max(above)[1] in _IN_MEMORY


def _words(values: torch.Tensor) -> torch.Tensor | None:
    """Returns a strided tensor's bits as integers; None if it has gaps."""
    if not values.is_contiguous():
        strides = values.stride()
        # dense in another order of its dimensions: channels_last
        values = values.permute(sorted(range(values.dim()), key=lambda axis: -strides[axis]))
    return _of_words(_bytes(values)) if values.is_contiguous() else None


def _buffer(values: torch.Tensor) -> memoryview:
    return memoryview(_bytes(values).numpy().data)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor; with a single element its stride may be anything."""
    flat = values.detach().as_strided((values.numel(),), (1,), values.storage_offset())
    return flat.view(torch.uint8)


def _of_words(values: torch.Tensor) -> torch.Tensor:
    """Views bytes as int64 if possible: fewer elements to compare."""
    return values.view(torch.int64) if len(values) % 8 == 0 and values.storage_offset() % 8 == 0 else values


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """Turns the system's error about the folder into one sentence."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise ReplayError(f"the run's state cannot be kept in {folder} (--spill): {what}") from error
