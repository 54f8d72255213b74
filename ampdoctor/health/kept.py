"""What a log has shown is kept in the user's cache folder, so that a second look need not read it again.

It is found again by the paths, sizes, times and inodes of the log's files, by the thresholds and by the version of
ampdoctor. A cache that cannot be read or written is none: the log is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.json_records import checked, to_plain
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.looking import Looked, Told, look
from ampdoctor.health.reading.opening import FoundLog
from ampdoctor.package import version

LEAST_BYTES = 8 * 1024 * 1024
"""Of a log that is kept: a smaller one is read in a second."""
MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 50
"""Looks that are kept; those that were not used for longest go first."""


def look_again(found: FoundLog, thresholds: Thresholds, told: Told | None = None) -> Looked:
    """Returns what `look` returns, from an earlier one of the same log where there was one.

    Raises:
        CheckpointError: The log cannot be read, or has no step.
    """
    state, folder = found.state(), _folder()
    if folder is None or sum(file.size for file in state) < LEAST_BYTES:
        return look(found, thresholds, told)
    asked = [version(), sys.version, found.kind.format, found.typed, shown_path(found.folder), state]
    moved = [(threshold.key, value) for threshold, value in thresholds.moved]
    key = hashlib.sha256(json.dumps([asked, moved, [one.what for one in found.skipped]]).encode()).hexdigest()
    file = folder / f"{key[:32]}.json"
    kept = _read(file)
    if kept is None:
        kept = look(found, thresholds, told)
        if found.state() == state:
            _write(file, kept)
    return kept


def _folder() -> Path | None:
    """The folder; None for a user without a home. A path that is not absolute counts as none, as XDG has it."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = named if named.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "ampdoctor" / "health" if cache.is_absolute() else None


def _read(file: Path) -> Looked | None:
    try:
        with RegularFile(file, file.name) as there:
            if there.size > MOST_BYTES:
                return None
            kept = checked(Looked, json.loads(there.read(0, there.size)))
        os.utime(file)
    except (CheckpointError, OSError, ValueError, RecursionError):
        return None
    return kept if kept.runs else None


def _write(file: Path, kept: Looked) -> None:
    """Writes a whole file or none."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix="writing-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                # in one go, by the encoder in C: json.dump makes the text piece by piece, in Python
                stream.write(json.dumps(to_plain(kept, "health"), allow_nan=False, separators=(",", ":")))
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        there = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
        for old in there[MOST_FILES:]:
            old.unlink(missing_ok=True)
