"""The folder in which a watch keeps its log, where nobody has named one."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ampdoctor.live.log.facts import grouped
from ampdoctor.live.log.facts import launched as launched_as

FOLDERS = "ampdoctor-health"
"""Where they lie, from the working directory."""


def usual_folder(script: str, *, is_module: bool) -> str:
    """Returns `ampdoctor-health/<time>-<name>`, made where that is possible, so that no other run has it.

    The processes that one launcher has started share theirs: its time is that at which the launcher began.

    Args:
        script: A path, or a module's name.
        is_module: It is a module's name.
    """
    last = script.rpartition(".")[2] if is_module else Path(script).absolute().stem
    name = re.sub(r"[^\w.-]+", "_", last) or "script"
    several = os.environ.get("WORLD_SIZE", "1") != "1" or launched_as().world > 1 or _is_spawned()
    launched = _launched() if several else None
    when = time.time() if launched is None else launched
    folder = Path(FOLDERS) / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(when))}-{name}"
    count = 2
    free = folder
    while launched is None and not _made(free):
        free, count = folder.with_name(f"{folder.name}-{count}"), count + 1
    return str(free)


def give_back(folder: str) -> None:
    """Removes a folder that `usual_folder` has made and nobody has written to."""
    path = Path(folder)
    if path.parent.name == FOLDERS:
        with suppress(OSError):  # as it is not empty
            path.rmdir()
            path.parent.rmdir()


def _is_spawned() -> bool:
    """Whether this is one of the processes of `torch.multiprocessing.spawn`, which has joined the others by now."""
    place = grouped()
    if place is None or place.world == 1:
        return False
    import multiprocessing  # here: `--help` needs none of it

    return multiprocessing.parent_process() is not None


def _made(folder: Path) -> bool:
    """Whether the folder is nobody else's; where none can be made, that is said when something is to be written."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return not folder.exists()
    except OSError:
        return True
    return True


def _launched() -> float | None:
    """When the parent process began, in seconds since 1970, as Linux tells; None elsewhere."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        after_name = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return int(booted.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
    return None
