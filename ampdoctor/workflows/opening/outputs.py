"""Files that a command writes: refused before the work begins where they cannot be written, and written whole."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ampdoctor.errors import OutputError, UsageError


def refuse_unwritable(file: str) -> None:
    """Say now that a file cannot be written, not after minutes of work.

    Raises:
        UsageError: It is a folder, its folder does not exist, or permission is denied.
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
    if there is not None and not os.access(file, os.W_OK):  # replacing it needs the folder's leave alone
        raise UsageError(f"cannot write {file}: permission denied")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {file}: its folder does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {file}: permission denied")


def refuse_part(file: str, folder: str) -> None:
    """Refuse to write into a folder that is read what by its name would be a part of it: the next run would read it.

    Args:
        file: What is to be written, there already or not.
        folder: What is read; where it is no folder, nothing is refused.

    Raises:
        UsageError: It would be a part.
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
        raise UsageError(f"cannot write {file}: by its name it is a part of {folder}, which is read; name another file")


def write_whole(file: str, data: bytes) -> None:
    """Write a file whole or not at all; a pipe or device is opened as it is named and written directly.

    Raises:
        OutputError: It cannot be written; what was there before is still there.
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
    """Write a file that is not there yet, readable to whom `like` is, or else to whom the umask lets it be.

    Nobody else may have a say in where the bytes go: another process, be its number the same (in containers each is
    the first), or whoever has laid a link there.
    """
    try:
        mode = stat.S_IMODE(like.stat().st_mode)
    except FileNotFoundError:
        mode = None

    def alone(name: str, flags: int) -> int:  # "x" is O_EXCL; who may read is the same at every moment
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666 if mode is None else 0o600)

    with open(file, "xb", opener=alone) as stream:
        stream.write(data)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(stream.fileno(), mode)
