"""Runs a script as the `__main__` of this process.

What Python does for `python script.py` is done by hand, as its C code does it; what it does for `-m`, a folder or an
archive is done by Python's own `runpy`, so that even the frames of a traceback are the same.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
from types import CodeType, ModuleType
from typing import Any

from ampdoctor.errors import UsageError
from ampdoctor.live.script.frames import cut_our_frames
from ampdoctor.live.script.target import Script

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
