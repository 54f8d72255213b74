"""The format of `torch.save` before 1.6 (still written with `_use_new_zipfile_serialization=False`).

A file has five pickles (a magic number, a version, facts about the machine, the object, the keys of its storages) and
then the storages, each a length and its bytes. It is read by the inert machine and by position; `torchzip` says why.
"""

from __future__ import annotations

from typing import Any

from ampdoctor.checkpoints.pickles.inert_pickle import InertMachine
from ampdoctor.checkpoints.pickles.pickle_bytes import MAX_PICKLE_BYTES
from ampdoctor.checkpoints.pickles.rebuild import StorageRef, TensorBuilder
from ampdoctor.checkpoints.pickles.tree import Saved, require_finite_tree
from ampdoctor.checkpoints.storage.files import ByteSource, shown
from ampdoctor.errors import CheckpointError

MAGIC = 0x1950A86A20F9469CFC6C
PICKLED_MAGIC = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")
"""The magic number in the file, after the two bytes of the pickle's protocol."""
VERSION = 1001

_LENGTH_BYTES = 8
_OBJECT = 3
"""Position of the object among the five pickles."""


def read_torch_legacy(file: ByteSource) -> Saved:
    """Returns the saved object, with a `StoredTensor` for each strided tensor; no tensor data are read.

    Raises:
        CheckpointError: It is malformed, truncated, or was written on a big-endian machine.
        LimitExceededError: A part is larger than a checkpoint needs.
    """
    data = file.head(MAX_PICKLE_BYTES)
    unplaced = TensorBuilder(file, None)
    machine = InertMachine(data, file.name, unplaced)
    position = 0
    parts: list[Any] = []
    starts: list[int] = []
    for at in range(5):
        starts.append(position)
        value, position = machine.run(position)
        parts.append(value if at != _OBJECT else None)  # the object is built again below, once its storages have places
    magic, version, system, _, keys = parts
    del value
    if magic != MAGIC or version != VERSION:
        raise CheckpointError(f"{file.name} is corrupted: it starts as a file of old torch and goes on otherwise.")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
    places = _places(file, position, keys, unplaced.storages)
    tree, _ = InertMachine(data, file.name, TensorBuilder(file, places)).run(starts[_OBJECT])
    require_finite_tree(tree, file.name)
    return Saved(tree, tuple(machine.foreign))


def _places(file: ByteSource, position: int, keys: Any, storages: dict[str, StorageRef]) -> dict[str, tuple[int, int]]:
    """Returns where each storage's bytes are; each is preceded by its length in elements."""
    wrong = CheckpointError(f"{file.name} is corrupted: the list of its storages does not match its tensors.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise wrong
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        ref = storages.get(key)
        if ref is None:
            raise wrong
        start = position + _LENGTH_BYTES
        if start + ref.nbytes > file.size:
            raise CheckpointError(f"{file.name} is truncated: storage {shown(key)} passes the end of the file.")
        if int.from_bytes(file.read(position, _LENGTH_BYTES), "little") != ref.numel:
            raise wrong
        places[key] = (start, ref.nbytes)
        position = start + ref.nbytes
    if storages.keys() - places.keys():
        raise wrong
    return places
