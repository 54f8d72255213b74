"""What a log has shown is kept in the user's cache folder, so that a second look need not read it again.

It is found again by the paths, sizes and times of the log's files, by the thresholds and by the version of ampdoctor. A
cache that cannot be read or written is none: the log is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

from ampdoctor.evidence.checked import checked
from ampdoctor.evidence.codec import to_plain
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
    sizes = found.sizes()
    if sum(size for _, size, _ in sizes) < LEAST_BYTES:
        return look(found, thresholds, told)
    asked = [version(), sys.version, found.kind.format, found.typed, os.getcwd(), sizes]  # noqa: PTH109 - a text
    moved = [(threshold.key, value) for threshold, value in thresholds.moved]
    key = hashlib.sha256(json.dumps([asked, moved, [one.what for one in found.skipped]]).encode()).hexdigest()
    file = _folder() / f"{key[:32]}.json"
    kept = _read(file)
    if kept is None:
        kept = look(found, thresholds, told)
        if found.sizes() == sizes:
            _write(file, kept)
    return kept


def _folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named or "~/.cache").expanduser() / "ampdoctor" / "health"


def _read(file: Path) -> Looked | None:
    try:
        if file.stat().st_size > MOST_BYTES:
            return None
        kept = checked(Looked, json.loads(file.read_text(encoding="utf-8")))
        os.utime(file)
    except (OSError, ValueError, RecursionError):
        return None
    return kept


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
