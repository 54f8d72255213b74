"""Weights over several files: an index that lists them, or a file for each rank."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.files import RegularFile, identity_of
from ampdoctor.checkpoints.gathering import CheckpointBuilder, FolderState, Layout
from ampdoctor.checkpoints.json_files import read_weight_map
from ampdoctor.checkpoints.rank_shards import LocalShard, join_shards
from ampdoctor.checkpoints.stored_tensor import JoinedTensor, Shard, StoredTensor, StridedTensor
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})(?P<suffix>\.[a-z]+)")


def is_numbered(name: str) -> bool:
    """Whether a file of this name is a shard."""
    return _NUMBERED.fullmatch(name) is not None


def numbered_family(name: str) -> str:
    """Returns the common part of the names of a model's shards ("model-of-00003.safetensors"), or ""."""
    match = _NUMBERED.fullmatch(name)
    return f"{match['stem']}-of-{match['total']}{match['suffix']}" if match else ""


def _read(into: CheckpointBuilder, level: FolderState, names: Sequence[str]) -> None:
    """Open the shards that the indices of a folder list."""
    done: set[str] = set(names)
    indices: dict[object, str] = {}
    for name in names:
        known = indices.setdefault(identity_of(level.path / name) or name, name)
        if known == name:
            done |= _add_index(into, level.path, name, level.prefix)
        else:  # otherwise each link would open all shards again
            into.remarks.append(f"{level.prefix}{name} is a link to {known}, and is read once")
    level.indexed = any(map(is_numbered, done))
    level.taken |= done


def _claims(name: str) -> bool:
    return name.endswith(".index.json")


INDEXED = Layout(name="", claims=_claims, read=_read)


def _add_index(into: CheckpointBuilder, folder: Path, name: str, prefix: str) -> frozenset[str]:
    """Open the shards that an index lists; returns their names, so that they are not opened twice."""
    try:
        with RegularFile(folder / name, prefix + name) as file:
            table = read_weight_map(file)
    except CheckpointError as error:
        into.refuse(prefix + name, error)
        return frozenset()
    return add_shards(into, folder / name, table, prefix) if table is not None else frozenset()


def add_shards(into: CheckpointBuilder, index: Path, table: Mapping[str, str], prefix: str) -> frozenset[str]:
    """Open the shards of an index's table (tensor -> shard) and compare both; returns the shards' names."""
    shards = sorted(set(table.values()))
    opened: list[FilePart] = []
    for shard in shards:
        try:
            file = RegularFile(index.parent / shard, prefix + shard)
        except CheckpointError as error:
            kind = "unreadable" if (index.parent / shard).exists() else "missing"
            message = f"{index.name} names this shard: {error}"
            into.errors.append(ErrorNote(what=prefix + shard, kind=kind, message=message))
            into.refusals.append(error)
            continue
        part = into.add(file, index=prefix + index.name)
        if part is not None:
            opened.append(part)
    _require_all_numbers(into, index.name, shards, prefix)
    _compare(into, index.name, table, opened, prefix)
    return frozenset(shards)


def check_numbers(into: CheckpointBuilder, names: Iterable[str], prefix: str) -> None:
    """Note missing shards if only the names of the others show that there are more."""
    for matches in _families(names):
        missing = _first_absent(matches)
        if missing is not None:
            message = (
                f"{missing} is missing: {len(matches)} of {int(matches[0]['total'])} shards are there, and no index."
            )
            into.lack(prefix + missing, message)


def _require_all_numbers(into: CheckpointBuilder, index: str, shards: Sequence[str], prefix: str) -> None:
    """Note shards that an index does not list, although the names of the listed ones count them."""
    for matches in _families(shards):
        missing = _first_absent(matches)
        if missing is not None:
            total = int(matches[0]["total"])
            message = f"{index} does not list {missing}: it lists {len(matches)} of {total} shards."
            into.lack(prefix + missing, message)


def _families(names: Iterable[str]) -> list[list[re.Match[str]]]:
    """Returns the shards among file names, grouped by model."""
    families: dict[str, list[re.Match[str]]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            families.setdefault(numbered_family(name), []).append(match)
    return list(families.values())


def _first_absent(family: Sequence[re.Match[str]]) -> str | None:
    """Returns the name of the first missing shard of a model, or None."""
    there = {int(match["number"]) for match in family}
    total = int(family[0]["total"])
    first = 0 if 0 in there else 1
    absent = next((n for n in range(first, first + min(total, 2 * len(there) + 8)) if n not in there), None)
    if absent is None or len(there) >= total:
        return None
    like = family[0]
    return f"{like['stem']}-{absent:0{len(like['number'])}d}-of-{like['total']}{like['suffix']}"


def remark_duplicates(into: CheckpointBuilder) -> None:
    """Remark on tensors that several shards of one model hold: the order decides which of them is loaded."""
    units: dict[str, list[FilePart]] = {}
    for part in into.parts:
        if part.index:
            units.setdefault(part.index, []).append(part)
    for index, parts in units.items():
        often = Counter(name for part in parts for name in _names_in(part, skipped=False))
        twice = [name for name, count in often.items() if count > 1]
        if twice:
            holders = [part.name for part in parts if twice[0] in _names_in(part, skipped=False)]
            into.remarks.append(
                f"{len(twice)} tensors of {index} lie in several shards, {twice[0]!r} in {' and '.join(holders[:3])}"
            )


def _compare(
    into: CheckpointBuilder, index: str, table: Mapping[str, str], opened: Sequence[FilePart], prefix: str
) -> None:
    """Compare an index with its shards; loaders read whole shards, so a wrong shard is harmless."""
    holds = {part.name.removeprefix(prefix): _names_in(part, skipped=True) for part in opened}
    everywhere: dict[str, str] = {name: shard for shard, names in holds.items() for name in names}
    for shard, names in holds.items():
        listed = {name for name, place in table.items() if place == shard}
        gone = sorted(listed - everywhere.keys())
        if gone:
            message = f"{index} puts {len(gone)} tensors into {shard} that are not there, {gone[0]!r} first."
            into.errors.append(ErrorNote(what=prefix + shard, kind="missing_keys", message=message))
        moved = sorted(name for name in listed - names if name in everywhere)
        if moved:
            into.remarks.append(
                f"{index} puts {len(moved)} tensors into {shard} that lie in another shard, {moved[0]!r} in "
                f"{everywhere[moved[0]]}"
            )
        extra = sorted(names - table.keys())
        if extra:
            into.remarks.append(f"{shard} holds {len(extra)} tensors that {index} does not list, {extra[0]!r} first")


def _names_in(part: FilePart, *, skipped: bool) -> set[str]:
    names = {name for model in part.sections.models.values() for name in model}
    return names | {s.what for s in part.sections.skipped} if skipped else names


# -- files that each rank wrote for itself: `pytorch_model_fsdp_0_rank1.bin` --

_FLAT = "_flat_param"
_BY_RANK = re.compile(r"(?P<stem>.+)_rank(?P<rank>\d{1,6})(?P<suffix>\.(bin|pt|pth))")


def join_rank_files(into: CheckpointBuilder) -> None:
    """Join the ranks' pieces if they fill the whole tensor; the others stay the shard of one rank."""
    families: dict[str, dict[int, FilePart]] = {}
    for part in into.parts:
        match = _BY_RANK.fullmatch(part.name)
        if match and _holds_pieces(part):
            families.setdefault(f"{match['stem']}{match['suffix']}", {})[int(match["rank"])] = part
    joined: list[tuple[str, list[FilePart], list[int], int]] = []
    for name, by_rank in families.items():
        parts = [by_rank[rank] for rank in sorted(by_rank)]
        absent = [rank for rank in range(max(by_rank)) if rank not in by_rank]
        if absent:
            into.lack(name, f"{name}: the file of rank {absent[0]} is missing, and each rank saved its own part.")
        left = _join_optimizers(parts)
        joined.append((name, parts, absent, left))
    shapes = _shapes_told(into)
    for name, parts, absent, left in joined:
        _lay_out_flat(parts, shapes)
        unfilled = left + _join_models(parts)
        for part in parts:
            part.index = name
        if unfilled and not absent:
            into.lack(name, f"{name}: {unfilled} of its tensors are not whole; the file of a rank is missing.")


def _holds_pieces(part: FilePart) -> bool:
    models = (t for model in part.sections.models.values() for t in model.values())
    states = (
        t
        for optimizer in part.sections.optimizers.values()
        for state in optimizer["state"].values()
        if isinstance(state, Mapping)
        for t in state.values()
    )
    return any(isinstance(t, LocalShard) for tensors in (models, states) for t in tensors)


def _shapes_told(into: CheckpointBuilder) -> dict[str, tuple[int, ...]]:
    """Returns the parameters' shapes, from their moments."""
    return {
        pid: stored.shape
        for part in into.parts
        for optimizer in part.sections.optimizers.values()
        for pid, state in optimizer["state"].items()
        if isinstance(pid, str) and isinstance(state, Mapping)
        for stored in state.values()
        if isinstance(stored, StoredTensor) and stored.shape and not isinstance(stored, LocalShard)
    }


def _lay_out_flat(parts: Sequence[FilePart], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Lay out FSDP1's local state: each rank's part of one flat parameter, and the pieces of each name within it.

    The flat parameter is cut regardless of names: a rank may hold the end of one parameter and the beginning of the
    next. The names' pieces cover the flat parameter, so it is left out.
    """
    for path in list(parts[0].sections.models):
        models = [dict(part.sections.models.get(path, {})) for part in parts]
        flats = [{name: t for name, t in model.items() if name.rpartition(".")[2] == _FLAT} for model in models]
        places = [{_storage(t) for t in flat.values()} for flat in flats]
        if not all(flats):
            continue
        held = [{at: t for at, t in model.items() if at not in flat} for model, flat in zip(models, flats, strict=True)]
        for name in list(models[0]):
            pieces = [model.get(name) for model in models]
            views = [p for p in pieces if isinstance(p, StridedTensor) and len(p.shape) == 1]
            if name in flats[0] or len(views) != len(pieces):
                continue
            if not any(p.numel and _storage(p) in place for p, place in zip(views, places, strict=True)):
                continue
            for model in models[1:]:
                del model[name]
            models[0][name] = _one_behind_the_other(views, shapes.get(name))
        for rank, (part, model, flat) in enumerate(zip(parts, models, flats, strict=True)):
            part.sections.models[path] = {name: t for name, t in model.items() if name not in flat}
            for name, whole in flat.items():
                if sum(t.numel for t in held[rank].values() if _storage(t) == _storage(whole)) < whole.numel:
                    part.sections.others[f"{path}.{name}" if path else name] = whole


def _one_behind_the_other(pieces: Sequence[StridedTensor], shape: tuple[int, ...] | None) -> StoredTensor:
    total = sum(piece.numel for piece in pieces)
    starts = [0, *itertools.accumulate(piece.numel for piece in pieces)]
    shards = [Shard(stored=p, at=at) for p, at in zip(pieces, starts, strict=False) if p.numel]
    fits = shape is not None and math.prod(shape) == total
    return JoinedTensor(dtype=pieces[0].dtype, shape=shape if shape and fits else (total,), shards=tuple(shards))


def _storage(stored: StoredTensor) -> object:
    return (stored.file_name, stored.offset) if isinstance(stored, StridedTensor) else None


def _join_models(parts: Sequence[FilePart]) -> int:
    """Join the state dicts in the first rank's part; returns how many tensors could not be joined and stay in place."""
    left = 0
    for path in list(dict.fromkeys(path for part in parts for path in part.sections.models)):
        models: list[dict[Any, Any]] = [dict(part.sections.models.get(path, {})) for part in parts]
        left += _join(models, parts, path)
        for part, model in zip(parts, models, strict=True):
            part.sections.models.pop(path, None)
            if model:
                part.sections.models[path] = model
    return left


def _join_optimizers(parts: Sequence[FilePart]) -> int:
    """Join the optimizers' states in the same way."""
    left = 0
    for path in list(dict.fromkeys(path for part in parts for path in part.sections.optimizers)):
        optimizers = [part.sections.optimizers.get(path) for part in parts]
        states = [dict(o["state"]) if o is not None else {} for o in optimizers]
        for pid in list(dict.fromkeys(pid for state in states for pid in state)):
            mine: list[dict[Any, Any]] = [dict(s[pid]) if isinstance(s.get(pid), Mapping) else {} for s in states]
            left += _join(mine, parts, f"{path}.state.{pid}" if path else f"state.{pid}")
            for state, kept in zip(states, mine, strict=True):
                state.pop(pid, None)
                if kept:
                    state[pid] = kept
        for part, optimizer, state in zip(parts, optimizers, states, strict=True):
            if optimizer is not None and state:
                part.sections.optimizers[path] = {**optimizer, "state": state}
            elif optimizer is not None:
                del part.sections.optimizers[path]
    return left


def _join(holders: Sequence[dict[Any, Any]], parts: Sequence[FilePart], path: str) -> int:
    """Join the ranks' tensors of each name in the first rank; other values are the first rank's.

    Further copies of uncut tensors then belong to nothing, but are examined: one can be broken while another is sound.
    """
    left = 0
    for name in list(dict.fromkeys(name for holder in holders for name in holder)):
        values = [holder.get(name) for holder in holders]
        tensors = [value for value in values if isinstance(value, StoredTensor)]
        whole = join_shards([v if isinstance(v, StoredTensor) else None for v in values]) if tensors else values[0]
        if tensors and whole is None:
            left += 1
            continue
        used = {id(s.stored) for s in whole.shards} if isinstance(whole, JoinedTensor) else {id(whole)}
        for part, copy in zip(parts, values, strict=True):
            if isinstance(copy, StoredTensor) and copy.shape and copy.numel and id(copy) not in used:
                part.sections.others[f"{path}.{name}" if path else str(name)] = copy
        for holder in holders[1:]:
            holder.pop(name, None)
        holders[0][name] = whole
    return left
