"""The files that a command writes, and the folder of a watch's log."""

from __future__ import annotations

import glob
import math
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from ampdoctor.errors import OutputError, UsageError
from ampdoctor.evidence.paths import is_of_log, logs_in, rank_and_number
from ampdoctor.live.log.facts import grouped
from ampdoctor.live.log.facts import launched as launched_as


def refuse_unwritable(file: str) -> None:
    """Raises UsageError, before minutes of work, for a file that cannot be written."""
    path = Path(os.path.realpath(file))
    try:
        there = os.stat(file).st_mode  # noqa: PTH116 - as named: a pipe's real path leads nowhere
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
    if there is not None and stat.S_ISDIR(there):
        raise UsageError(f"cannot write {file}: it is a folder")
    is_file = there is None or stat.S_ISREG(there)  # not a pipe or a device
    if is_file and not path.parent.is_dir():
        raise UsageError(f"cannot write {file}: its folder does not exist")
    needed = [*([] if there is None else [Path(file)]), *([path.parent] if is_file else [])]
    if not all(os.access(one, os.W_OK) for one in needed):  # replacing a file takes only the folder's permission
        raise UsageError(f"cannot write {file}: permission denied")


def refuse_part(file: str, folder: str) -> None:
    """Raises UsageError for a file that the next run would read as a part of `folder`, if that is a folder."""
    try:
        place = Path(os.path.realpath(file))
        inside = Path(folder).is_dir() and place.is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):  # a name that no file can have
        return
    if not inside:
        return
    from ampdoctor.checkpoints.folder import may_be_read  # here, because it imports torch
    from ampdoctor.health.reading.event_files import is_event_file
    from ampdoctor.health.reading.log_files import is_log

    if may_be_read(place.name) or is_log(place.name) or is_event_file(place.name):
        raise UsageError(f"cannot write {file}: the next run would read it as a part of {folder}; name another file")


def refuse_of_log(file: str, folder: str | os.PathLike[str]) -> None:
    """Raises UsageError for a file that would overwrite or lie below a part of ampdoctor's log; neither need exist."""
    try:
        place, log = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    except (OSError, ValueError):  # a name that no file can have
        return
    inside = place.relative_to(log).parts[:1] if place.is_relative_to(log) else ()
    if log.is_relative_to(place) or any(map(is_of_log, inside)):
        raise UsageError(f"cannot write {file}: the run's log is kept there; name another file")


def write_whole(file: str, data: bytes) -> None:
    """Write a file completely or not at all, but a pipe or device directly; raises OutputError where that fails."""
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
    """Create a file, readable to the same users as `like`, or as the umask says; nobody else decides where bytes go."""
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


# -- the default folder of a watch's log --

FOLDERS = "ampdoctor-health"
"""Their parent, below the working directory."""


def usual_folder(script: str, *, is_module: bool) -> str:
    """Returns `ampdoctor-health/<time>-<name>`, one for each run; processes of one launcher share it."""
    name = _named_after(script.rpartition(".")[2] if is_module else Path(script).absolute().stem)
    several = os.environ.get("WORLD_SIZE", "1") != "1" or launched_as().world > 1 or _is_spawned()
    launched = _launched() if several else None
    when = time.time() if launched is None else launched
    folder = Path(FOLDERS) / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(when))}-{name}"
    count = 2
    free = folder
    while launched is None and not _made(free):
        free, count = folder.with_name(f"{folder.name}-{count}"), count + 1
    return str(free)


def _named_after(script: str) -> str:
    return re.sub(r"[^\w.-]+", "_", script) or "script"


def is_run_log(target: str) -> bool:
    """Whether a target is the folder of a run's log or one of its files; a bundle's folder does not count."""
    path = Path(target)
    try:
        if path.is_dir():
            return bool(logs_in(os.listdir(path))) and not (path / "manifest.json").is_file()  # noqa: PTH208
        return rank_and_number(path.name) is not None and path.is_file()
    except OSError:
        return False


def last_log_of(script: str) -> str | None:
    """Returns the folder of the last watched run of a script file as it is now; None where there is none."""
    file = Path(script)
    try:
        changed = file.stat().st_mtime if file.suffix == ".py" else math.inf
        logs = sorted(Path(FOLDERS).glob(f"*-{glob.escape(_named_after(file.stem))}"))
        return next(
            (str(one) for one in reversed(logs) if one.stat().st_mtime >= changed and is_run_log(str(one))), None
        )
    except OSError:
        return None


def give_back(folder: str) -> None:
    """Remove a folder that `usual_folder` has made and nobody has written to."""
    path = Path(folder)
    if path.parent.name == FOLDERS:
        with suppress(OSError):  # it is not empty
            path.rmdir()
            path.parent.rmdir()


def _is_spawned() -> bool:
    """Whether this is one of the processes of `torch.multiprocessing.spawn`, which has joined the others by now."""
    place = grouped()
    if place is None or place.world == 1:
        return False
    import multiprocessing  # here: `--help` does not need it

    return multiprocessing.parent_process() is not None


def _made(folder: Path) -> bool:
    """Whether the folder is free for this run; a folder that cannot be made is reported when something is written."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return not folder.exists()
    except OSError:
        return True
    return True


def _launched() -> float | None:
    """Returns the parent process's start in seconds since 1970, on Linux; None elsewhere."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        after_name = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return int(booted.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
    return None
