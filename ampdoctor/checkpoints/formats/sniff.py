"""Tells a file's format by its contents: an extension is only a name that somebody gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ampdoctor.checkpoints.formats.safetensors_file import looks_like_safetensors
from ampdoctor.checkpoints.formats.torch_legacy import PICKLED_MAGIC
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError, OtherFormatError

Format = Literal["safetensors", "torch-zip", "torch-legacy", "json"]

_HEAD_BYTES = 1024
_TAR_MAGIC_AT = 257
_PICKLE_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NOT_READY: tuple[tuple[bytes, str], ...] = (
    (_LFS_POINTER, "is a git-LFS pointer, not the file itself; run `git lfs pull`"),
    (b"PK\x05\x06", "is an empty zip file"),
    (b"\x1f\x8b", "is compressed with gzip; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; decompress it first"),
)
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "is a GGUF inference file, which holds no training state and is not read"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, which is not read"),
    (b"\x93NUMPY", "is a NumPy array, not a checkpoint"),
)
_BARE_PICKLE = "is a bare pickle, which could run code when loaded; ampdoctor does not read it"


def sniff(file: RegularFile) -> Format:
    """Returns the format of a file.

    Raises:
        CheckpointError: The file is empty, incomplete or unknown; the sentence says what it probably is.
        OtherFormatError: The file is in a known format that is not read.
    """
    if file.size == 0:
        raise CheckpointError(f"{file.name} is empty.")
    head = file.head(_HEAD_BYTES)
    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    if head[2:14] == PICKLED_MAGIC:
        return "torch-legacy"
    if looks_like_safetensors(head):
        return "safetensors"
    for table, kind in ((_NOT_READY, CheckpointError), (_OTHERS, OtherFormatError)):
        for magic, sentence in table:
            if head.startswith(magic):
                raise kind(f"{file.name} {sentence}.")
    if head.lstrip()[:1] == b"{":
        return "json"
    if head[:1] == b"\x80" and head[1:2] in _PICKLE_PROTOCOLS:
        raise OtherFormatError(f"{file.name} {_BARE_PICKLE}.")
    raise CheckpointError(f"{file.name} {_what_else(head)}.")


def is_lfs_pointer(path: Path) -> bool:
    """Has Git LFS put a pointer in the place of a file? False if the file cannot be read."""
    try:
        with RegularFile(path, path.name) as file:
            return file.head(len(_LFS_POINTER)) == _LFS_POINTER
    except CheckpointError:
        return False


def _what_else(head: bytes) -> str:
    """Returns what a file of no known format probably is."""
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return "is a tar file (torch 0.1 or an archive), which is not read; unpack it or torch.save it again"
    if not any(head):
        return "starts with zeros only: the write was probably cut off"
    if len(head) < 8:
        return f"is truncated: {len(head)} bytes are no checkpoint"
    return "is not a checkpoint in a format that is read (safetensors, torch.save)"
