"""Functions of torch replaced around each piece of user code, each replacement made once."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from ampdoctor.package import FOLDER

if TYPE_CHECKING:
    from types import FrameType


# Attributes of modules and classes replaced for a while.


_ABSENT: Final = object()


class Patches:
    """Replaced attributes; `undo()` brings each back, in reverse order."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; one that was inherited, not the owner's own, is inherited again afterwards."""
        before = vars(owner).get(name, _ABSENT)
        self.after(*((delattr, owner, name) if before is _ABSENT else (setattr, owner, name, before)))
        setattr(owner, name, value)

    def after(self, undo: Callable[..., None], *arguments: Any) -> None:
        """Have something else undone too."""
        self._done.append((undo, arguments))

    def undo(self) -> None:
        """Bring everything back; a second call does nothing."""
        while self._done:
            undo, arguments = self._done.pop()
            undo(*arguments)


class _Wanted:
    """An attribute that is replaced, and what its last original was replaced by."""

    __slots__ = ("details", "made", "make", "name", "original", "owner", "replacement")

    def __init__(self, owner: Any, name: str, make: Callable[..., Any], details: tuple[Any, ...]) -> None:
        self.owner, self.name, self.make, self.details = owner, name, make, details
        self.made: dict[Any, Any] = {}
        self.original: Any = None
        self.replacement: Any = None

    def replace(self, original: Any) -> None:
        if original not in self.made:
            self.made[original] = self.make(original, *self.details)
        self.original, self.replacement = original, self.made[original]


class Replacements:
    """What is replaced, and by what.

    A replaced function that user code has bound by name (`from torch import zeros`) outlives its patch: it asks whether
    anything is emulated and hands on to the original when nothing is. Each is made once and installed many times,
    around every piece of user code, so that what a run holds stays what is there.
    """

    __slots__ = ("_wanted",)

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []

    def want(self, owner: Any, name: str, make: Callable[..., Any], *details: Any) -> None:
        """Have `owner.name` replaced by what `make` makes of it; what this torch lacks stays away.

        Args:
            owner: A module or class.
            name: Of its attribute.
            make: Called with the original and the details, once for each original.
            details: Further arguments of `make`.
        """
        if hasattr(owner, name):
            self._wanted.append(_Wanted(owner, name, make, details))

    def install(self, patches: Patches) -> None:
        """Replace them all, until the patches are undone."""
        for wanted in self._wanted:
            original = getattr(wanted.owner, wanted.name)
            if original is not wanted.original:
                wanted.replace(original)
            patches.set(wanted.owner, wanted.name, wanted.replacement)


# Who asks: the user's code and those who train for it hear that there is a GPU, every other library the truth.
#
# A library that hears yes goes on to what only a GPU has; torch itself would call CUDA's own functions. Those in
# `HEAR_YES` were tried whole: a training, its checkpoint, and its return from there.


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


# What the libraries that hear of a GPU remember of the answer.


_ASK: Final = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")
"""Modules whose functions ask about CUDA once in a process, and keep the answer."""
_STATES: Final = ("PartialState", "AcceleratorState", "GradientState")
_ABOUT: Final = frozenset({"cuda", "accelerator"})


def forget_what_was_heard() -> None:
    """Let them ask again: the answer is another inside and outside of an emulation."""
    for name in _ASK:
        module = sys.modules.get(name)
        if module is not None:
            for forget in _forgetting(module):
                forget()


def what_is_shared() -> Callable[[], None]:
    """Returns what puts Accelerate's idea of the process back, which it makes once: its device, its precision."""
    before = {name: dict(shared) for name, shared in _shared().items()}

    def put_back() -> None:
        for name, shared in _shared().items():
            shared.clear()
            shared.update(before.get(name, {}))

    return put_back


def _shared() -> dict[str, dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    states = {name: getattr(module, name, None) for name in _STATES}
    return {name: state._shared_state for name, state in states.items() if state is not None}


@functools.cache
def _forgetting(module: ModuleType) -> tuple[Callable[[], None], ...]:
    """Returns what clears the caches of the functions that ask, or ask one that asks."""
    kept = {name: value for name, value in vars(module).items() if hasattr(value, "cache_clear")}
    asked: set[str] = set()
    while True:
        more = {name for name, value in kept.items() if _names(value) & (_ABOUT | asked)} - asked
        if not more:
            return tuple(kept[name].cache_clear for name in sorted(asked))
        asked |= more


def _names(function: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()
