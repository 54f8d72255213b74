"""Guards the user's files: reports changes, stops a factory that trains or writes, and closes the network."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.package import FOLDER

_OURS = f"{FOLDER}{os.sep}"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
"""Environment variables for cache folders."""
CHANGES = "the run's own code"
"""The start of the sentence about such a change."""
_Changes = Iterable[tuple[Path | None, str]]
"""Pairs of a changed path (None if unknown) and a predicate that describes the change."""


@contextmanager
def audit_file_writes(
    folders: Iterable[str | Path], tell: Callable[[str, Path], None], starts: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call `tell` before a file below the folders is opened for writing, removed, moved or linked to.

    Seen are Python's own functions, and torch's and safetensors' writers; not other libraries in C (HDF5, SQLite), nor
    child processes. Ignored are hidden, temporary and cached files, empty locks and folders, appends, and our own
    threads. `tell` gets a predicate ("removes model.pt at train.py:41") and the path; `starts` is called before another
    program is started. An exception from either stops the operation before it happens.
    """
    from ampdoctor.hooks.torch_internals import replaced  # brings torch

    roots = [Path(folder).resolve() for folder in folders]
    apart = list(_apart())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if starts is not None and event in _STARTS:
            starts()
        changes = _EVENTS.get(event)
        for place, did in () if changes is None else changes(*arguments):
            if place is not None and _lies_below(place, roots, apart) and _is_work(place) and not _is_ours():
                tell(f"{did}{users_line()}", place)

    with ExitStack() as stack:
        for module, name in _unaudited():
            stack.enter_context(replaced(module, name, _audited(getattr(module, name))))
        stack.enter_context(_audited_by(_FILES, audit))
        yield


_Listener = Callable[[str, tuple[Any, ...]], None]
_FILES, _NETWORK = "files", "network"
_LISTENERS: dict[str, _Listener] = {}
"""The listeners of the audit hook; there is one hook per process, because Python cannot remove it."""


@functools.cache
def _install_hook() -> None:
    # a default argument, because the hook outlives the module's names at the end of the process
    def hook(event: str, arguments: tuple[Any, ...], listeners: dict[str, _Listener] = _LISTENERS) -> None:
        for listener in list(listeners.values()):
            listener(event, arguments)

    sys.addaudithook(hook)


@contextmanager
def _audited_by(kind: str, listener: _Listener) -> Iterator[None]:
    """Inside, audit events go to the listener, and to no earlier one of this kind."""
    _install_hook()
    before = _LISTENERS.get(kind)
    _LISTENERS[kind] = listener
    try:
        yield
    finally:
        _LISTENERS.pop(kind)
        if before is not None:
            _LISTENERS[kind] = before


# -- events --


def _opened(file: Any, _mode: Any, flags: Any) -> _Changes:
    if flags & os.O_TRUNC or (flags & _WRITES and not flags & os.O_APPEND):
        place = _contents(file)
        if place is not None and not place.is_dir():  # `tempfile` opens a folder
            yield place, f"opens {_name(file)} for writing"


def _removed(file: Any, folder: int | None = None) -> _Changes:
    if _is_whole(folder) and os.path.lexists(file):
        yield _entry(file), f"removes {_name(file)}"


def _moved(source: Any, target: Any, *folders: int | None) -> _Changes:
    if _is_whole(*folders) and os.path.lexists(source):
        for place in (_entry(source), _entry(target)):
            yield place, f"moves {_name(source)} to {_name(target)}"


def _linked(source: Any, target: Any, *folders: int | None) -> _Changes:
    if _is_whole(*folders) and not os.path.lexists(target):
        yield _entry(target), f"links {_name(target)} to {_name(source)}"


_EVENTS: Mapping[str, Callable[..., _Changes]] = {
    "open": _opened,
    "os.remove": _removed,
    "shutil.rmtree": _removed,
    "os.rename": _moved,
    "os.link": _linked,
    "os.symlink": _linked,
    "os.truncate": lambda file, _length: [(_contents(file), f"truncates {_name(file)}")],
}

_STARTS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.startfile", "subprocess.Popen"})


def _is_whole(*folders: int | None) -> bool:
    """Are the paths not relative to an open folder? `shutil.rmtree` uses such paths after its own event."""
    return all(folder in (None, -1) for folder in folders)


def _name(file: Any) -> str:
    return os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else ""


def _contents(file: Any) -> Path | None:
    return Path(_name(file)).resolve() if _name(file) else None


def _entry(file: Any) -> Path | None:
    path = Path(_name(file))
    return path.parent.resolve() / path.name if _name(file) else None


# -- which paths count --


def _apart() -> Iterator[Path]:
    """Yields temporary and cache folders; call it early, as the search for a temporary folder writes files."""
    with suppress(FileNotFoundError):  # no usable folder
        yield Path(tempfile.gettempdir()).resolve()
    for folder in (sys.pycache_prefix, *map(os.environ.get, _CACHES)):
        if folder:
            yield Path(folder).resolve()


def _lies_below(place: Path, roots: Iterable[Path], apart: Iterable[Path]) -> bool:
    for root in roots:
        if place.is_relative_to(root):
            below = place.relative_to(root).parts
            named = any(part.startswith(".") or part in ("__pycache__", "site-packages") for part in below)
            kept = (place.is_relative_to(folder) and not root.is_relative_to(folder) for folder in apart)
            if not named and not any(kept):
                return True
    return False


def _is_work(place: Path) -> bool:
    if place.is_symlink():
        return True
    if place.is_dir():
        return any(files for _, _, files in os.walk(place))
    if place.suffix == ".lock" and (not place.exists() or place.stat().st_size == 0):
        return False
    return place.is_file() or not place.exists()


# -- functions without an event of their own --


def _unaudited() -> Iterator[tuple[Any, str]]:
    """Yields functions that open a file in another language; safetensors' are in each module that imported them."""
    import safetensors.numpy
    import safetensors.torch
    import torch
    from torch.jit._script import RecursiveScriptModule

    yield torch._C, "PyTorchFileWriter"  # noqa: SLF001 torch.save opens a path with it
    yield RecursiveScriptModule, "save"
    for module in (safetensors, safetensors.numpy, safetensors.torch):
        yield module, "serialize_file"


def _audited(original: Any) -> Any:
    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, str | os.PathLike):
                sys.audit("open", argument, "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(*args, **kwargs)

    return opening


def changes_note(did: str, instead: str) -> str:
    """Returns the sentence about a change that a step makes: `did` as in `audit_file_writes`, and the advice."""
    return f"{CHANGES} {did}, in replayed steps too: {instead}"


def users_line() -> str:
    """Returns the user's innermost line for the end of a sentence: " at train.py:41"; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 the one way up that makes no traceback
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users_file(name):
            try:
                return f" at {Path(name).resolve().relative_to(Path.cwd()).as_posix()}:{frame.f_lineno}"
            except (ValueError, OSError):
                return f" at {Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_ours() -> bool:
    """Is only ampdoctor's and Python's code on the stack?"""
    ours, frame = 0, sys._getframe(2).f_back  # noqa: SLF001 the one way up that makes no traceback; two are the hook's
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            ours += 1
        elif "site-packages" in name or not name.startswith(("<", sys.base_prefix + os.sep)):
            return False
        frame = frame.f_back
    return ours > 0


def is_users_file(name: str) -> bool:
    """Is this file the user's own, not Python's, an installed package's or ours?"""
    return not (name.startswith(("<", _OURS, sys.base_prefix + os.sep)) or "site-packages" in name)


# -- stopping user code that trains or writes while a run is built --

_FACTORY = (
    "a factory builds a fresh model with its batches, loss and optimizer and returns them as a TrainingRun; the "
    "training itself, and what it writes, stay out of it"
)
_SCRIPT = 'what trains at its top level goes below `if __name__ == "__main__":`'


class Stopped(StepHalted):
    """Ends user code; a BaseException, so that their `except Exception` does not catch it."""


@contextmanager
def refusing(stopped: list[str]) -> Iterator[None]:
    """Raises FactoryError with the first sentence in `stopped` after the body, even if that caught `Stopped`."""
    try:
        yield
    except (Exception, SystemExit, Stopped):
        if not stopped:
            raise
    if stopped:
        raise FactoryError(stopped[0])


@contextmanager
def forbid_training_and_writes(
    what: str, folders: Iterable[str | Path], *, imports: bool = False, may_step: bool = False
) -> Iterator[None]:
    """Stop the body at an optimizer's first step (not at a rate of 0), or before it changes files below the folders.

    The stop ends in a FactoryError about `what` even if the body catches it, in any thread. `imports` says that a file
    is imported; `may_step` allows all steps.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stopped: list[str] = []
    thread = threading.get_ident()

    def stop(did: str, _place: object = None) -> None:
        advice = f"{_SCRIPT}; {_FACTORY}" if imports else _FACTORY
        stopped.append(f"{what} {did}, and was stopped there: {advice}")
        raise Stopped if threading.get_ident() == thread else SystemExit  # ends a thread without a traceback

    def on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            stop(f"steps an optimizer{users_line()}")

    with refusing(stopped), ExitStack() as stack:
        if not may_step:
            stack.callback(register_optimizer_step_pre_hook(on_step).remove)
        stack.enter_context(audit_file_writes(folders, stop))
        yield


# -- closing network and program starts while a library builds what an untrusted file describes --

_LEAVES = frozenset(
    {
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"),
        *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.startfile", "os.system", "pty.spawn"),
        "subprocess.Popen",
    }
)
"""Python's audit events for leaving the process: name lookup, connection, start of a program."""


class _ClosedError(ConnectionError):
    """The refusal of a connection; libraries treat it as being offline."""


@contextmanager
def network_closed() -> Iterator[list[str]]:
    """Refuse every connection and program start while the body runs, by a `ConnectionError` as of an offline machine.

    Yields a list of the requests, as ends of a sentence ("the network (huggingface.co)").
    """
    asked: list[str] = []

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _LEAVES:
            asked.append(_said(event, arguments))
            raise _ClosedError(f"{asked[-1]} is closed while a bundle's model is made")

    with _audited_by(_NETWORK, refuse):
        yield asked


def _said(event: str, arguments: tuple[Any, ...]) -> str:
    if not event.startswith("socket."):
        return "the starting of another program"
    address = arguments[1] if event in ("socket.connect", "socket.sendto", "socket.sendmsg") else arguments[:1]
    host = address[0] if isinstance(address, tuple) and address else address
    host = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return f"the network ({host[:80]})"
