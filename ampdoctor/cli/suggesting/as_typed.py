"""An error about a path names it as it was typed: below the command line a file has its own name only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

_MISSING = " does not exist."


def as_typed(said: str, arguments: Sequence[str]) -> str:
    """Return a sentence that begins with the name of a file with the whole path in the name's place.

    Where there is no such file, it also says what the path looks like: a URL, or a pattern that matched nothing.

    Args:
        said: What is wrong with a checkpoint.
        arguments: What was typed, without the program's name.
    """
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        name = PurePath(path).name
        if not name or not said.startswith(f"{name} "):
            continue
        missing = said == f"{name}{_MISSING}"
        if missing and "://" in path:
            return f"{path} is a URL, and none is fetched: download the file and name that."
        if missing and set("*?[") & set(path):
            return f"{path} does not exist: the shell has found no file that this pattern matches."
        return path + said.removeprefix(name)
    return said
