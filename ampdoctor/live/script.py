"""Runs a script as `python SCRIPT` would: as the `__main__` of this process, with the same tracebacks. No torch."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from types import ModuleType, TracebackType
from typing import Any

from ampdoctor.errors import UsageError
from ampdoctor.package import FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script and its arguments; `named` is the path, or the module's name after `-m`, as it was typed."""

    named: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def script_at(path: str, arguments: tuple[str, ...] = ()) -> Script:
    """Returns the script at a path; raises UsageError where it is no Python source."""
    if not os.path.exists(path):  # noqa: PTH110 - as it was typed
        raise UsageError(f"there is no file {path}")
    if os.path.isdir(path):  # noqa: PTH112
        raise UsageError(f"{path} is a folder: name a script in it")
    if path.endswith(".pyc") or zipfile.is_zipfile(path):
        raise UsageError(f"{path} is no Python source: name a script, or a module by -m")
    return Script(named=path, arguments=arguments)


# -- tracebacks, as they are without a watch --

_OURS = f"{FOLDER}{os.sep}"
_HERE = __file__
_IMPORTING = "<frozen importlib._bootstrap"


def cut_our_frames(error: BaseException) -> None:
    """Removes our frames before the script's last one from the tracebacks of an error, its causes and its group."""
    for one in _all_of(error):
        # the first frames started the script; a script that cannot be compiled has no others
        behind = dropwhile(lambda frame: _file(frame).startswith(_HERE), _frames(one.__traceback__))
        kept = _kept(list(behind))
        for frame, following in pairwise([*kept, None]):
            if frame is not None:  # only the last is None
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


def _kept(frames: list[TracebackType]) -> list[TracebackType]:
    last = max((at for at, frame in enumerate(frames) if not _file(frame).startswith(_OURS)), default=-1)
    kept: list[TracebackType] = []
    for at, frame in enumerate(frames):
        if at > last or not _file(frame).startswith(_OURS):
            kept.append(frame)
            continue
        while kept and _file(kept[-1]).startswith(_IMPORTING):  # Python removes these itself, unless our frames follow
            kept.pop()
    return kept


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


_NO_SUCH_MODULE: type[BaseException] = runpy._Error  # type: ignore[attr-defined]  # noqa: SLF001
"""`runpy` turns it into a sentence and exits."""


class _Replaced:
    """Keeps the former `__main__` alive: without it, functions that still run would lose their globals."""

    main: ModuleType | None = None


def run_script(script: Script) -> BaseException | None:
    """Runs a script in the main thread; returns the error that ended it, without our frames. Raises UsageError."""
    try:
        if script.is_module:
            _run_module(script)
        else:
            _run_file(script)
    except BaseException as error:  # noqa: BLE001 - any error may end the script
        if isinstance(error, SystemExit) and type(error.__context__) is _NO_SUCH_MODULE:
            raise UsageError(f"cannot run {script.named}: {error.__context__}") from None
        cut_our_frames(error)
        return error
    return None


def _run_file(script: Script) -> None:
    main = _new_main()
    sys.argv = [script.named, *script.arguments]
    _search_first(os.path.dirname(os.path.realpath(script.named)))  # noqa: PTH120 - a link's target
    # as in Python's `__file__`: the working directory and the typed path
    path = script.named if os.path.isabs(script.named) else f"{os.getcwd()}{os.sep}{script.named}"  # noqa: PTH109, PTH117
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    with open(path, "rb") as file:  # noqa: PTH123
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - the user's own script


def _run_module(script: Script) -> None:
    _new_main()
    sys.argv = ["-m", *script.arguments]
    _search_first(os.getcwd())  # noqa: PTH109
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
    run(script.named, True)


def _new_main() -> ModuleType:
    """Replaces our `__main__` by a new one, with the names that Python gives it, in their order."""
    _Replaced.main = sys.modules.get("__main__")
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):  # later, it is made when it is asked for
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _search_first(folder: str) -> None:
    """Replaces our folder, the first in `sys.path`, by the script's. `python -P` has neither."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
