"""Takes old details out of a finished file of the log; everything else in it stays, byte for byte."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ampdoctor.evidence.run_log.text import kind_of

_STEP = re.compile(rb',"step":([0-9]+)')
_FIRED = re.compile(rb',"reason":"')
_HEAD = 512
"""Bytes of a line in which its step and the reason stand: stamp and figures come before the tensors."""


def thinned(path: Path, *, also_fired: bool) -> int:
    """Takes the details of every other step out of a file, and returns how many lines that were.

    The file is replaced as a whole. Its last step's details stay, so that in the end none go.

    Args:
        path: A file that nobody writes.
        also_fired: Take out also those of steps at which something had fired; else only what was sampled.

    Raises:
        OSError: The file cannot be read or replaced; it is as it was.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    steps = {step for line in lines if (step := _step(line, also_fired=also_fired)) is not None}
    out = set(sorted(steps)[-2::-2])
    kept = [line for line in lines if _step(line, also_fired=also_fired) not in out]
    if len(kept) < len(lines):
        replace_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def details_in(path: Path) -> int:
    """Returns the bytes of a file that are details.

    Raises:
        OSError: The file cannot be read.
    """
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True) if kind_of(line) == "detail")


def _step(line: bytes, *, also_fired: bool) -> int | None:
    """The step of a detail that may be taken out."""
    if kind_of(line) != "detail":
        return None
    head = line[:_HEAD].partition(b',"tensors":')[0]
    step = _STEP.search(head)
    return None if step is None or (_FIRED.search(head) and not also_fired) else int(step[1])


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all.

    Raises:
        OSError: It cannot be written; its earlier contents are still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)  # of a process that had this number, or a link that somebody has put there
        with beside.open("xb") as file:  # "x" follows no link
            file.write(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
