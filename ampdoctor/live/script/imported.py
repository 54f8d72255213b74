"""Waits for an import of the script's own: what it sets in the environment before that has to come before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def when_imported(name: str, then: Callable[[], None], failed: Callable[[Exception], None]) -> Iterator[None]:
    """While the block runs, calls `then` once: as soon as the module has been imported, at once if it is already.

    Args:
        name: Of a top-level module.
        then: Runs in the thread that imports, before its next line.
        failed: Told what that raises, which is kept from the script.
    """

    def begin() -> None:
        try:
            then()
        except Exception as error:  # noqa: BLE001 - a watch that cannot begin is no error of the script's
            with suppress(Exception):
                failed(error)

    if name in sys.modules:
        begin()
        yield
        return
    waiting = _Finder(name, begin)
    sys.meta_path.insert(0, waiting)
    try:
        yield
    finally:
        waiting.leave()
        waiting.over = True  # a module that was found inside may be run afterwards


class _Finder:
    """Finds nothing itself, and puts itself between Python and the module's own loader."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._asking = False
        self.over = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """As Python asks every finder."""
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # has what Python asks a loader for
        return spec

    def executed(self) -> None:
        """The module is there."""
        self.leave()
        if not self.over:
            self._then()

    def leave(self) -> None:
        """Be asked no more."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader:
    """The module's own loader, which tells when it is done; the module never sees another one."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does it."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does it, and then tell."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.executed()
