"""`Exporter`: hands the lines of one log on to one sink; and `export`, which does so with a whole log at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic  # a script may put another in its place

from ampdoctor.errors import AmpdoctorError, OutputError, UsageError
from ampdoctor.evidence.log_records import Stamped
from ampdoctor.health.sinks.metrics import together
from ampdoctor.health.sinks.projection import Alert, Projection, Row
from ampdoctor.health.sinks.sink import RunFacts, Sink
from ampdoctor.health.sinks.table import Export

EVERY_S = 1.0
"""Between two flushes while lines come, and between two rows to a sink that asks a server."""


class Exporter:
    """Hands lines on to a sink, which is made when there is something to give to it.

    Args:
        begin: Makes the sink.
        often: Each row is given to it; otherwise one a second, in which one that is not finite, or the worst, stands
            for those since.
    """

    def __init__(self, begin: Callable[[RunFacts], Sink], *, often: bool) -> None:
        self._begin, self._often = begin, often
        self._sink: Sink | None = None
        self._projection = Projection()
        self._waiting: Row | None = None
        self._given = self._flushed = float("-inf")
        self._fresh = False

    def hear(self, whole: Stamped) -> None:
        """Takes a line."""
        for said in self._projection.of(whole):
            self._take(said)

    def idle(self) -> None:
        """Takes note that no line waits."""
        now = monotonic()
        if self._waiting is not None and now - self._given >= EVERY_S:
            self._give()
        if self._fresh and now - self._flushed >= EVERY_S:
            for row in self._projection.rest():
                self._take(row)
            self._flush()

    def close(self) -> None:
        """Gives what waits, and closes the sink."""
        for row in self._projection.rest():
            self._take(row)
        self._give()
        if self._sink is not None:
            self._sink.close()

    def _take(self, said: Row | Alert) -> None:
        now = monotonic()
        if isinstance(said, Alert):
            self._give()
            self._there().alert(said.finding, said.step, time_ms=said.time_ms)
        elif self._often:
            self._there().log(said.values, said.step, time_ms=said.time_ms)
        else:
            held = {} if self._waiting is None else self._waiting.values
            together(held, said.values)
            self._waiting = Row(step=said.step, time_ms=said.time_ms, values=held)
            if now - self._given >= EVERY_S:
                self._give()
        self._fresh = True
        if now - self._flushed >= EVERY_S:
            self._flush()

    def _give(self) -> None:
        row, self._waiting = self._waiting, None
        if row is not None:
            self._there().log(row.values, row.step, time_ms=row.time_ms)
            self._given = monotonic()

    def _flush(self) -> None:
        self._there().flush()
        self._flushed, self._fresh = monotonic(), False

    def _there(self) -> Sink:
        if self._sink is None:
            self._sink = self._begin(self._projection.facts or RunFacts(name=""))
        return self._sink


def export(lines: Iterable[Stamped], exports: Sequence[Export]) -> None:
    """Hands a whole log to sinks, each step of it.

    Args:
        lines: Of one run.
        exports: Where to; each is closed at the end, also where another fails.

    Raises:
        UsageError: One of them is for a training that runs.
        OutputError: One of them has failed; the others have all of it.
    """
    for one in exports:
        if one.kind.is_endpoint(one.target):
            raise UsageError(f"--export {one}: an endpoint is asked while a training runs; name a file for a log")
    open_ones = [(one, Exporter(one.begin, often=True)) for one in exports]
    failed: list[str] = []

    def do(work: Callable[[Exporter], None]) -> None:
        for pair in list(open_ones):
            try:
                work(pair[1])
            except Exception as error:  # noqa: BLE001 - libraries raise what they like
                open_ones.remove(pair)
                failed.append(f"the export {pair[0]} has failed: {sentence_of(error)}")

    for whole in lines:
        do(lambda exporter, whole=whole: exporter.hear(whole))  # type: ignore[misc]
    do(Exporter.close)
    if failed:
        raise OutputError("; ".join(failed))


def sentence_of(error: BaseException) -> str:
    """Returns what an error says in one line; with its name where it is none of ours."""
    lines = str(error).strip().splitlines()
    said = lines[0].strip() if lines else ""
    if isinstance(error, AmpdoctorError) and said:
        return said
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
