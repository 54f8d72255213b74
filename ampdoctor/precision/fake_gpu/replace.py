"""Functions of torch that are replaced around each piece of user code; each replacement is made once."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

from ampdoctor.package import FOLDER

# -- temporary replacement of attributes --


class Patches(ExitStack):
    """Replaced attributes; `close()` restores each, in reverse order."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; an inherited attribute is inherited again afterwards."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)


class Replacements:
    """The attributes to replace, each made once, as a run may hold it; outside an emulation it calls the original."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, Callable[..., Any], tuple[Any, ...]]] = []
        self._made: dict[tuple[int, str, Any], Any] = {}

    def want(self, owner: Any, name: str, make: Callable[..., Any], *details: Any) -> None:
        """Replace `owner.name` by `make(original, *details)`, made once an original; skip what this torch lacks."""
        if hasattr(owner, name):
            self._wanted.append((owner, name, make, details))

    def install(self, patches: Patches) -> None:
        for owner, name, make, details in self._wanted:
            original = getattr(owner, name)
            key = id(owner), name, original
            if key not in self._made:
                self._made[key] = make(original, *details)
            patches.set(owner, name, self._made[key])


# -- which callers are told that there is a GPU: user code, transformers and accelerate, but no other library --
#
# A library that is told of a GPU goes on to use functions that only a GPU has; torch itself would call CUDA's own. The
# packages in `HEAR_YES` were tested completely: a training, its checkpoint, and a restart from there.

USER: Final = ""  # used as the package name of the user's own code, which is in no package
HEAR_YES: Final = frozenset({USER, "transformers", "accelerate"})  # packages that are told of an emulated GPU
_STANDARD: Final = "(the standard library)"
_INSTALLED: Final = ("site-packages", "dist-packages")
_STANDARD_FOLDERS: Final = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES: Final[dict[str, str]] = {}  # cached by file: torch reads a tensor's device many times in a step
_FOLDERS: Final = ((f"{FOLDER}{os.sep}", "ampdoctor"), (f"{Path(torch.__file__).parent}{os.sep}", "torch"))


def sees_cuda(frame: FrameType) -> bool:
    """Whether the code of this frame is told that there is a GPU."""
    return package_of(frame) in HEAR_YES


def caller_sees_cuda(frame: FrameType) -> bool:
    """Whether the caller is told of a GPU: the first frame outwards from this one outside the standard library."""
    asking: FrameType | None = frame
    while asking is not None:
        package = package_of(asking)
        if package != _STANDARD:
            return package in HEAR_YES
        asking = asking.f_back
    return False


def imported_by_user(frame: FrameType) -> bool:
    """Whether the user's own code makes this import; `frame` is one of the import system's."""
    asking: FrameType | None = frame
    while asking is not None and asking.f_code.co_filename.startswith("<frozen importlib"):
        asking = asking.f_back
    if asking is not None and asking.f_code is importlib.import_module.__code__:
        asking = asking.f_back
    return asking is not None and package_of(asking) == USER


def package_of(frame: FrameType) -> str:
    """The top-level package whose code runs in a frame; `USER` for code that is in no installed package."""
    filename = frame.f_code.co_filename
    known = _PACKAGES.get(filename)
    if known is not None:
        return known
    if filename.startswith("<") and not filename.startswith("<frozen"):  # made by exec: belongs to its module
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


# -- cached answers in transformers and accelerate --

_ASK: Final = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")
"""Modules whose functions ask about CUDA once in a process, and keep the answer."""
_STATES: Final = ("PartialState", "AcceleratorState", "GradientState")
_ABOUT: Final = frozenset({"cuda", "accelerator"})


def forget_callers() -> None:
    """Clear the cached answers, which differ inside and outside of an emulation."""
    for name in _ASK:
        for forget in _forgetting(sys.modules[name]) if name in sys.modules else ():
            forget()


@functools.cache
def _forgetting(module: ModuleType) -> tuple[Callable[[], None], ...]:
    """What clears the caches of functions that ask about CUDA, directly or through another one: others are slow."""
    kept = {name: inspect.unwrap(value) for name, value in vars(module).items() if hasattr(value, "cache_clear")}
    names = {name: set(value.__code__.co_names) for name, value in kept.items() if hasattr(value, "__code__")}
    asked: set[str] = set()
    while more := {name for name, used in names.items() if used & (_ABOUT | asked)} - asked:
        asked |= more
    return tuple(vars(module)[name].cache_clear for name in sorted(asked))


def what_is_shared() -> Callable[[], None]:
    """A function that restores Accelerate's process-wide state (its device, its precision), which it makes once."""
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
