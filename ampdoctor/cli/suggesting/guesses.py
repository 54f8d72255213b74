"""Near files and functions: what a name on the command line may have meant, found without importing anything."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from ampdoctor.evidence.of_runs.ranges import PROFILE_MARK

_LONGEST_SOURCE = 1_000_000
"""Bytes of a Python file that are looked through for functions."""
_HEAD = 1024
"""Bytes of a file that are looked through for the mark of a saved profile."""
_NEAR = 0.75
"""From what likeness on two stems are spellings of one name: a letter moved, missing or too many, and little more."""
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def near_file(path: str) -> str | None:
    """The file or folder beside a path that is not there whose name is a near spelling of it."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in wanted.parent.iterdir())
    except OSError:
        return None
    likenesses = [
        (_likeness(wanted.stem, Path(name).stem), _likeness(wanted.suffix, Path(name).suffix)) for name in names
    ]
    near = [(both, name) for both, name in zip(likenesses, names, strict=True) if both[0] >= _NEAR and both[1] >= _NEAR]
    found = max(near, default=None)
    return str(wanted.with_name(found[1])) if found is not None and found[1] != wanted.name else None


def near_name(word: str, names: Iterable[str]) -> str | None:
    """The one of the names that a word is a near spelling of, or the beginning of no other."""
    known = sorted(set(names))
    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=_NEAR)), None)


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def last_number(folder: str) -> str | None:
    """The entry of a folder with the highest last number in its name (`checkpoint-4`)."""
    try:
        numbered = [(int(found[1]), entry) for entry in Path(folder).iterdir() if (found := _NUMBER.search(entry.name))]
    except (OSError, ValueError):
        return None
    return str(max(numbered)[1]) if numbered else None


def function_of(target: str) -> str | None:
    """`file.py:function` of a Python file that was named with the wrong function, or with none."""
    file, _, wanted = target.partition(":")
    path = Path(file)
    if not path.is_file():
        near = near_file(file) if path.suffix == ".py" else None
        if near is None:
            return None
        file, path = near, Path(near)
    names = functions(path)
    if wanted in names:
        return f"{file}:{wanted}"
    near_names = difflib.get_close_matches(wanted, names, n=1) if wanted and len(names) > 1 else names[:1]
    return f"{file}:{near_names[0]}" if near_names else None


def same_factory(target: str) -> str | None:
    """The factory that was meant, be it of a file (`train.py:make`) or of a module (`pkg.train:make`)."""
    named, colon, function = target.partition(":")
    if named.endswith(".py"):
        return function_of(target)
    if not colon and Path(f"{target.rpartition('.')[0].replace('.', '/')}.py").is_file():
        return same_factory(":".join(target.rpartition(".")[::2]))  # a dot where the colon belongs
    file = Path(f"{named}.py") if "/" in named else Path(f"{named.replace('.', '/')}.py")
    meant = str(file) if file.is_file() else near_file(str(file))
    if meant is None or not meant.endswith(".py") or not Path(meant).is_file():
        return None
    found = function_of(f"{meant}{colon}{function}")
    return found if colon else function_of(meant)


def is_saved_profile(path: str) -> bool:
    """Whether a file is what `profile --save` writes, by the first bytes of its header."""
    try:
        with Path(path).open("rb") as file:
            return PROFILE_MARK.encode() in file.read(_HEAD)
    except OSError:
        return False


def functions(path: Path) -> list[str]:
    """Functions at the top of a file that could be factories, the likeliest first."""
    try:
        if path.stat().st_size > _LONGEST_SOURCE:
            return []
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return [node.name for node in sorted(found, key=lambda node: (not _makes_a_run(node), "run" not in node.name))]


def _makes_a_run(function: ast.FunctionDef) -> bool:
    """Does it return a `TrainingRun(...)`?"""
    returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return any(isinstance(value, ast.Call) and "TrainingRun" in ast.unparse(value.func) for value in returned)
