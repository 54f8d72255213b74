"""Weights over several files, which an index lists or their names count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.files import RegularFile, identity_of
from ampdoctor.checkpoints.gathering import CheckpointBuilder, FolderState, Layout
from ampdoctor.checkpoints.json_files import read_weight_map
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
    check_numbers(into, shards, prefix, index.name)
    _note_absent(into, index.name, table, opened, prefix)
    return frozenset(shards)


def check_numbers(into: CheckpointBuilder, names: Iterable[str], prefix: str, index: str = "") -> None:
    """Note missing shards: those that only the names of the others show, or that an index does not list."""
    for matches in _families(names):
        missing = _first_absent(matches)
        if missing is None:
            continue
        there = f"{len(matches)} of {int(matches[0]['total'])} shards"
        message = f"{index} does not list {missing}: it lists {there}."
        into.lack(prefix + missing, message if index else f"{missing} is missing: {there} are there, and no index.")


def _families(names: Iterable[str]) -> list[list[re.Match[str]]]:
    families: dict[str, list[re.Match[str]]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            families.setdefault(numbered_family(name), []).append(match)
    return list(families.values())


def _first_absent(family: Sequence[re.Match[str]]) -> str | None:
    there = {int(match["number"]) for match in family}
    total = int(family[0]["total"])
    first = 0 if 0 in there else 1
    absent = next((n for n in range(first, first + min(total, 2 * len(there) + 8)) if n not in there), None)
    if absent is None or len(there) >= total:
        return None
    like = family[0]
    return f"{like['stem']}-{absent:0{len(like['number'])}d}-of-{like['total']}{like['suffix']}"


def _note_absent(
    into: CheckpointBuilder, index: str, table: Mapping[str, str], opened: Sequence[FilePart], prefix: str
) -> None:
    """Note tensors that no shard holds; loaders read whole shards, so one in another shard is harmless."""
    there = {name for part in opened for name in _names_in(part)}
    for part in opened:
        shard = part.name.removeprefix(prefix)
        gone = sorted(name for name, place in table.items() if place == shard and name not in there)
        if gone:
            message = f"{index} puts {len(gone)} tensors into {shard} that are not there, {gone[0]!r} first."
            into.errors.append(ErrorNote(what=part.name, kind="missing_keys", message=message))


def _names_in(part: FilePart) -> set[str]:
    names = {name for model in part.sections.models.values() for name in model}
    return names | {s.what for s in part.sections.skipped}
