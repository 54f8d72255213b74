"""A script's file as `python FILE` would run it: as `__main__`, with modules of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ampdoctor.replay.guarding.changes import is_users_file
from ampdoctor.replay.scripts.seam import Seam
from ampdoctor.replay.scripts.source.rewriting import SEAM, Edits, rewritten

_MAIN = "__main__"


class MainModule:
    """One run of a script, which finds none of the modules that an earlier run or the caller has loaded of its folder.

    Args:
        file: The script.
        edits: By file, what is rewritten in it.
        seam: What the rewritten parts ask.
        package: The package that it is run in, as by `python -m`; None for a file of its own.
        otherwise: What is rewritten in the user's other files; None for nothing.
    """

    def __init__(
        self,
        file: Path,
        edits: Mapping[str, Edits],
        seam: Seam,
        package: str | None,
        otherwise: Edits | None = None,
    ) -> None:
        self._file, self._seam = file, seam
        self._edits, self._otherwise = dict(edits), otherwise
        self._module = ModuleType(_MAIN)
        loader = SourceFileLoader(_MAIN, str(file))
        vars(self._module).update(
            {"__file__": str(file), "__cached__": None, "__loader__": loader, "__package__": package}
        )
        self._own: dict[str, ModuleType] = {_MAIN: self._module}
        self._others: dict[str, ModuleType] = {}
        self._inside = False

    def run(self) -> None:
        """Run the script to its end, or to where it is left.

        Raises:
            SyntaxError: It is no Python.
        """
        namespace = vars(self._module)
        namespace[SEAM] = self._seam
        edits = self._edits.get(str(self._file), self._otherwise or Edits())
        code = rewritten(self._file.read_bytes(), str(self._file), edits)
        with self.in_place():
            exec(code, namespace)  # noqa: S102 the user's own script, as they asked

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `sys.modules` holds this run's modules of the user's; afterwards it is as before."""
        if self._inside:
            yield
            return
        before = sys.modules.copy()
        unknown = [(name, module) for name, module in before.items() if self._others.get(name) is not module]
        hidden = [name for name, module in unknown if self._hides(name, module)]
        finder = _Finder(self._edits, self._otherwise, self._seam)
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self._own)
        sys.meta_path.insert(0, finder)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            sys.meta_path.remove(finder)
            for name, module in sys.modules.copy().items():  # a finaliser may import meanwhile
                if before.get(name) is not module and (name == _MAIN or _is_users(module)):
                    self._own[name] = sys.modules.pop(name)
            sys.modules.update({name: before[name] for name in (*hidden, *self._own) if name in before})

    def _hides(self, name: str, module: Any) -> bool:
        """Would the script load this module anew, or another one by its name?"""
        if name == _MAIN:
            return False
        if not _is_users(module):
            self._others[name] = module  # thousands, and each step comes here
            return False
        folder = str(self._file.parent) + os.sep
        top = folder + name.partition(".")[0]
        return module.__file__.startswith(folder) or Path(f"{top}.py").is_file() or Path(top, "__init__.py").is_file()


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users_file(file)


class _Finder(MetaPathFinder):
    """Finds the user's files that are rewritten where the others find them."""

    def __init__(self, edits: Mapping[str, Edits], otherwise: Edits | None, seam: Seam) -> None:
        self._edits, self._otherwise, self._seam = edits, otherwise, seam

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                file = str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else ""
                of_source = isinstance(spec.loader, SourceFileLoader) and is_users_file(file)
                edits = self._edits.get(file, self._otherwise if of_source else None)
                if edits is None:
                    return None  # the others find it again
                spec.loader = _Loader(name, file, edits, self._seam)
                return spec
        return None


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, edits: Edits, seam: Seam) -> None:
        super().__init__(name, file)
        self._file, self._edits, self._seam = file, edits, seam

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the base's signature
        return rewritten(self.get_data(self._file), self._file, self._edits)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[SEAM] = self._seam
        super().exec_module(module)
