"""Paths in a configuration file: relative to its folder, and what a file that merely lay there may not reach.

A configuration that was found above the working directory may be a stranger's, come with a repository. It can set
options, and some of them write files or name code. So a found one may only write into its own folder, and not to hidden
files there (`.git`, `.github`, `.env` belong to other tools), and may only name code by a path in it: a module is
whatever Python finds by that name, `os` for one. What is read is read inertly, from wherever. A file that the user
names with --config is the user's word, and may do all of it.

What an option does with its text stands in one table, `USES`; a test holds it complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ampdoctor.cli.process.streams import NAMES_OF_STDOUT
from ampdoctor.cli.settings.config_file import ConfigFile
from ampdoctor.errors import UsageError

Use = Literal["writes", "writes forms", "exports", "runs code", "runs code from", "reads", "neither"]
USES: Mapping[str, Use] = {
    "against": "reads",
    "app-dir": "runs code from",
    "arg": "neither",
    "baseline": "reads",
    "batches": "runs code",
    "bundle-max": "neither",
    "checkpoint": "reads",
    "config": "reads",
    "device": "neither",
    "device-memory": "neither",
    "export": "exports",
    "gpus": "neither",
    "health": "writes",
    "loss": "runs code",
    "memory-per-sample": "neither",
    "model": "runs code",
    "output": "writes",
    "params": "neither",
    "peak-memory": "neither",
    "profile": "reads",
    "report": "writes forms",
    "save": "writes",
    "skip-batches": "neither",
    "state-bytes": "neither",
    "target": "neither",
    "threshold": "neither",
    "to-gpus": "neither",
    "write-baseline": "writes",
}
"""Of every option whose value is a text or a list of texts, and not one of a few words, what is done with it.

"writes": a file or a folder of this name; "writes forms": FORM=FILE; "exports": KIND=TARGET, a place or a server; "runs
code": FILE.py:NAME or a module; "runs code from": a folder; "reads": a file, inertly; "neither": it is no path.
"""


def placed(file: ConfigFile, place: str, key: str, value: Any) -> Any:
    """Return a setting's value with its paths as they are from the working directory.

    Args:
        file: The configuration file.
        place: Where the key stands, for the sentence.
        key: The setting's key.
        value: What stands there.

    Raises:
        UsageError: The file was found, not named, and the value leads where such a file may not reach.
    """
    match USES.get(key, "neither"):
        case "writes forms":
            return [_with_path(file, place, text) for text in value]
        case "exports":
            return [_exported(file, place, text) for text in value]
        case "writes":
            return _one(file, place, value, writes=True)
        case "runs code":
            return _code(file, place, value, alone=key == "model")
        case "runs code from":
            return _one(file, place, value, runs=True)
        case "reads":
            return _one(file, place, value)
        case _:
            return value


def paths_in(key: str, value: Any) -> list[str]:
    """Return the files that a setting's value names, by which an error may speak of it."""
    use = USES.get(key, "neither")
    if use in ("writes forms", "exports"):
        return [path for text in value if (path := text.partition("=")[2])]
    return [value] if value and use in ("writes", "reads") else []


def _with_path(file: ConfigFile, place: str, text: str) -> str:
    form, equals, path = text.partition("=")
    return f"{form}{equals}{_one(file, place, path, writes=True)}"


def _exported(file: ConfigFile, place: str, text: str) -> str:
    """The target of an export as it is from the working directory; a found file names no server and no account."""
    from ampdoctor.health.sinks.export import KINDS  # what few runs need

    name, equals, target = text.partition("=")
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None or not target.strip():
        return text  # the option itself refuses it
    if kind.is_path and not kind.is_endpoint(target) and "://" not in target:
        return f"{name}{equals}{_one(file, place, os.path.expanduser(target), writes=True)}"  # noqa: PTH111 - a text
    if file.found:
        raise UsageError(f"{place}: {text} sends the run's numbers to where it says, and {_because(file)}")
    return text


def _code(file: ConfigFile, place: str, value: str, *, alone: bool) -> str:
    """FILE.py:NAME, or FILE.py `alone`."""
    path, colon, name = value.rpartition(":")
    if alone and value.endswith(".py"):
        return _one(file, place, value, runs=True)
    if path.endswith(".py"):
        return f"{_one(file, place, path, runs=True)}{colon}{name}"
    if file.found and value.strip():
        said = f"{value} is a module, wherever Python finds it, and {_because(file)}"
        raise UsageError(f"{place}: {said}: name its file (FILE.py:NAME)")
    return value


def _one(file: ConfigFile, place: str, path: str, *, writes: bool = False, runs: bool = False) -> str:
    if not path.strip() or (writes and path in NAMES_OF_STDOUT):  # empty: the option itself refuses it
        return path
    joined = os.path.normpath(file.folder / path)
    if file.found and (writes or runs):
        _refuse_outside(file, place, joined, written=writes)
    return f".{os.sep}{joined}" if joined.startswith("~") else joined  # a folder of that name, and nobody's home


def _refuse_outside(file: ConfigFile, place: str, path: str, *, written: bool) -> None:
    folder, target = Path(os.path.realpath(file.folder)), Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise UsageError(f"{place}: {path} lies outside the file's own folder, and {_because(file)}")
    if written and any(part.startswith(".") for part in target.relative_to(folder).parts):
        raise UsageError(f"{place}: {path} is hidden, or in a hidden folder, and {_because(file)}")


def _because(file: ConfigFile) -> str:
    return f"{file.name} was found, not named with --config"
