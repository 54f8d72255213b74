"""Files that a command writes: refused before the work begins if they cannot be written, and written as a whole."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ampdoctor.errors import OutputError, UsageError
from ampdoctor.evidence.run_log.files import is_of_log


def refuse_unwritable(file: str) -> None:
    """Refuse a file that cannot be written, before minutes of work.

    Raises:
        UsageError: The file is a folder, its folder does not exist, or permission is denied.
    """
    path = Path(os.path.realpath(file))
    try:
        there = os.stat(file).st_mode  # noqa: PTH116 - as named: a pipe's real path leads nowhere
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
    if there is not None and stat.S_ISDIR(there):
        raise UsageError(f"cannot write {file}: it is a folder")
    if there is not None and not stat.S_ISREG(there):
        if not os.access(file, os.W_OK):
            raise UsageError(f"cannot write {file}: permission denied")
        return
    if there is not None and not os.access(file, os.W_OK):  # replacing it takes only the folder's permission
        raise UsageError(f"cannot write {file}: permission denied")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {file}: its folder does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {file}: permission denied")


def refuse_part(file: str, folder: str) -> None:
    """Refuse to write a file that the next run would read as a part of the folder that is read.

    Args:
        file: The file to write; it need not exist.
        folder: The folder that is read; if it is not a folder, nothing is refused.

    Raises:
        UsageError: The file lies in the folder, under the name of a part.
    """
    try:
        place = Path(os.path.realpath(file))
        inside = Path(folder).is_dir() and place.is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):  # a name that no file can have
        return
    if not inside:
        return
    from ampdoctor.checkpoints.layouts.folder import may_be_read  # here, for it brings torch

    if may_be_read(place.name):
        raise UsageError(f"cannot write {file}: the next run would read it as a part of {folder}; name another file")


def refuse_of_log(file: str, folder: str | os.PathLike[str]) -> None:
    """Refuse to write where a part of a log of ours is, or will be.

    Args:
        file: The file to write.
        folder: The log's; it need not exist yet.

    Raises:
        UsageError: The file has the name of a part, or the folder's own, or would lie below such a name.
    """
    try:
        place, log = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    except (OSError, ValueError):  # a name that no file can have
        return
    inside = place.relative_to(log).parts[:1] if place.is_relative_to(log) else ()
    if log.is_relative_to(place) or any(map(is_of_log, inside)):
        raise UsageError(f"cannot write {file}: the run's log is kept there; name another file")


def write_whole(file: str, data: bytes) -> None:
    """Write a file completely or not at all; a pipe or device is opened under its given name and written directly.

    Raises:
        OutputError: The file cannot be written; its earlier contents are still there.
    """
    try:
        if Path(file).exists() and not Path(file).is_file():  # /dev/fd/63 names a pipe that has no real path
            Path(file).write_bytes(data)
            return
        path = Path(os.path.realpath(file))
        beside = path.with_name(f".ampdoctor-{secrets.token_hex(16)}.tmp")  # short: the file's own name may be long
        try:
            _create(beside, data, like=path)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def _create(file: Path, data: bytes, *, like: Path) -> None:
    """Create a file, readable to the same users as `like`, or as the umask says if `like` does not exist.

    Nobody else may decide where the bytes go: neither another process, even one with the same number (in containers
    each is number 1), nor whoever has put a link there.
    """
    try:
        mode = stat.S_IMODE(like.stat().st_mode)
    except FileNotFoundError:
        mode = None

    def alone(name: str, flags: int) -> int:  # "x" is O_EXCL; at no moment can more users read it
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666 if mode is None else 0o600)

    with open(file, "xb", opener=alone) as stream:
        stream.write(data)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(stream.fileno(), mode)
