"""Runs a script as `python SCRIPT` would: as the `__main__` of this process, with the same tracebacks. No torch."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import CodeType, ModuleType, TracebackType
from typing import Any, Literal

from ampdoctor.errors import UsageError
from ampdoctor.package import FOLDER

# What was named to be run: a file, a folder or an archive with a `__main__.py`, or a module.


Kind = Literal["file", "container", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script and its arguments.

    Attributes:
        named: As it was typed: a path, or a module's name.
        arguments: What follows it.
        kind: `file`: Python's source, or compiled. `container`: a folder or a zip archive whose `__main__` is meant.
            `module`: what `-m` names.
    """

    named: str
    arguments: tuple[str, ...] = ()
    kind: Kind = "file"

    @property
    def path(self) -> str:
        """The absolute path as Python has it in `__file__`: what was typed behind the working directory."""
        return self.named if os.path.isabs(self.named) else f"{os.getcwd()}{os.sep}{self.named}"  # noqa: PTH109, PTH117


def script_at(path: str, arguments: tuple[str, ...] = ()) -> Script:
    """Returns the script at a path.

    Raises:
        UsageError: There is none, or Python cannot run what is there.
    """
    if not os.path.exists(path):  # noqa: PTH110 - as it was typed
        raise UsageError(f"there is no file {path}")
    contained = pkgutil.get_importer(path) is not None
    if contained and os.path.isdir(path) and not _has_main(path):  # noqa: PTH112
        raise UsageError(f"{path} is a folder without a __main__.py: name a script in it")
    if not contained and not os.path.isfile(path) and os.path.isdir(path):  # noqa: PTH112, PTH113
        raise UsageError(f"{path} is a folder: name a script in it")
    return Script(named=path, arguments=arguments, kind="container" if contained else "file")


def _has_main(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, f"__main__{end}")) for end in (".py", ".pyc"))  # noqa: PTH113, PTH118


# Tracebacks as they would be if nobody had been watching.


_OURS = f"{FOLDER}{os.sep}"
_HERE = __file__
_IMPORTING = "<frozen importlib._bootstrap"


def cut_our_frames(error: BaseException) -> None:
    """Cuts the frames of ampdoctor out of the tracebacks of an error, of what it came of and of what it holds.

    Those before the script's first frame go, and those between two frames of others: a hook through which the script
    calls itself. What lies behind the script's last frame stays: there a script has called ampdoctor.
    """
    for one in _all_of(error):
        kept = _kept(list(_frames(_behind_the_start(one.__traceback__))))
        for frame, following in pairwise([*kept, None]):
            if frame is not None:  # as all are but the end
                frame.tb_next = following
        one.__traceback__ = kept[0] if kept else None


def _all_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()  # errors may refer to one another in a circle
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _behind_the_start(traceback: TracebackType | None) -> TracebackType | None:
    """Without the frames that started the script, which are all there are of a script that cannot be compiled."""
    while traceback is not None and _file(traceback).startswith(_HERE):
        traceback = traceback.tb_next
    return traceback


def _kept(frames: list[TracebackType]) -> list[TracebackType]:
    last = max((at for at, frame in enumerate(frames) if not _file(frame).startswith(_OURS)), default=-1)
    kept: list[TracebackType] = []
    for at, frame in enumerate(frames):
        if at > last or not _file(frame).startswith(_OURS):
            kept.append(frame)
            continue
        while kept and _file(kept[-1]).startswith(_IMPORTING):  # Python itself leaves these out, unless we lie between
            kept.pop()
    return kept


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


_NO_SUCH_MODULE: type[BaseException] = runpy._Error  # type: ignore[attr-defined]  # noqa: SLF001
"""What `runpy` answers by ending the process with a sentence."""
_EAGER_ANNOTATIONS = sys.version_info < (3, 14)
"""Whether `__main__` has its `__annotations__` from the beginning."""


class _Replaced:
    """The module that was `__main__`: who forgets it takes away the globals of functions that still run."""

    main: ModuleType | None = None


def run_script(script: Script) -> BaseException | None:
    """Runs a script from its first line to its last, in the process's main thread.

    `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` are the script's from then on: its threads, its exit
    handlers and what it pickles outlive its last line.

    Returns:
        What it has ended with, without frames of ours; None where it has reached its end.

    Raises:
        UsageError: There is no such module, or none that can be run.
    """
    try:
        if script.kind == "file":
            _run_file(script)
        else:
            _run_by_runpy(script)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the script has ended with it
        if isinstance(error, SystemExit) and type(error.__context__) is _NO_SUCH_MODULE:
            raise UsageError(f"cannot run {script.named}: {error.__context__}") from None
        cut_our_frames(error)
        return error
    return None


def _run_file(script: Script) -> None:
    main = _new_main()
    sys.argv = [script.named, *script.arguments]
    _search_first(os.path.dirname(os.path.realpath(script.named)))  # noqa: PTH120 - of a link: where it leads
    path = script.path
    compiled = path.endswith(".pyc")
    loaders = importlib.machinery
    main.__loader__ = (loaders.SourcelessFileLoader if compiled else loaders.SourceFileLoader)("__main__", path)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    exec(_code(main.__loader__, path, compiled=compiled), main.__dict__)  # noqa: S102 - the user's own script


def _code(loader: Any, path: str, *, compiled: bool) -> CodeType:
    if compiled:
        code: CodeType = loader.get_code("__main__")
        return code
    with open(path, "rb") as file:  # noqa: PTH123
        return compile(file.read(), path, "exec", dont_inherit=True)


def _run_by_runpy(script: Script) -> None:
    _new_main()
    by_name = script.kind == "module"
    sys.argv = ["-m" if by_name else script.named, *script.arguments]
    _search_first(os.getcwd() if by_name else script.path, always=not by_name)  # noqa: PTH109
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
    run(script.named if by_name else "__main__", by_name)


def _new_main() -> ModuleType:
    """Puts a new `__main__` in place of ours, with the names that Python gives it, in their order."""
    _Replaced.main = sys.modules.get("__main__")
    main = ModuleType("__main__")
    if _EAGER_ANNOTATIONS:
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _search_first(folder: str, *, always: bool = False) -> None:
    """Puts the script's folder where ours was: first. With `python -P` there is none of ours, and none of a file's."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if always or not sys.flags.safe_path:
        sys.path.insert(0, folder)


# Waits for an import of the script's own: what it sets in the environment before that has to come before.


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
