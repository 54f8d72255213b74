"""Coverage-guided fuzzing of everything that parses a checkpoint: `make fuzz`.

    python tests/security/fuzz/fuzz_readers.py [libFuzzer's options] CORPUS...

The first byte of an input chooses the parser, the rest is its file. Nothing but `AmpdoctorError` may escape, with one
sentence in it.
"""

from __future__ import annotations

import atexit
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
with atheris.instrument_imports(include=["ampdoctor.checkpoints"]):
    from ampdoctor.checkpoints.dcp import METADATA, read_distributed
    from ampdoctor.checkpoints.file_contents import classify_contents, leaves
    from ampdoctor.checkpoints.files import ByteSource
    from ampdoctor.checkpoints.safetensors_file import read_safetensors
    from ampdoctor.checkpoints.stored_tensor import StoredTensor
    from ampdoctor.checkpoints.torch_files import read_torch_legacy, read_torch_zip
    from ampdoctor.health.reading.event_files import masked_crc, scalars_in
from ampdoctor.errors import AmpdoctorError
from tests.security import hostile

_SAVED = hostile.distributed()
_FOLDER = Path(tempfile.mkdtemp())
SMALL = 1 << 20
"""Elements up to which a tensor is read: a view may repeat a few bytes a billion times."""
MEMORY = 6 << 30


class Memory(ByteSource):
    """Bytes as a file."""

    def __init__(self, data: bytes) -> None:
        self.name, self.origin, self.data, self.size = "fuzzed", 0, data, len(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        piece = self.data[offset : offset + len(target)]
        if offset < 0 or len(piece) < len(target):
            raise AssertionError(f"{len(target)} bytes are read from {offset} of {self.size}")
        target[:] = piece


def _read(found: Any) -> None:
    for _, stored in leaves(found, "", (StoredTensor,)):
        if 0 < stored.numel <= SMALL:
            list(stored.chunks())


def _saved(read: Callable[[ByteSource], Any], data: bytes) -> None:
    saved = read(Memory(data))
    classify_contents(saved)
    _read(saved.tree)


def _distributed(**files: bytes) -> None:
    for name, content in {**_SAVED, **files}.items():
        (_FOLDER / name).write_bytes(content)
    part, _ = read_distributed(_FOLDER)
    try:
        _read([part.sections.models, part.sections.others])
    finally:
        for file in part.files:
            file.close()


def _event(data: bytes) -> None:
    """Reads a message in a record with its right checksums: no mutation would find them."""
    head = len(data).to_bytes(8, "little")
    crcs = (masked_crc(head).to_bytes(4, "little"), masked_crc(data).to_bytes(4, "little"))
    list(scalars_in(Memory(b"".join((head, crcs[0], data, crcs[1]))), []))


PARSERS: tuple[Callable[[bytes], None], ...] = (
    lambda data: _saved(read_torch_zip, data),
    lambda data: _saved(read_torch_zip, hostile.torch_zip(data)),  # a pickle with the right checksum
    lambda data: _saved(read_torch_legacy, data),
    lambda data: _saved(read_torch_legacy, hostile.LEGACY_HEAD + data),
    lambda data: _read(read_safetensors(Memory(data)).tensors),
    lambda data: _read(read_safetensors(Memory(len(data).to_bytes(8, "little") + data + bytes(16))).tensors),
    lambda data: _distributed(**{METADATA: data}),
    lambda data: _distributed(**{hostile.FIRST_SHARD: data}),
    lambda data: list(scalars_in(Memory(data), [])) and None,
    _event,
)


def examine(data: bytes) -> None:
    if not data:
        return
    try:
        PARSERS[data[0] % len(PARSERS)](data[1:])
    except AmpdoctorError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise AssertionError(f"no sentence: {str(error)[:200]!r}") from error


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's own, about storages
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
    atheris.Setup(sys.argv, examine)
    atheris.Fuzz()
