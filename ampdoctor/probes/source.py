"""The user's line: the innermost frame that belongs neither to torch nor to ampdoctor."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import torch

import ampdoctor
from ampdoctor.evidence.where import Source

_OURS = str(Path(ampdoctor.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_BOUNDARY = str(Path(ampdoctor.__file__).parent / "replay" / "session.py")
"""Frames above the session are whoever called ampdoctor, not the run that is replayed."""
_SKIPPED = ("contextlib.py", "functools.py", "threading.py", "importlib")


@lru_cache(maxsize=4096)
def _is_user(filename: str) -> bool:
    if filename.startswith(("<", _TORCH, _OURS)):
        return False
    return not (filename.startswith(sys.base_prefix) and filename.endswith(_SKIPPED))


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    path = Path(filename)
    parts = path.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return path.as_posix()


def user_line() -> tuple[str, int] | None:
    """File and line of the innermost user frame, as Python names them; None outside user code (C++ backward)."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == _BOUNDARY:
            return None
        if _is_user(filename):
            return filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def as_source(line: tuple[str, int] | None) -> Source | None:
    """For a report: below the working directory relative to it, in an installed package relative to site-packages."""
    return None if line is None else Source(_shown(line[0]), line[1])
