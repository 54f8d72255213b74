"""Paths in a configuration file: relative to its folder, and what a file that merely lay there may not reach.

A configuration that was found above the working directory may be a stranger's, come with a repository. It can set
options, and some of them write files or name code. So a found one may only write into its own folder, and not to hidden
files there (`.git`, `.github`, `.env` belong to other tools), and may only name code by a path in it: a module is
whatever Python finds by that name, `os` for one. What is read is read inertly, from wherever. A file that the user
names with --config is the user's word, and may do all of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ampdoctor.cli.process.streams import NAMES_OF_STDOUT
from ampdoctor.cli.settings.config_file import ConfigFile
from ampdoctor.errors import UsageError

_WRITTEN = frozenset({"output", "report", "save"})
_CODE = frozenset({"app-dir", "batches", "loss", "model"})
_READ = frozenset({"baseline", "checkpoint", "against"})


def placed(file: ConfigFile, place: str, key: str, value: Any) -> Any:
    """Return a setting's value with its paths as they are from the working directory.

    Args:
        file: The configuration file.
        place: Where the key stands, for the sentence.
        key: The setting's key.
        value: What stands there.

    Raises:
        UsageError: The file was found, not named, and the path leads where such a file may not reach.
    """
    if key == "report":
        return [_report(file, place, text) for text in value]
    if key in ("batches", "loss", "model"):
        path, colon, name = value.rpartition(":")
        if key == "model" and value.endswith(".py"):
            return _one(file, place, value, key)
        if path.endswith(".py"):
            return f"{_one(file, place, path, key)}{colon}{name}"
        if file.found and value.strip():
            said = f"{value} is a module, wherever Python finds it, and {_because(file)}"
            raise UsageError(f"{place}: {said}: name its file (FILE.py:NAME)")
        return value
    return _one(file, place, value, key) if key in _WRITTEN | _CODE | _READ else value


def paths_in(key: str, value: Any) -> list[str]:
    """Return the files that a setting's value names, by which an error may speak of it."""
    if key == "report":
        return [path for text in value if (path := text.partition("=")[2])]
    return [value] if value and key in _WRITTEN | _READ else []


def _report(file: ConfigFile, place: str, text: str) -> str:
    form, equals, path = text.partition("=")
    return f"{form}{equals}{_one(file, place, path, 'report')}"


def _one(file: ConfigFile, place: str, path: str, key: str) -> str:
    if not path.strip() or (key in _WRITTEN and path in NAMES_OF_STDOUT):  # empty: the option itself refuses it
        return path
    joined = os.path.normpath(file.folder / path)
    if file.found and key in _WRITTEN | _CODE:
        _refuse_outside(file, place, joined, written=key in _WRITTEN)
    return joined


def _refuse_outside(file: ConfigFile, place: str, path: str, *, written: bool) -> None:
    folder, target = Path(os.path.realpath(file.folder)), Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise UsageError(f"{place}: {path} lies outside the file's own folder, and {_because(file)}")
    if written and any(part.startswith(".") for part in target.relative_to(folder).parts):
        raise UsageError(f"{place}: {path} is hidden, or in a hidden folder, and {_because(file)}")


def _because(file: ConfigFile) -> str:
    return f"{file.name} was found, not named with --config"
