"""A rank's own piece of a distributed tensor, as FSDP saves it if every rank writes its own file.

The files hold objects, `DTensor` (FSDP2) or `ShardedTensor` (FSDP1). Each holds its piece as a plain tensor, and the
piece's place in the whole. The objects are never built; this file reads their records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ampdoctor.checkpoints.pickled_objects import fields_of
from ampdoctor.checkpoints.stored_tensor import JoinedTensor, Shard, StoredTensor, StridedTensor, unread
from ampdoctor.checkpoints.unpickler import PickledObject

_DTENSOR = "torch.distributed.tensor."
_OLD_DTENSOR = "torch.distributed._tensor."
_SHARDED = "torch.distributed._shard.sharded_tensor."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard(StridedTensor):
    """A rank's piece; as a tensor it has the piece's shape."""

    whole: tuple[int, ...]  # sizes of the whole tensor
    at: tuple[int, ...]  # index of the piece's first element in the whole


def with_local_shards(tree: Any) -> Any:
    """Returns a tree with the pieces in place of their objects; an object without a piece is left out.

    Containers without pieces stay the same objects; a container in several places is visited once.
    """
    return _replaced(tree, {})


def _replaced(node: Any, done: dict[int, Any]) -> Any:
    if isinstance(node, PickledObject):
        return _piece_of(node)
    if not isinstance(node, dict | list | tuple):
        return node
    if id(node) not in done:
        parts = node.values() if isinstance(node, dict) else node
        made = [_replaced(part, done) for part in parts]
        if all(new is old for new, old in zip(made, parts, strict=True)):
            done[id(node)] = node
        elif isinstance(node, dict):
            pairs = zip(node.items(), made, strict=True)
            done[id(node)] = {key: new for (key, old), new in pairs if new is not None or old is None}
        else:
            done[id(node)] = made
    return done[id(node)]


def join_shards(pieces: Sequence[StoredTensor | None]) -> StoredTensor | None:
    """Joins the ranks' pieces of one name, or takes the first of equal copies; None if neither is possible."""
    there = [piece for piece in pieces if piece is not None]
    local = [piece for piece in there if isinstance(piece, LocalShard)]
    if not local:
        return there[0] if len({piece.shape for piece in there}) == 1 else None
    if len(local) != len(there):
        return None
    first = local[0]
    if any(p.whole != first.whole or p.dtype != first.dtype for p in local):
        return None
    distinct = list({(p.at, p.shape): p for p in reversed(local) if p.numel}.values())
    if sum(p.numel for p in distinct) != math.prod(first.whole) or not _apart(distinct):
        return None
    if not distinct:
        return first if first.shape == first.whole else None
    if distinct[0].shape == first.whole:
        return distinct[0]
    shards = tuple(Shard(stored=piece, at=piece.at) for piece in distinct)
    return JoinedTensor(dtype=first.dtype, shape=first.whole, shards=shards)


def _apart(pieces: Sequence[LocalShard]) -> bool:
    """Whether all pieces lie inside the whole, without overlap. There are few enough ranks to check every pair."""
    for index, one in enumerate(pieces):
        if any(a < 0 or a + n > size for a, n, size in zip(one.at, one.shape, one.whole, strict=True)):
            return False
        for other in pieces[:index]:
            overlaps = (
                a < b + m and b < a + n for a, n, b, m in zip(one.at, one.shape, other.at, other.shape, strict=True)
            )
            if all(overlaps):
                return False
    return True


def _piece_of(node: PickledObject) -> Any:
    if node.name.startswith((_DTENSOR, _OLD_DTENSOR)) and node.name.endswith(".DTensor"):
        found = _of_dtensor(node)
    elif node.name.startswith(_SHARDED) and node.name.endswith(".ShardedTensor"):
        found = _of_sharded(node)
    else:
        return node
    return unread("a distributed tensor of a form that is not read") if found is False else found


def _of_sharded(node: PickledObject) -> LocalShard | bool | None:
    """`ShardedTensor.__getstate__`: local shards, metadata, process group, sharding spec, init_rrefs."""
    state = node.state
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        return False
    whole = fields_of(state[1]).get("size")
    if len(state[0]) > 1 or not _is_shape(whole):
        return False
    if not state[0]:
        return None
    shard = fields_of(state[0][0])
    offsets = fields_of(shard.get("metadata")).get("shard_offsets")
    return _local(shard.get("tensor"), tuple(whole), offsets)


def _of_dtensor(node: PickledObject) -> LocalShard | bool | None:
    """The local tensor and its place by the mesh coordinate: `Shard` cuts like `torch.chunk`, `Replicate` does not."""
    fields = fields_of(node)
    spec = fields_of(fields.get("_spec"))
    meta, placements = spec.get("tensor_meta"), spec.get("placements")
    mesh = fields_of(spec.get("mesh"))
    coordinate = mesh.get("_coordinate_on_dim")
    whole = meta.args[0] if isinstance(meta, PickledObject) and meta.args else None
    sizes = _mesh_sizes(mesh)
    if not _is_shape(whole) or not isinstance(placements, tuple | list) or not _is_shape(coordinate):
        return False
    if sizes is None or not len(sizes) == len(coordinate) == len(placements):
        return False
    at, left = [0] * len(whole), list(whole)
    for placement, size, rank in zip(placements, sizes, coordinate, strict=True):
        kind = placement.name.rpartition(".")[2] if isinstance(placement, PickledObject) else ""
        dim = fields_of(placement).get("dim")
        if kind == "Replicate":
            continue
        if kind != "Shard" or type(dim) is not int or not 0 <= dim < len(left) or not size:
            return False
        each = math.ceil(left[dim] / size)
        begin = min(each * rank, left[dim])
        at[dim] += begin
        left[dim] = min(each, left[dim] - begin)
    local = fields.get("_local_tensor")
    if not isinstance(local, StridedTensor) or (local.numel and local.shape != tuple(left)):
        return False
    return _local(local, tuple(whole), at)


def _mesh_sizes(mesh: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Returns a device mesh's sizes, from its layout (torch 2.9 and later) or from the older tensor of ranks."""
    axes = fields_of(mesh.get("_layout")).get("axes")
    if isinstance(axes, tuple | list):
        shapes = [fields_of(axis).get("shape") for axis in axes]
        known = [math.prod(shape) for shape in shapes if _is_shape(shape)]
        if len(known) == len(shapes):
            return tuple(known)
    ranks = mesh.get("mesh")
    return ranks.shape if isinstance(ranks, StoredTensor) else None


def _local(tensor: Any, whole: tuple[int, ...], at: Any) -> LocalShard | bool:
    if not isinstance(tensor, StridedTensor) or not _is_shape(at) or len(at) != len(whole):
        return False
    if tensor.numel and len(tensor.shape) != len(whole):
        return False
    return LocalShard(
        file=tensor.file,
        offset=tensor.offset,
        storage_bytes=tensor.storage_bytes,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        start=tensor.start,
        whole=whole,
        at=tuple(at),
    )


def _is_shape(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple | list) and all(type(n) is int and 0 <= n < 2**48 for n in value)
