"""The user's code that `--model` names: a function, a class, or a file in which the bundle's class is looked for.

A script that trains when it is imported is not imported: its imports, functions, classes and simple constants are.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.package import working_folder
from ampdoctor.replay.guarding.building import building
from ampdoctor.replay.user_code import user_code
from ampdoctor.replay.user_modules import Spec, load_object

_LONGEST = 5_000_000
_PURE = frozenset(
    {
        "dict",
        "list",
        "tuple",
        "set",
        "frozenset",
        "int",
        "float",
        "str",
        "bool",
        "len",
        "min",
        "max",
        "range",
        "sum",
        "abs",
    }
)
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


class NamedCode:
    """What `--model` names, loaded; nothing of a bundle's decides what is imported.

    Args:
        spec: As the user wrote it.
        app_dir: First folder of the import path; None: the working folder.

    Attributes:
        path: Folders that are first on `sys.path` while the code runs.
        argv0: `sys.argv[0]` while it runs.
        named: The object that the user named; None where it is a file alone.
        trimmed: The file does more than define things, and its definitions alone were taken.
        notes: What differs from an import, in sentences.

    Raises:
        FactoryError: There is no such file or object.
        UserCodeError: It raised.
    """

    def __init__(self, spec: str, app_dir: str | None = None) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self.named: Any = None
        alone = spec.strip().endswith(".py")
        parsed = Spec.parse(f"{spec.strip()}:__name__" if alone else spec)
        self.path = parsed.search_path(app_dir)
        self.argv0 = parsed.argv0
        tree = _parsed(parsed.file) if parsed.file is not None else None
        self.trimmed = tree is not None and not all(map(_is_quiet, tree.body))
        if parsed.file is not None and tree is not None and self.trimmed:
            self._module = self._trimmed(parsed.file, tree)
            self.named = None if alone else self._attribute(parsed.attribute)
        else:
            found = load_object(parsed, path=self.path, what="the model", reuse=True)
            name = found if alone else getattr(found, "__module__", "")
            self._module = sys.modules[name] if name in sys.modules else ModuleType("none")
            if not alone:
                self.named = found
                self._module = _module_of(parsed) or self._module

    def give(self, values: Mapping[str, Any]) -> list[str]:
        """Give a trimmed file the global values that it lacks; returns their names. What it has stays as it is."""
        if not self.trimmed:
            return []
        lacking = [name for name in values if not hasattr(builtins, name) and name not in vars(self._module)]
        vars(self._module).update((name, values[name]) for name in lacking)
        return lacking

    def find(self, module: str, qualname: str) -> Any:
        """Returns the class of this name in the code, or in a module that it has imported from its own folders."""
        for place in (self._module, sys.modules.get(module)):
            found = None if place is None else _walked(place, qualname)
            if isinstance(found, type) and found.__qualname__ == qualname and self._is_users(found):
                return found
        return None

    def _is_users(self, cls: type) -> bool:
        """Is a class defined in the user's own files? What these import from elsewhere is not the bundle's to name."""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if not isinstance(file, str) or "site-packages" in Path(file).parts:
            return False
        resolved = Path(file).resolve()
        return any(resolved.is_relative_to(folder) for folder in self.path)

    def _trimmed(self, file: Path, tree: ast.Module) -> ModuleType:
        """The file without what trains in it."""
        module = ModuleType(f"{file.stem}_definitions_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        importing = f"importing the definitions of {file.name}"
        entered = user_code(self.argv0, what=importing, path=self.path)
        with entered, building(importing, (working_folder(), *self.path), imports=True):
            for node in _definitions(tree):
                piece = ast.Module(body=[node], type_ignores=[])
                try:
                    exec(compile(piece, str(file), "exec"), vars(module))  # noqa: S102 - a file that the user names
                except NameError:
                    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.If):  # it takes what the training makes
                        raise
        self.notes.append(
            f"{file.name} does more than define things when it is imported: its imports, functions, classes and simple "
            f"constants alone were taken"
        )
        return module

    def _attribute(self, name: str) -> Any:
        found = _walked(self._module, name)
        if found is None:
            raise FactoryError(f"--model {self.spec}: the definitions of {self.argv0} have no {name!r}")
        return found


def _module_of(spec: Spec) -> ModuleType | None:
    if spec.file is None:
        return sys.modules.get(spec.module)
    found = (m for m in list(sys.modules.values()) if isinstance(getattr(m, "__file__", None), str))
    return next((m for m in found if m.__file__ == str(spec.file)), None)


def _walked(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = vars(value).get(part) if isinstance(value, ModuleType | type) else None
        if value is None:
            return None
    return value


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes(), str(file)) if file.stat().st_size <= _LONGEST else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the import says why


def _is_quiet(node: ast.stmt) -> bool:
    """Does a statement only define things?"""
    if isinstance(node, _DEFINITIONS):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return node.value is None or _is_simple(node.value)
    if isinstance(node, ast.If):
        return _is_guard(node) or (_is_simple(node.test) and all(map(_is_quiet, [*node.body, *node.orelse])))
    if isinstance(node, ast.Try):
        handlers = [one for handler in node.handlers for one in handler.body]
        return all(map(_is_quiet, [*node.body, *node.orelse, *node.finalbody, *handlers]))
    return False


def _is_guard(node: ast.If) -> bool:
    return "__name__" in ast.unparse(node.test) and not node.orelse


def _is_simple(value: ast.expr) -> bool:
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
    return all(isinstance(call.func, ast.Name) and call.func.id in _PURE for call in calls)


def _definitions(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if _is_quiet(node) and not (isinstance(node, ast.If) and _is_guard(node)):
            yield node
