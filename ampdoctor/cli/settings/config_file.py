"""The configuration file: where it is looked for, and how it is read. It is data; nothing in it is ever executed."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampdoctor.cli.process.bounded_file import mentions, read_text
from ampdoctor.cli.process.repository import repository_root
from ampdoctor.cli.process.streams import note
from ampdoctor.errors import UsageError

RULES_KEY, IGNORE_KEY = "rules", "ignore"
OWN, SHARED = "ampdoctor.toml", "pyproject.toml"
"""In a folder that has both, the first is read. In the second our table is one of many: `[tool.ampdoctor]`."""
_FEW = 8
"""Keys that an error lists; more are shown by a command of their own."""
MAX_BYTES = 512 * 1024
_WHAT = "the configuration"
_MAX_DOTS = 500
"""In a line. Python's parser takes time and memory with the square of a dotted key's parts: 40 kB took it 4 s, and
400 kB more memory than there was."""
_HEADER = re.compile(r"""^[ \t]*\[\[?[ \t]*tool[ \t]*\.[ \t]*["']?ampdoctor["']?[ \t]*[.\]]""", re.MULTILINE)
"""Of a table of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One configuration file, read.

    Attributes:
        name: Its path from the working directory.
        found: True where it lay there, False where the user named it. Whoever wrote a file that lay there may be
            anybody: it may not reach beyond its own folder.
        prefix: What stands before each of its keys: "tool.ampdoctor." or nothing.
        table: Its content, not yet looked at.
        ignore_lines: The line of each `[[ignore]]` in it, where they can be told.
    """

    name: str
    found: bool
    prefix: str
    table: Mapping[str, Any]
    ignore_lines: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that its relative paths are relative to."""
        return Path(self.name).parent

    def place(self, key: str) -> str:
        """Return where a key stands, for a sentence."""
        return f"{self.name}: {self.prefix}{key}"


def load_config(named: str | None) -> ConfigFile | None:
    """Return the configuration file that is named, or that the working directory belongs to; None where there is none.

    One of another user is not read unless it is named: anybody may leave one in /tmp, and it could turn a sick
    checkpoint green. That is said on stderr and is no error, or it would keep everybody there from working.

    Raises:
        UsageError: It cannot be read, or is not TOML.
    """
    if named is not None:
        return _read(Path(named), found=False)
    try:
        here = Path.cwd()
    except OSError:  # somebody has deleted it
        return None
    for path in _candidates(here):
        if path.name == SHARED and not _is_ours(path):
            continue
        if not _foreign(path):
            return _read(path, found=True)
        name = os.path.relpath(path)
        note(f"ampdoctor: {name} is another user's and not read: --config {name} accepts it, --isolated is silent")
    return None


def _candidates(folder: Path) -> list[Path]:
    """Where a configuration may lie: in this folder or the nearest above it, up to the root of the repository."""
    paths = []
    root = repository_root(folder)
    for level in (folder, *folder.parents):
        paths += [path for name in (OWN, SHARED) if os.path.lexists(path := level / name)]
        if level == root:
            break
    return paths


def _is_ours(path: Path) -> bool:
    """Whether a pyproject.toml has our table; whatever is wrong with one that has none is not our affair.

    One that names us and is too large to be looked at may have it: reading it refuses it.
    """
    name = str(path)
    try:
        if not mentions(name, b"ampdoctor", what=_WHAT):
            return False
    except UsageError:
        return False
    try:
        text = read_text(name, limit=MAX_BYTES, what=_WHAT, lenient=True)
    except UsageError:
        return True
    if _HEADER.search(text):
        return True
    try:
        tool = _parse(text, name).get("tool")
    except UsageError:
        return False
    return isinstance(tool, dict) and "ampdoctor" in tool


def _read(path: Path, *, found: bool) -> ConfigFile:
    name = os.path.relpath(path) if found else str(path)
    text = read_text(name, limit=MAX_BYTES, what=_WHAT)
    shared = path.name == SHARED
    table = _parse(text, name)
    if shared:
        tool = table.get("tool")
        own = tool.get("ampdoctor") if isinstance(tool, dict) else None
        if own is None:
            raise UsageError(f"{name} has no table [tool.ampdoctor]")
        if not isinstance(own, dict):
            raise UsageError(f"{name}: tool.ampdoctor is no table")
        table = own
    return ConfigFile(
        name=name,
        found=found,
        prefix="tool.ampdoctor." if shared else "",
        table=table,
        ignore_lines=_ignore_lines(text, shared=shared),
    )


def _foreign(path: Path) -> bool:
    """Whether the file, or a link to it, is of a user who is neither this one nor root."""
    if not hasattr(os, "geteuid"):
        return False
    owners = {path.lstat().st_uid}
    with contextlib.suppress(OSError):  # a link to nowhere: reading it says so
        owners.add(path.stat().st_uid)
    return not owners <= {os.geteuid(), 0}


def _parse(text: str, name: str) -> dict[str, Any]:
    import tomllib  # --help reads no file

    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise UsageError(f"{name}: line {number} has more than {_MAX_DOTS} dots; break it into several")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {error}") from None
    except (RecursionError, ValueError):  # a date that is none, an integer of too many digits
        raise UsageError(
            f"{name} is not TOML that can be read: it is nested too deeply, or a number is too long"
        ) from None


def _ignore_lines(text: str, *, shared: bool) -> tuple[int, ...]:
    own = r"tool\s*\.\s*ampdoctor\s*\.\s*ignore" if shared else "ignore"
    header = re.compile(rf"\s*\[\[\s*{own}\s*\]\]")
    return tuple(number for number, line in enumerate(text.split("\n"), 1) if header.match(line))


def unknown_key(place: str, key: str, known: Collection[str]) -> UsageError:
    """Return the error of a key that there is not, with the nearest that there is."""
    near = difflib.get_close_matches(key.replace("_", "-"), list(known), n=1)
    few = (
        f"there are {', '.join(sorted(known))}" if len(known) <= _FEW else "--isolated --show-config lists a command's"
    )
    return UsageError(f"{place}: there is no such key; {f'did you mean {near[0]}?' if near else few}")


def wrong_value(place: str, expected: str, value: Any) -> UsageError:
    """Return the error of a value of another type than the key takes."""
    kinds = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return UsageError(f"{place}: expected {expected}, not {kinds.get(type(value), 'a date or time')}")
