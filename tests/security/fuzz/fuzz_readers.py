"""Coverage-guided fuzzing of everything that parses a checkpoint: `make fuzz`.

    python tests/security/fuzz/fuzz_readers.py [libFuzzer's options] CORPUS...

The first byte of an input chooses the parser, the rest is its file. Two things must hold: nothing but
`AmpdoctorError` escapes, with one sentence in it; and where the library that owns the format accepts the same bytes,
too, the tensors that we find have the names, dtypes, shapes, strides and bytes that it finds.
"""

from __future__ import annotations

import atexit
import io
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atheris
import torch
from safetensors.torch import load as load_safetensors

sys.path.insert(0, str(Path(__file__).parents[3]))
with atheris.instrument_imports(include=["ampdoctor.checkpoints"]):
    from ampdoctor.checkpoints.dcp import read_distributed
    from ampdoctor.checkpoints.dcp_metadata import METADATA
    from ampdoctor.checkpoints.file_contents import classify_contents
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
"""Elements up to which a tensor is compared: a view may repeat a few bytes a billion times."""
MEMORY = 6 << 30


class Memory(ByteSource):
    """Bytes as a file."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.name, self.origin, self.data, self.size = "fuzzed", 0, data, len(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        piece = self.data[offset : offset + len(target)]
        if offset < 0 or len(piece) < len(target):
            raise AssertionError(f"{len(target)} bytes are read from {offset} of {self.size}")
        target[:] = piece


def torch_zip(data: bytes) -> None:
    _saved(read_torch_zip, data)


def pickle_in_zip(data: bytes) -> None:
    """A pickle with the right checksum: no mutation of a whole zip would find one."""
    _saved(read_torch_zip, hostile.torch_zip(data))


def torch_legacy(data: bytes) -> None:
    _saved(read_torch_legacy, data)


def legacy_pickles(data: bytes) -> None:
    """What follows the head that every such file begins with."""
    _saved(read_torch_legacy, hostile.LEGACY_HEAD + data)


def safetensors(data: bytes) -> None:
    ours = read_safetensors(Memory(data)).tensors
    try:
        theirs = load_safetensors(data)
    except Exception:  # noqa: BLE001 - a dtype that only we have, say: then there is nothing to compare with
        return
    for name, stored in ours.items():
        _compare(name, stored, theirs[name])


def safetensors_header(data: bytes) -> None:
    """A header with its right length, and 16 bytes of data."""
    safetensors(len(data).to_bytes(8, "little") + data + bytes(range(16)))


def distributed_metadata(data: bytes) -> None:
    """Metadata beside the files that the seed's describe."""
    _distributed({**_SAVED, METADATA: data})


def distributed_slices(data: bytes) -> None:
    """The first file of a distributed checkpoint, which its metadata describe as it was."""
    _distributed({**_SAVED, hostile.FIRST_SHARD: data})


def _distributed(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (_FOLDER / name).write_bytes(content)
    content = read_distributed(_FOLDER)
    try:
        found = [*content.sections.others.values(), *(t for m in content.sections.models.values() for t in m.values())]
        for stored in found:
            if 0 < stored.numel <= SMALL:
                list(stored.chunks())
    finally:
        for file in (content.file, *content.beside):
            file.close()


def event_file(data: bytes) -> None:
    list(scalars_in(Memory(data), []))


def event(data: bytes) -> None:
    """A message in a record with its right checksums: no mutation would find them."""
    head = len(data).to_bytes(8, "little")
    event_file(b"".join((head, _crc(head), data, _crc(data))))


def _crc(data: bytes) -> bytes:
    return masked_crc(data).to_bytes(4, "little")


PARSERS: tuple[Callable[[bytes], None], ...] = (
    torch_zip,
    pickle_in_zip,
    torch_legacy,
    legacy_pickles,
    safetensors,
    safetensors_header,
    distributed_metadata,
    distributed_slices,
    event_file,
    event,
)


def _saved(read: Callable[[ByteSource], Any], data: bytes) -> None:
    saved = read(Memory(data))
    classify_contents(saved)
    found = dict(_tensors(saved.tree, (), StoredTensor))
    for stored in found.values():
        if 0 < stored.numel <= SMALL:
            list(stored.chunks())
    if saved.unsafe_globals or sum(stored.numel for stored in found.values()) > SMALL:
        return
    try:
        theirs = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - it refuses more than we do
        return
    loaded = dict(_tensors(theirs, (), torch.Tensor))
    for path in found.keys() & loaded.keys():
        _compare(path, found[path], loaded[path])


def _tensors(node: Any, path: tuple[Any, ...], kind: type) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if len(path) > 20:
        return
    if isinstance(node, kind):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            if isinstance(key, str | int | bool):
                yield from _tensors(value, (*path, key), kind)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _tensors(value, (*path, index), kind)


def _compare(name: object, stored: StoredTensor, theirs: torch.Tensor) -> None:
    if theirs.is_sparse or theirs.is_quantized or stored.numel > SMALL:
        return
    ours = stored.load()
    told = (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    plain = theirs.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if not told or not torch.equal(
        ours.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8), plain
    ):
        raise AssertionError(f"{name!r}: {ours.dtype} {ours.shape} {ours.stride()}, and in the library "
                             f"{theirs.dtype} {theirs.shape} {theirs.stride()}")  # fmt: skip


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
