"""TensorBoard's event files, whichever framework has written them: the files of one folder are one run's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ampdoctor.checkpoints.event_files import is_event_file, scalars_in
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import known_fields
from ampdoctor.evidence.log_records import RunLine, Stamped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place
from ampdoctor.health.reading.rows import Row, SkipCount, lines_of, milliseconds


def _claims(place: Place) -> Sequence[Sequence[str]]:
    names = [name for name in place.names if is_event_file(name)]
    return [names] if names else ()


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    with ExitStack() as stack:
        files = (stack.enter_context(RegularFile(folder / name, name)) for name in names)
        skips = SkipCount()
        rows = (
            Row(event.step, skips.of_a_step(fields), milliseconds(event.wall_time))
            for event in scalars_in(files, noticed.skipped)
            if (fields := known_fields(event.values))
        )
        yield from lines_of(rows, RunLine(name=folder.name), noticed.order)


TENSORBOARD = LogKind(format="tensorboard", claims=_claims, read=_read)
