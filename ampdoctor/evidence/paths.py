"""Paths as a report shows them, files that a command will write, and names of a run's log files."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Final

from ampdoctor.errors import UsageError


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns a path for a report's reader: relative to the working directory if it lies below it, else absolute."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return Path(os.path.normpath(path)).as_posix()
    absolute = Path(os.path.normpath(Path(path).absolute()))  # a link is shown under its own name
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()


def scanned_path(target: Mapping[str, Any]) -> str | None:
    """Returns the scanned checkpoint of a report's target; None for several: a finding's file says which one."""
    path = None if "paths" in target else target.get("location") or target.get("path")
    return None if path is None else posix(path)


def checkpoint_path(target: Mapping[str, Any]) -> str:
    """Returns the checkpoint that was scanned, or that a run was resumed from; "" for none or several."""
    return scanned_path(target) or posix(target.get("checkpoint") or "")


def file_within(checkpoint: str, file: str) -> str:
    """Returns a checkpoint file's path; `file` is its name as in findings, complete if `checkpoint` is "".

    A checkpoint of one file is that file, and an index lies beside its files.
    """
    if not checkpoint or checkpoint == file or checkpoint.endswith(f"/{file}"):
        return checkpoint or file
    folder = checkpoint.rpartition("/")[0] if checkpoint.endswith(".json") else checkpoint
    return posix(f"{folder}/{file}" if folder else file)


def path_in_repository(path: str, target: Mapping[str, Any]) -> str:
    """Returns the path from the repository's root, if the target has a `repository` and the path lies below it.

    `path` is from the working directory, or absolute.
    """
    known = target.get("repository")
    if known is None:
        return path
    root = PurePath(known["root"])
    whole = PurePath(os.path.normpath(root / known["folder"] / path))
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else path


def posix(path: str) -> str:
    """Returns the path with `/`, without `./` and a final `/`."""
    return PurePath(path).as_posix() if path else ""


# -- files that a command will write, and therefore must not read --
#
# Which files a checkpoint consists of is known only once it is open: an index names its shards, a pointer its folder, a
# link leads elsewhere, a log lies beside it. So each file is checked when it is opened, before anything is written.

_promised: Final[dict[Hashable, str]] = {}


@contextmanager
def to_be_written(files: Iterable[str]) -> Iterator[None]:
    """Make `refuse_reading` refuse these files while the body runs, under whatever name they are opened."""
    before = dict(_promised)
    _promised.update((file_key(file), file) for file in files)
    try:
        yield
    finally:
        _promised.clear()
        _promised.update(before)


def refuse_reading(path: str | os.PathLike[str]) -> None:
    """Raises UsageError for a file that will be written, because its contents would be lost.

    A file that does not exist yet is refused as well; otherwise the next run would read what this one has written.
    """
    if will_be_written(path):
        raise UsageError(f"cannot write {_promised[file_key(path)]}: it is what is to be read")


def will_be_written(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of those that will be written."""
    return bool(_promised) and file_key(path) in _promised


def file_key(path: str | os.PathLike[str]) -> Hashable:
    """Returns a key that all names of one file have in common."""
    try:
        found = os.stat(path)  # noqa: PTH116 - what is named may be no path at all
    except (OSError, ValueError):  # it does not exist yet
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


# -- names of log files: `log.jsonl` is the running one, `log.1.jsonl` the oldest, and so on --
#
# Processes of ranks other than 0 have files of their own, `log.rank3.jsonl`; `run.json` describes the run.

_RANK_AND_NUMBER = r"(?:\.rank(?P<rank>[1-9][0-9]{0,8}))?(?:\.(?P<number>[1-9][0-9]{0,8}))?"
_NAME = re.compile(rf"log{_RANK_AND_NUMBER}\.jsonl")
_RUN_NAME = re.compile(rf"run{_RANK_AND_NUMBER}\.json")


def log_name(rank: int, number: int | None = None) -> str:
    """Returns the name of a rank's log file: a finished one with its number, or the running one."""
    return f"log{_of_rank(rank)}{_numbered(number)}.jsonl"


def run_name(rank: int, number: int | None = None) -> str:
    """Returns the name of the file that describes the run: the last run's, or that of the log with this number."""
    return f"run{_of_rank(rank)}{_numbered(number)}.json"


def rank_and_number(name: str) -> tuple[int, int | None] | None:
    """Returns rank and number of a log's file, the number None for the running one; None for any other file's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found["rank"] or 0), int(found["number"]) if found["number"] else None


LAST_GOOD = "last_good"
"""The link in a log's folder to the newest good checkpoint of the run."""


def is_of_log(name: str) -> bool:
    """Whether a file of this name is a part of a log, in a log's folder."""
    return bool(_NAME.fullmatch(name) or _RUN_NAME.fullmatch(name))


def logs_in(names: Iterable[str]) -> dict[int, list[str]]:
    """Returns the names of log files by rank, the oldest first."""
    found: dict[int, list[tuple[float, str]]] = {}
    for name in names:
        place = rank_and_number(name)
        if place is not None:
            rank, number = place
            found.setdefault(rank, []).append((float("inf") if number is None else number, name))
    return {rank: [name for _, name in sorted(found[rank])] for rank in sorted(found)}


def _of_rank(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def _numbered(number: int | None) -> str:
    return f".{number}" if number else ""
