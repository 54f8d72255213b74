"""How the files of a log are named: `log.jsonl` is the running one, `log.1.jsonl` the oldest, and so on.

Processes of other ranks than 0 have files of their own, `log.rank3.jsonl`; what the run is stands in `run.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANK_AND_NUMBER = r"(?:\.rank(?P<rank>[1-9][0-9]{0,8}))?(?:\.(?P<number>[1-9][0-9]{0,8}))?"
_NAME = re.compile(rf"log{_RANK_AND_NUMBER}\.jsonl")
_RUN_NAME = re.compile(rf"run{_RANK_AND_NUMBER}\.json")


def log_name(rank: int, number: int | None = None) -> str:
    """Returns the name of a rank's log: of a file that is finished, or of the running one."""
    return f"log{_of_rank(rank)}{_numbered(number)}.jsonl"


def run_name(rank: int, number: int | None = None) -> str:
    """Returns the name of the file that says what the run is: the last one's, or the one's whose log had a number."""
    return f"run{_of_rank(rank)}{_numbered(number)}.json"


def place_of(name: str) -> tuple[int, int | None] | None:
    """Returns rank and number of a log's file, the number None for the running one; None for any other file's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found["rank"] or 0), int(found["number"]) if found["number"] else None


def is_of_log(name: str) -> bool:
    """Whether a file of this name is a part of a log, in the folder of one."""
    return bool(_NAME.fullmatch(name) or _RUN_NAME.fullmatch(name))


def logs_in(names: Iterable[str]) -> dict[int, list[str]]:
    """Returns by rank the names of its log's files, the oldest first."""
    found: dict[int, list[tuple[float, str]]] = {}
    for name in names:
        place = place_of(name)
        if place is not None:
            rank, number = place
            found.setdefault(rank, []).append((float("inf") if number is None else number, name))
    return {rank: [name for _, name in sorted(found[rank])] for rank in sorted(found)}


def _of_rank(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def _numbered(number: int | None) -> str:
    return f".{number}" if number else ""
