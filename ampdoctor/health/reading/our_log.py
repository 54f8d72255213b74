"""The log that ampdoctor writes while a training runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import HEAD, MAX_BYTES, Left, begins_run_log, lines_in
from ampdoctor.evidence.log_records import SCHEMA_VERSION, Stamped
from ampdoctor.evidence.log_text import quick_line_of
from ampdoctor.evidence.paths import log_name, logs_in, rank_and_number
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place

_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip"})


def _claims(place: Place) -> Sequence[Sequence[str]]:
    """All files of a folder's log by their names, where one of them is ours: another's first line may be damaged."""
    names = place.names if place.named else [name for files in logs_in(place.names).values() for name in files]
    heads = {name: place.head(name, HEAD) for name in names}
    ours = any(map(begins_run_log, heads.values()))
    return [[name for name in names if name not in place.refused]] if ours else ()


def _lacks(place: Place) -> Iterator[ErrorNote | Skipped]:
    """Yields the files of each rank that cannot be read, are packed, empty or not there.

    The oldest may be missing: somebody needed the room.
    """
    if place.named:
        return
    packed = {inner: name for name in place.names if (inner := _packed(name)) and inner not in place.names}
    for rank, names in logs_in([*place.names, *packed]).items():
        for name in names:
            if name in place.refused:
                yield ErrorNote(what=name, kind="unreadable", message=place.refused[name])
            elif name in packed:
                yield ErrorNote(what=name, kind="unreadable", message=f"{packed[name]} is not read: unpack it first.")
            elif name != log_name(rank) and not place.head(name, 1):
                yield ErrorNote(what=name, kind="truncated", message=f"{name} is empty: its lines are lost.")
        yield from _missing(rank, names)


def _missing(rank: int, names: Sequence[str]) -> Iterator[ErrorNote | Skipped]:
    numbers = [place[1] for name in names if (place := rank_and_number(name)) is not None and place[1] is not None]
    for before, after in pairwise([0, *numbers]):
        if after == before + 1:
            continue
        gone = log_name(rank, before + 1)
        gone += f" to {log_name(rank, after - 1)}" if after > before + 2 else ""
        if before:
            message = f"{gone} cannot be found, between {log_name(rank, before)} and {log_name(rank, after)}."
            yield ErrorNote(what=gone, kind="missing", message=message)
        else:
            yield Skipped(what=gone, reason=f"it is no longer there: the log begins with {log_name(rank, after)}")
    if numbers and log_name(rank) not in names:
        message = f"{log_name(rank)} cannot be found, which follows {log_name(rank, numbers[-1])}."
        yield ErrorNote(what=log_name(rank), kind="missing", message=message)


def _packed(name: str) -> str | None:
    """Returns the name of the log's file that somebody has packed; None for any other name."""
    path = PurePath(name)
    return path.stem if path.suffix in _PACKED and rank_and_number(path.stem) is not None else None


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    for name in names:
        with RegularFile(folder / name, name) as file:
            left = noticed.left[name]
            for text in lines_in(file, MAX_BYTES, left):
                try:
                    whole = quick_line_of(text)
                except ValueError:
                    left.damaged += 1
                    continue
                if whole is not None:
                    yield whole
                elif _other_version(text):
                    left.other_version += 1
            yield from _last(left)


def _last(left: Left) -> Iterator[Stamped]:
    """The line that nothing ends, where the process was killed or still writes: it can be read if it is whole."""
    text, left.unfinished = left.unfinished, b""
    try:
        whole = quick_line_of(text) if text else None
    except ValueError:
        return
    if whole is not None:
        yield whole


def _other_version(text: bytes) -> bool:
    """Is a line, which is an object with a kind, of another version's form? Of ours an unknown kind is passed by."""
    return bool(json.loads(text).get("schema_version") != SCHEMA_VERSION)


AMPDOCTOR = LogKind(format="ampdoctor", claims=_claims, read=_read, lacks=_lacks)
