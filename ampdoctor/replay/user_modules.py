"""Resolves `package.module:function` or `path/to/file.py:function` to the user's object."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.hooks.interfaces import describe
from ampdoctor.replay.user_code import has_user_frames, trimmed_traceback, user_code
from ampdoctor.replay.user_files import forbid_training_and_writes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

FORM = "'package.module:function' or 'path/to/file.py:function'"
_RUN_NAME = re.compile(
    r"(^|_)(make|build|create|factory)$|(^|_)(make|build|create|get|setup)_(\w+_)?(run|training|trainer)$"
)
_MODEL_NAME = re.compile(r"(^|_)(make|build|create|get|setup)_(\w+_)?(model|net|network|module)$")
_LONGEST_SOURCE = 1_000_000  # bytes of a Python file that is searched for functions
_SHOWN = 8  # maximum number of candidates in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed `module:attribute`, before anything is imported."""

    text: str  # as the user wrote it
    module: str  # dotted name; "" for a file
    file: Path | None  # absolute path; None for a module
    attribute: str  # dotted path in the module ("make_run", "Config.build")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse `text` without importing anything; raises FactoryError if it has neither form or names no file."""
        target, colon, attribute = text.strip().rpartition(":")
        if not colon or re.fullmatch(r"[\\/].*", attribute):  # a colon before a slash belongs to a Windows drive
            target, attribute = text.strip(), ""
        if not target:
            raise FactoryError(f"{text!r} names no module: write {FORM}")
        is_path = target.endswith(".py") or "/" in target or os.sep in target or Path(target).is_dir()
        file = _existing_file(target) if is_path else None
        if not attribute:
            raise FactoryError(f"{text!r} names no function: write {FORM}{_candidates_of(target, file)}")
        if not is_path and not all(part.isidentifier() for part in target.split(".")):
            raise FactoryError(f"{target!r} is not the name of a module: write {FORM}")
        if not all(part.isidentifier() for part in attribute.split(".")):
            raise FactoryError(
                f"{attribute!r} is not the name of a function: write the bare name, as in {FORM}, "
                f"and give arguments with --arg key=JSON"
            )
        return cls(text=text, module="" if is_path else target, file=file, attribute=attribute)

    @property
    def argv0(self) -> str:
        """Returns `sys.argv[0]` for the user's code."""
        return str(self.file) if self.file is not None else self.module

    def search_path(self, app_dir: str | None) -> tuple[str, ...]:
        """Returns folders for `sys.path`: a file's package root, its own (as in `python file.py`), then `app_dir`."""
        folder = folder_of(app_dir)
        first = [] if self.file is None else [str(_package_root(self.file)[0]), str(self.file.parent)]
        return tuple(dict.fromkeys([*first, str(folder)]))


def folder_of(app_dir: str | None) -> Path:
    """Returns the folder in which modules are looked up first; raises FactoryError if it does not exist."""
    folder = Path.cwd() if app_dir is None else Path(app_dir)
    if not folder.is_dir():
        raise FactoryError(f"--app-dir {str(app_dir)!r} is not a folder")
    return folder.resolve()


def _existing_file(target: str) -> Path:
    path = Path(target).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.exists():
        kind = "a folder" if path.is_dir() else "not a Python file"
        raise FactoryError(f"{target!r} is {kind}: name a Python file, as in 'path/to/file.py:function'")
    raise FactoryError(
        f"there is no file {target!r}{_near(path.name, (file.name for file in path.parent.glob('*.py')))}"
    )


def load_object(
    spec: Spec, *, path: Sequence[str], what: str = "the factory", reuse: bool = False, arguments: Sequence[str] = ()
) -> Any:
    """Import the module that `spec` names and return its object; without `reuse` a file is executed anew."""
    importing = f"importing {what} {spec.text!r}"
    entered = user_code(spec.argv0, what=importing, path=path, arguments=arguments)
    with entered, forbid_training_and_writes(importing, (Path.cwd(), *path), imports=True):
        importlib.invalidate_caches()
        try:
            module = (
                _import_file(spec.file, reuse=reuse) if spec.file is not None else importlib.import_module(spec.module)
            )
        except SyntaxError as error:
            raise UserCodeError(syntax_sentence(error), trimmed_traceback(error)) from error
        except ModuleNotFoundError as error:
            _raise_if_spec_is_missing(spec, error)
            raise UserCodeError(
                f"importing {spec.argv0} failed: {describe(error)} (is it installed where ampdoctor runs?)",
                trimmed_traceback(error),
            ) from error
        except ImportError as error:
            if "relative import" not in str(error):
                raise
            raise UserCodeError(
                f"importing {spec.argv0} failed: {describe(error)} (its folder needs an __init__.py, or name it as "
                f"'package.module:function' with --app-dir)",
                trimmed_traceback(error),
            ) from error
        return _attribute(module, spec)


def _import_file(file: Path, *, reuse: bool) -> ModuleType:
    root, name = _package_root(file)
    if "." in name:
        top = name.partition(".")[0]
        loaded = sys.modules.get(top)
        if loaded is not None and not _is_from(loaded, root / top):
            # another package of that name is loaded: rename this one, or its `from .x` would import from the other
            alias = _own_name(top, root)
            _execute(alias, root / top / "__init__.py", package=root / top)
            name = alias + name.removeprefix(top)
        return importlib.import_module(name)  # once, as the package's other modules expect
    if name in sys.stdlib_module_names or not _is_from(sys.modules.get(name), file):
        name = _own_name(name, file)
    loaded = sys.modules.get(name)
    return _execute(name, file) if loaded is None or not reuse else loaded


def _execute(name: str, file: Path, package: Path | None = None) -> ModuleType:
    search = None if package is None else [str(package)]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise FactoryError(f"{str(file)!r} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses, pickle and circular imports look it up during execution
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _package_root(file: Path) -> tuple[Path, str]:
    """Returns the folder above the outermost package of `file`, and the file's dotted name from there."""
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier() and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
        if len(parts) == 1:
            return file.parent, "__init__"
    return folder, ".".join(parts)


def _is_from(module: ModuleType | None, place: Path) -> bool:
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return any(Path(entry).resolve() == place for entry in getattr(module, "__path__", ()))
    return Path(file).resolve() in {place, place / "__init__.py"}


def _own_name(name: str, place: Path) -> str:
    return f"{name}_{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def syntax_sentence(error: SyntaxError) -> str:
    """Says which file and line is not valid Python, and why."""
    line = "" if error.lineno is None else f", line {error.lineno}"
    return f"{error.filename or 'the file'}{line} is not valid Python: {error.msg}"


def _raise_if_spec_is_missing(spec: Spec, error: ModuleNotFoundError) -> None:
    missing = error.name or ""
    if spec.file is not None or has_user_frames(error) or not f"{spec.module}.".startswith(f"{missing}."):
        return
    known = [entry.name for entry in pkgutil.iter_modules(sys.path[:2])]
    raise FactoryError(
        f"there is no module {missing!r} on the import path (--app-dir sets its first folder){_near(missing, known)}"
    ) from error


def _attribute(module: ModuleType, spec: Spec) -> Any:
    value: Any = module
    parts = spec.attribute.split(".")
    for depth, part in enumerate(parts):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            module_name = spec.text.rpartition(":")[0]
            owner = f"{'.'.join(parts[:depth])} of {module_name}" if depth else module_name
            names = [name for name in dir(value) if not name.startswith("_")]
            known = factories_in(Path(getattr(module, "__file__", None) or ""))
            raise FactoryError(f"{owner} has no {part!r}{_near(part, names)}{_list(known)}") from error
    return value


def factories_in(file: Path) -> list[str]:
    """Returns a file's top-level functions that look like factories, the likeliest first; no code is run.

    A factory returns a TrainingRun, or its annotation or name says that it makes a run or a model. A function that
    calls `backward`, `step` or `fit` itself trains, whatever its name.
    """
    likely = [(_likeness(node), node.name) for node in _public_functions(file) if not _trains(node)]
    return [name for likeness, name in sorted(likely) if likeness < _UNLIKE]


def _public_functions(file: Path) -> list[ast.FunctionDef]:
    try:
        if file.stat().st_size > _LONGEST_SOURCE:
            return []
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def sure_factories_in(file: Path) -> list[str]:
    """Returns a file's functions that return a TrainingRun or are annotated so; no code is run."""
    return [node.name for node in _public_functions(file) if _makes_run(node)]


def makes_run(function: Any) -> bool:
    """Does a function make a TrainingRun, by its annotation or by the call that it returns?"""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    node = tree.body[0] if tree.body else None
    return isinstance(node, ast.FunctionDef) and _makes_run(node)


def _makes_run(function: ast.FunctionDef) -> bool:
    annotated = function.returns is not None and "TrainingRun" in ast.unparse(function.returns)
    return annotated or _likeness(function) == 0


_UNLIKE = 4


def _likeness(function: ast.FunctionDef) -> int:
    """Returns 0 for the likeliest factory, up to `_UNLIKE` for none."""
    returned = [node.value for node in _own_nodes(function) if isinstance(node, ast.Return)]
    annotation = ast.unparse(function.returns) if function.returns is not None else ""
    signs = (
        any(isinstance(value, ast.Call) and "TrainingRun" in ast.unparse(value.func) for value in returned),
        re.search(r"\b(TrainingRun|\w*Module|\w*Model)\b", annotation),
        _RUN_NAME.search(function.name),
        _MODEL_NAME.search(function.name),
    )
    return next((place for place, sign in enumerate(signs) if sign), _UNLIKE)


def _trains(function: ast.FunctionDef) -> bool:
    calls = (node.func for node in _own_nodes(function) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr in ("backward", "step", "fit") for called in calls)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            todo += ast.iter_child_nodes(node)


def dotted_factory(target: str) -> str | None:
    """Returns `train.py:make_run` for `train.make_run`, where the user wrote a dot for the colon; else None."""
    dotted, _, function = target.rpartition(".")
    script = Path(f"{dotted.replace('.', '/')}.py")
    return f"{script}:{function}" if dotted and script.is_file() and function in factories_in(script) else None


def _candidates_of(target: str, file: Path | None) -> str:
    if file is None:
        meant = dotted_factory(target)
        return f"; did you mean {meant!r}, with a colon?" if meant else ""
    names = factories_in(file)
    return f"; {target} has {', '.join(names[:_SHOWN])}" if names else f"; {target} has no function that makes a run"


def _list(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; candidates: {', '.join(names[:_SHOWN])}{more}"


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
