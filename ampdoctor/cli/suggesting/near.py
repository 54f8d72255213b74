"""Near spellings of what was typed: names, files, functions of a Python file, which is not imported for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from ampdoctor.replay.user_modules import factories_in

_NEAR = 0.75
"""Likeness from which two names are spellings of one: a letter moved, missing or too many, and little more."""


def near_name(word: str, names: Iterable[str]) -> str | None:
    """Returns the name that the word is a near spelling of, or the beginning of no other."""
    known = sorted(set(names))
    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=_NEAR)), None)


def near_file(path: str) -> str | None:
    """Returns the file or folder beside a path that is not there whose name is a near spelling of it."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in wanted.parent.iterdir() if entry.suffix == wanted.suffix)
    except OSError:
        return None
    near = difflib.get_close_matches(wanted.name, names, n=1, cutoff=_NEAR)
    return str(wanted.with_name(near[0])) if near and near[0] != wanted.name else None


def near_factory(target: str) -> str | None:
    """Returns `FILE.py:FUNCTION` for a Python file that was named with a wrong function, or with none."""
    file, _, wanted = target.partition(":")
    if not Path(file).is_file():
        file = near_file(file) or file
    names = factories_in(Path(file)) if file.endswith(".py") else []
    if wanted in names or not names:
        return f"{file}:{wanted}" if names else None
    near = difflib.get_close_matches(wanted, names, n=1) if wanted and len(names) > 1 else names[:1]
    return f"{file}:{near[0]}" if near else None
