"""A method of a framework's class that something else stands in for, also if the framework is imported only later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampdoctor.hooks.torch_internals import replaced

Original = Callable[..., Any]


@contextmanager
def standing_in(module: str, cls: str, method: str, stand_in: Callable[[Original], Original]) -> Iterator[None]:
    """While inside, a method of a class is another one; nothing is imported for it.

    Args:
        module: The module that defines the class.
        cls: The class.
        method: The method.
        stand_in: Takes the method and returns what stands in for it.
    """
    changed: list[tuple[type, Original]] = []

    def change(imported: ModuleType) -> None:
        found = getattr(imported, cls)
        original = vars(found)[method]
        setattr(found, method, stand_in(original))
        changed.append((found, original))

    finder = _Finder(module, change)
    if module in sys.modules:
        change(sys.modules[module])
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        finder.leave()
        for found, original in changed:
            setattr(found, method, original)


class _Finder(MetaPathFinder):
    """Finds what the others find; one module is changed as soon as it has been run."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._change = change
        self._asks = False
        self._following = ExitStack()

    def leave(self) -> None:
        """A module that was found inside may be run afterwards, and is then its own."""
        self._following.close()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks."""
        if fullname != self._module or self._asks:  # others may ask the others as well
            return None
        self._asks = True
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        self._following.enter_context(replaced(loader, "exec_module", run_and_change))
