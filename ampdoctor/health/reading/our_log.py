"""The log that ampdoctor writes while a training runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ampdoctor.checkpoints.formats.log_files import lines_in
from ampdoctor.checkpoints.formats.run_log_files import MAX_BYTES, is_run_log
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.run_log.files import logs_in
from ampdoctor.evidence.run_log.lines import Stamped
from ampdoctor.evidence.run_log.quick import quick_line_of
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place


def _claims(place: Place) -> Sequence[str]:
    names = place.names if place.named else [name for files in logs_in(place.names).values() for name in files]
    return [name for name in names if _begins_like_ours(place.folder, name)]


def _begins_like_ours(folder: Path, name: str) -> bool:
    try:
        with RegularFile(folder / name, name) as file:
            return is_run_log(file)
    except CheckpointError:
        return False


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    for name in names:
        with RegularFile(folder / name, name) as file:
            damaged, cut_off = 0, False
            for text in lines_in(file, MAX_BYTES):
                try:
                    whole = quick_line_of(text)
                except ValueError:
                    damaged, cut_off = damaged + 1, True
                    continue
                cut_off = False
                if whole is not None:
                    yield whole
            if cut_off and file.read(file.size - 1, 1) != b"\n":  # where the process was killed, or still writes
                damaged -= 1
            if damaged:
                noticed.damaged[name] += damaged


AMPDOCTOR = LogKind(format="ampdoctor", claims=_claims, read=_read)
