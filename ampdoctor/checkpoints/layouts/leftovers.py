"""Finds what no joined tensor of several files uses: it is examined as well.

If each rank wrote a file, a checkpoint has copies (buffers, scalers, old files of other settings), and a join needs
only one of them. The others can be broken while that one is sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.contents.scalers import scaler_state
from ampdoctor.checkpoints.contents.structure import Sections, sort_out, tensors_in
from ampdoctor.checkpoints.pickles.tree import Saved
from ampdoctor.checkpoints.storage.stored import Shard, ShardedTensor, StoredTensor, StridedTensor


def add_unused(parts: Sequence[Part], saved: Sequence[Saved]) -> None:
    """Add to each part its file's tensors in storages that no part uses, and scalers that differ.

    Args:
        parts: The joined parts; the new tensors belong to nothing (`Sections.others`), under their paths.
        saved: The contents of each part's file.
    """
    used = {place for part in parts for _, tensor in _tensors(part.sections) for place in _places(tensor)}
    scalers = {scaler_state(scaler, "", "") for part in parts for scaler in part.sections.scalers.values()} - {None}
    for part, content in zip(parts, saved, strict=True):
        told = sort_out(content)
        part.sections.lost = told.lost
        for path, tensor in _tensors(told):
            if tensor.shape and tensor.numel and not used.issuperset(_places(tensor)):
                part.sections.others[path] = tensor
        for path, scaler in told.scalers.items():
            state = scaler_state(scaler, "", "")
            if state not in scalers:
                part.sections.scalers[path] = scaler
                scalers |= {state} - {None}


def _tensors(sections: Sections) -> Iterator[tuple[str, StoredTensor]]:
    """Yields every tensor of a file with its path in it."""
    yield from sections.others.items()
    for path, model in sections.models.items():
        yield from ((f"{path}.{name}" if path else name, tensor) for name, tensor in model.items())
    trees = {**{path: found["state"] for path, found in sections.optimizers.items()}, **sections.masters}
    for path, tree in trees.items():
        yield from ((at, tensor) for at, tensor in tensors_in(tree, path) if isinstance(tensor, StoredTensor))


def _places(tensor: StoredTensor) -> set[object]:
    """Returns the storages that hold a tensor."""
    shards = tensor.shards if isinstance(tensor, ShardedTensor) else (tensor,)
    pieces = [shard.stored if isinstance(shard, Shard) else shard for shard in shards]
    return {(piece.file_name, piece.file.origin + piece.offset) for piece in pieces if isinstance(piece, StridedTensor)}
