"""Finds the stand-ins where the user's own code imports a library that is not installed.

Only an import finds them. Who asks whether the library is there (`importlib.util.find_spec`) hears that it is not:
transformers would go on to functions that only the library has.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ampdoctor.precision.emulation.gpu.asking import imported_by_user
from ampdoctor.precision.emulation.stand_ins.table import STAND_INS

if TYPE_CHECKING:
    from ampdoctor.precision.emulation.gpu.replacing import Replacements
    from ampdoctor.precision.emulation.patches import Patches


class _Module(ModuleType):
    """A module whose names are there, and are noted, once they are asked for."""

    def __init__(self, name: str, note: Callable[[str], None], below: Callable[[str], ModuleType]) -> None:
        super().__init__(name)
        self.__dict__.update(_note=note, _below=below, __path__=[], __all__=list(STAND_INS[name]), __version__="0")

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in STAND_INS:
            return self._below(f"{self.__name__}.{name}")
        if name not in STAND_INS[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        torchs, stand_in = STAND_INS[self.__name__][name]
        library = self.__name__.partition(".")[0]
        if torchs:
            self._note(f"{library} is not installed: {torchs} stands in for {name}.")
        return stand_in


class StandIns:
    """A finder of modules, and its own loader.

    Args:
        active: Is anything emulated?
        note: Called with the note on each name that was taken.
    """

    __slots__ = ("_active", "_modules", "_note")

    def __init__(self, active: Callable[[], bool], note: Callable[[str], None]) -> None:
        self._active = active
        self._note = note
        self._modules: dict[str, ModuleType] = {}

    def declare(self, replacements: Replacements) -> None:
        """Have it asked in vain whether a library is there that is not."""
        replacements.want(importlib.util, "find_spec", self._truth)

    def install(self, patches: Patches) -> None:
        """Be asked last, for what nothing else has found."""
        sys.meta_path.append(self)
        patches.after(self._remove)

    def _remove(self) -> None:
        sys.meta_path.remove(self)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where a stand-in is loaded from, for an import of the user's."""
        parent = name.rpartition(".")[0]
        missing = name in STAND_INS and (not parent or parent in self._modules)
        if not missing or not imported_by_user(sys._getframe(1)):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module, the same at each import: classes stay what they are."""
        return self._module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is what it is."""

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            self._modules[name] = _Module(name, self._note, self._module)
        return self._modules[name]

    def _truth(self, original: Any) -> Any:
        @functools.wraps(original)
        def find_spec(name: str, package: str | None = None) -> Any:
            module = self._modules.get(name)
            if module is not None and sys.modules.get(name) is module:
                return None
            return original(name, package)

        return find_spec
