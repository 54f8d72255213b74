"""What a script enters in places that the whole process shares, and that refuse it a second time.

A script runs more than once in one process, as if each run were a process of its own. What it has registered is taken
back before it runs again: operators, the way in which processes start, names in the registries of libraries. Where a
setting cannot be taken back (the threads between operators) a second call is let pass.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, MutableMapping
from functools import wraps
from multiprocessing import context
from types import FrameType
from typing import Any

import torch
from torch.library import Library

from ampdoctor.replay.guarding.changes import is_users_file

_MAIN = "__main__"
_REGISTRIES = ("_extra_content", "_module_dict", "_obj_map", "_model_entrypoints")
"""Where registries keep what was added: transformers' Auto classes, mmengine's and mmcv's, fvcore's and detectron2's,
timm's; by attribute, as each of them raises for a name that is there."""
_OF = ("transformers", "mmengine", "mmcv", "fvcore", "detectron2", "iopath", "timm", "lightning_utilities")
"""Packages that have such registries."""


class Registrations:
    """What the runs of one script have registered and not taken back."""

    def __init__(self) -> None:
        self._libraries: list[Library] = []
        self._start: Any = None
        self._begun = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, what the user's code registers is kept in mind."""
        if not self._begun:
            self._begun = True
            self._start = context._default_context._actual_context  # type: ignore[attr-defined]  # noqa: SLF001
        made, threads = Library.__init__, torch.set_num_interop_threads

        @wraps(made)
        def init(library: Library, *args: Any, **kwargs: Any) -> None:
            made(library, *args, **kwargs)  # type: ignore[no-untyped-call]
            if _by_user(sys._getframe(1)):  # noqa: SLF001 - whose call it is
                self._libraries.append(library)

        @wraps(threads)
        def set_threads(count: int) -> None:
            with contextlib.suppress(RuntimeError):  # torch has worked in this process; no number depends on it
                threads(count)

        Library.__init__ = init  # type: ignore[method-assign, assignment]
        torch.set_num_interop_threads = set_threads  # type: ignore[assignment]
        try:
            yield
        finally:
            if Library.__init__ is init:
                Library.__init__ = made  # type: ignore[method-assign]
            if torch.set_num_interop_threads is set_threads:
                torch.set_num_interop_threads = threads

    def undo(self) -> None:
        """Take back what earlier runs have registered; what still calls their operators gets those of the next run."""
        while self._libraries:
            self._libraries.pop()._destroy()  # noqa: SLF001 - torch has no public way
        if self._begun:
            context._default_context._actual_context = self._start  # type: ignore[attr-defined]  # noqa: SLF001
        for registry in _registries():
            for key in [key for key, value in registry.items() if _is_users(key) or _is_users(value)]:
                del registry[key]
        _forget_flags()


_BY_SCRIPT: dict[str, Registrations] = {}


def registrations_of(file: str) -> Registrations:
    """Returns what has been registered by a script, whoever ran it in this process."""
    return _BY_SCRIPT.setdefault(file, Registrations())


def _by_user(frame: FrameType | None) -> bool:
    """Is it called by the user's code, and not by a package that is being imported and stays so?"""
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            return True
        if code.co_name == "<module>":
            return False
        frame = frame.f_back
    return False


def _registries() -> Iterator[MutableMapping[Any, Any]]:
    """Yields what loaded packages have collected of names and classes, each once."""
    seen: set[int] = set()
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] not in _OF:
            continue
        for value in [module, *vars(module).values()]:
            try:
                own = vars(value)
            except TypeError:
                continue
            for attribute in _REGISTRIES:
                found = own.get(attribute)
                if isinstance(found, dict) and id(found) not in seen:
                    seen.add(id(found))
                    yield found


def _is_users(value: Any) -> bool:
    """Is it a class or a function of a script, or of a module beside one?"""
    parts = value if isinstance(value, tuple) else (value,)  # transformers: a slow and a fast tokenizer
    return any(_module_of(part) == _MAIN or is_users_file(_file_of(part)) for part in parts)


def _module_of(value: Any) -> str | None:
    return getattr(value, "__module__", None)


def _file_of(value: Any) -> str:
    functions = [member for member in [value, *getattr(value, "__dict__", {}).values()] if hasattr(member, "__code__")]
    return functions[0].__code__.co_filename if functions else "<unknown>"


def _forget_flags() -> None:
    """Forget the command line flags that a script has defined with absl."""
    flags: Any = sys.modules.get("absl.flags")
    if flags is None:
        return
    known = flags.FLAGS.flags_by_module_dict()
    for module in [module for module in known if module == _MAIN or module == sys.argv[0] or is_users_file(module)]:
        for flag in list(known[module]):
            with contextlib.suppress(AttributeError):
                delattr(flags.FLAGS, flag.name)
