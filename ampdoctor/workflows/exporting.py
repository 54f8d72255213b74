"""Where a training's log goes while it runs: what was asked for, as listeners of the log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdoctor.checkpoints.storage.files import is_folder
from ampdoctor.errors import UsageError
from ampdoctor.evidence.to_write import place_of
from ampdoctor.health.reading.opening import FoundLog
from ampdoctor.health.reading.our_log import AMPDOCTOR
from ampdoctor.health.sinks.apart import Apart
from ampdoctor.health.sinks.exporting import Exporter
from ampdoctor.health.sinks.given import sink_of
from ampdoctor.health.sinks.sink import Sink
from ampdoctor.health.sinks.table import Export, export_of
from ampdoctor.workflows.opening.outputs import refuse_of_log

if TYPE_CHECKING:
    from ampdoctor.live.log.run_log import RunLog


def exports_of(given: Iterable[Any]) -> tuple[Export | Sink, ...]:
    """Returns what was asked for.

    Args:
        given: Texts like `tensorboard=DIR`, and objects that are sinks.

    Raises:
        UsageError: One of them is neither, or its library is not installed.
    """
    if isinstance(given, str):
        given = (given,)
    return tuple(export_of(one) if isinstance(one, str) else sink_of(one) for one in given)


def refuse_log(exports: Iterable[Export], log: FoundLog) -> None:
    """Refuses exports that would write over the log that is read, or beside it what would be read the next time.

    Raises:
        UsageError: One of them would.
    """
    read = {place_of(log.folder / name) for name in log.names}
    for one in exports:
        for file in one.files(log.folder.absolute().name):
            if place_of(file) in read:
                raise UsageError(f"--export {one}: cannot write {file}: it is what is to be read")
            if log.kind is AMPDOCTOR:
                refuse_of_log(file, log.folder)
            elif is_folder(Path(log.typed)) and place_of(Path(file).parent) == place_of(log.folder):
                raise UsageError(f"--export {one}: the next run would read {file} as a log as well; name another place")


def export_while_it_runs(log: RunLog, exports: Iterable[Export | Sink]) -> None:
    """Has sinks listen to a log: those with a library in processes of their own, a user's object here, on a thread."""
    for one in exports:
        if isinstance(one, Export):
            far = Apart(one)
            log.listen(far.hear, name=f"the export {one}", end=far.close, dropped=far.abandon)
        else:
            near = _near(one)
            log.listen(near.hear, name=f"the export {type(one).__name__}", idle=near.idle, end=near.close)


def _near(sink: Sink) -> Exporter:
    return Exporter(lambda _: sink, often=True)
