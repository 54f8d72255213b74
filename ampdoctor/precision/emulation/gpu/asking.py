"""Who asks: the user's code and those who train for it hear that there is a GPU, every other library the truth.

A library that hears yes goes on to what only a GPU has; torch itself would call CUDA's own functions. Those in
`HEAR_YES` were tried whole: a training, its checkpoint, and its return from there.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ampdoctor.package import FOLDER

if TYPE_CHECKING:
    from types import FrameType

USER: Final = ""
"""In the place of a package's name: the user's own code, which lies in none."""
HEAR_YES: Final = frozenset({USER, "transformers", "accelerate"})
"""The packages that hear of a GPU wherever one is emulated."""
_STANDARD: Final = "(the standard library)"
_INSTALLED: Final = ("site-packages", "dist-packages")
_STANDARD_FOLDERS: Final = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES: Final[dict[str, str]] = {}
"""By file, as far as asked: torch asks a tensor for its device many times in a step."""
_FOLDERS: Final = ((f"{FOLDER}{os.sep}", "ampdoctor"), (f"{Path(torch.__file__).parent}{os.sep}", "torch"))


class _Heard:
    """Who hears yes now."""

    packages: frozenset[str] = HEAR_YES


@contextmanager
def heard_by(*packages: str) -> Iterator[None]:
    """Let these packages too hear yes for a while: an adapter knows that its framework goes on to nothing harmful.

    Args:
        packages: Names of top-level packages ("lightning", "lightning_fabric").
    """
    before = _Heard.packages
    _Heard.packages = before | set(packages)
    try:
        yield
    finally:
        _Heard.packages = before


def hears_yes(frame: FrameType) -> bool:
    """Does the code of this frame hear that there is a GPU?"""
    return package_of(frame) in _Heard.packages


def asker_hears_yes(frame: FrameType) -> bool:
    """Does the code that asks hear it: the first from this frame outwards that is none of the standard library's?"""
    asking: FrameType | None = frame
    while asking is not None:
        package = package_of(asking)
        if package != _STANDARD:
            return package in _Heard.packages
        asking = asking.f_back
    return False


def imported_by_user(frame: FrameType) -> bool:
    """Is it an import of the user's own that asks, from this frame of the import system's outwards?"""
    asking: FrameType | None = frame
    while asking is not None and asking.f_code.co_filename.startswith("<frozen importlib"):
        asking = asking.f_back
    if asking is not None and asking.f_code is importlib.import_module.__code__:
        asking = asking.f_back
    return asking is not None and package_of(asking) == USER


def package_of(frame: FrameType) -> str:
    """Returns the top-level package whose code runs in a frame; `USER` for code that is in no installed package."""
    filename = frame.f_code.co_filename
    known = _PACKAGES.get(filename)
    if known is not None:
        return known
    if filename.startswith("<") and not filename.startswith("<frozen"):  # made by exec: it is its module's
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        return _package(getattr(module, "__file__", None) or filename)
    return _PACKAGES.setdefault(filename, _package(filename))


def _package(filename: str) -> str:
    for folder, package in _FOLDERS:
        if filename.startswith(folder):
            return package
    parts = Path(filename).parts
    for installed in _INSTALLED:
        if installed in parts[:-1]:
            return parts[parts.index(installed) + 1].removesuffix(".py")
    return _STANDARD if filename.startswith(("<frozen", *_STANDARD_FOLDERS)) else USER
