"""Where a training's log goes while it runs: what was asked for, as listeners of the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ampdoctor.health.sinks.apart import Apart
from ampdoctor.health.sinks.exporting import Exporter
from ampdoctor.health.sinks.given import sink_of
from ampdoctor.health.sinks.sink import Sink
from ampdoctor.health.sinks.table import Export, export_of

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
