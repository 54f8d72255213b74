"""Stores tensors' values in memory or in a file; equal values at several moments are stored once."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ampdoctor.errors import ReplayError

SMALL = 2**16  # bytes up to which a tensor stays in memory: a file costs more than it frees
_DONTNEED = 4  # of madvise()
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, slots=True)
class Values:
    """The elements of a tensor at one moment; `mapped`: their storage is a mapped file."""

    values: torch.Tensor
    mapped: bool = False

    def copy_to(self, memory: torch.Tensor) -> None:
        """Write them into a tensor of the same dtype and shape."""
        memory.copy_(self.values)
        self._release()

    def are_in(self, memory: torch.Tensor) -> bool:
        """True if the tensor is bit-identical. May return False when comparing would be expensive."""
        if (memory.dtype, memory.shape) != (self.values.dtype, self.values.shape):
            return False
        if memory.stride() != self.values.stride():
            return False
        mine, theirs = _words(self.values), _words(memory)
        same = mine is not None and theirs is not None and torch.equal(mine, theirs.to(mine.device))
        self._release()
        return same

    def _release(self) -> None:
        """Give the memory of a mapped file's pages back to the system; the file keeps what they hold."""
        if self.mapped:
            begin, size = ctypes.c_void_p(self.values.data_ptr()), ctypes.c_size_t(self.values.nbytes)
            ctypes.CDLL(None).madvise(begin, size, _DONTNEED)


@dataclass(slots=True)
class TensorStore:
    """Stores tensors' values; large ones in files of `folder`, if there is one."""

    folder: Path | None = None

    def keep(self, memory: torch.Tensor, known: Values | None = None) -> Values:
        """Stores a tensor's values, or returns `known` if they are equal; raises ReplayError if the folder is full."""
        plain = _is_plain(memory)
        if plain and known is not None and known.are_in(memory):
            return known
        if not plain or self.folder is None or memory.nbytes < SMALL:
            return Values(memory.clone())
        return Values(_in_file(memory, self.folder), mapped=True)


def _in_file(memory: torch.Tensor, folder: Path) -> torch.Tensor:
    """Returns a contiguous copy whose storage is a mapped file without a name; the file is deleted with the tensor."""
    values = memory.cpu().contiguous()
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(_bytes(values).numpy().data)  # a full disk raises here: a write into the mapping would kill
            file.flush()
            mapped = torch.from_file(file.name, shared=True, size=values.nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise ReplayError(f"the run's state cannot be kept in {folder} (--spill): {what}") from error
    return mapped.view(values.dtype).view(values.shape)


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
    """Returns a strided tensor's bits as integers, of 8 bytes if possible; None if it has gaps."""
    if not values.is_contiguous():
        strides = values.stride()
        # dense in another order of its dimensions: channels_last
        values = values.permute(sorted(range(values.dim()), key=lambda axis: -strides[axis]))
    if not values.is_contiguous():
        return None
    flat = _bytes(values)
    return flat.view(torch.int64) if len(flat) % 8 == 0 and flat.storage_offset() % 8 == 0 else flat


def _bytes(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().as_strided((values.numel(),), (1,), values.storage_offset())
    return flat.view(torch.uint8)
