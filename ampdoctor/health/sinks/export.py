"""`Exporter` gives the lines of one log to one sink; `export` does so with a whole log at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from time import monotonic  # a script may put another in its place
from typing import IO, Any

from ampdoctor.errors import AmpdoctorError, OutputError, UsageError
from ampdoctor.evidence.log_records import DetailLine, LogRecord
from ampdoctor.evidence.log_text import line_of, text_of
from ampdoctor.health.sinks import to_csv, to_openmetrics, to_trackers
from ampdoctor.health.sinks.metrics import Alert, Projection, Row, together
from ampdoctor.health.sinks.sink import RunFacts, Sink, SinkType
from ampdoctor.package import beside

# -- the sinks, and the meaning of `--export KIND=TARGET` --

KINDS: tuple[SinkType, ...] = (
    to_trackers.TENSORBOARD,
    to_trackers.WANDB,
    to_trackers.MLFLOW,
    to_trackers.TRACKIO,
    to_openmetrics.KIND,
    to_csv.KIND,
)
"""A new sink is a class with a `SinkType`, and its line here."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # how a URL begins; one letter and a colon are a Windows drive


@dataclass(frozen=True, slots=True)
class Export:
    """A requested sink."""

    kind: SinkType
    target: str  # an absolute path, where it is a path

    def __str__(self) -> str:
        """Return the text as typed."""
        return f"{self.kind.name}={self.target}"

    def files(self, run: str = "") -> tuple[str, ...]:
        """Returns the files that it writes for a run of this name, as far as their names are known."""
        return self.kind.writes(self.target, run)

    def begin(self, facts: RunFacts) -> Sink:
        """Makes the sink, and imports its library."""
        return self.kind.begin(self.target, facts)


def export_of(text: str) -> Export:
    """Returns the sink of an `--export`; raises UsageError for an invalid kind or target, or a missing library."""
    name, equals, target = text.partition("=")
    forms = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        raise UsageError(f"--export {text}: no such sink; there are {forms}")
    if not equals or not target.strip():
        raise UsageError(f"--export {text}: say where to: {kind.name}={kind.target}")
    if kind.is_path and (_URL.match(target) or target.startswith(":")):
        raise UsageError(f"--export {text}: {kind.name} is written to a path of this machine")
    if kind.module is not None and find_spec(kind.module) is None:
        raise UsageError(f"--export {text}: {kind.module} is not installed: pip install 'ampdoctor[{kind.name}]'")
    asked = Export(kind, str(Path(target).expanduser().absolute()) if kind.is_path else target)
    for file in asked.files():
        if os.path.exists(file) and not os.path.isfile(file):  # noqa: PTH110, PTH113 - these never raise
            what = "a folder" if os.path.isdir(file) else "no regular file"  # noqa: PTH112 - the same
            raise UsageError(f"--export {text}: cannot write {file}: it is {what}")
    return asked


EVERY_S = 1.0  # seconds between two flushes while lines come, and between two rows for a sink that sends to a server


class Exporter:
    """Gives lines to a sink, which `begin` makes when there is something to give.

    `often` gives it each row; otherwise it gets one a second, with the worst or a non-finite value since the last.
    """

    def __init__(self, begin: Callable[[RunFacts], Sink], *, often: bool) -> None:
        self._begin, self._often = begin, often
        self._sink: Sink | None = None
        self._projection = Projection()
        self._waiting: Row | None = None
        self._given = self._flushed = float("-inf")
        self._fresh = False

    def add(self, whole: LogRecord) -> None:
        """Takes a line."""
        for said in self._projection.of(whole):
            self._take(said)

    def idle(self) -> None:
        """Called while no line waits: gives and flushes what is due."""
        now = monotonic()
        if self._waiting is not None and now - self._given >= EVERY_S:
            self._give()
        if self._fresh and now - self._flushed >= EVERY_S:
            for row in self._projection.rest():
                self._take(row)
            self._flush()

    def close(self) -> None:
        """Gives the waiting row, and closes the sink."""
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


def export(lines: Iterable[LogRecord], exports: Sequence[Export]) -> None:
    """Gives one run's log to sinks, and closes each; if one fails (OutputError), the others are still complete."""
    open_ones = [(one, Exporter(one.begin, often=True)) for one in exports]
    failed: list[str] = []

    def do(work: Callable[[Exporter], None]) -> None:
        for pair in list(open_ones):
            try:
                work(pair[1])
            except Exception as error:  # noqa: BLE001 - libraries raise all kinds of errors
                open_ones.remove(pair)
                failed.append(f"the export {pair[0]} has failed: {sentence_of(error)}")

    for whole in lines:
        do(lambda exporter, whole=whole: exporter.add(whole))  # type: ignore[misc]
    do(Exporter.close)
    if failed:
        raise OutputError("; ".join(failed))


def sentence_of(error: BaseException) -> str:
    """Returns an error's message in one line, with its type where it is not ours."""
    lines = str(error).strip().splitlines()
    said = lines[0].strip() if lines else ""
    if isinstance(error, AmpdoctorError) and said:
        return said
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def sink_of(given: Any) -> Sink:
    """Returns a user's object as a sink; raises UsageError where it is none."""
    if isinstance(given, Sink):
        return given
    raise UsageError(
        f"export: a {type(given).__name__} is neither text like tensorboard=DIR, nor has it log, alert, flush and close"
    )


# -- a sink in a process of its own: lines of the log go through a pipe, as text, and nothing comes back --
#
# A library that talks to a server imports for seconds, starts threads, patches other modules and may wait at exit
# without a limit. None of that may happen inside a training.

ORPHAN_S = 60.0  # seconds that a sink may take to finish after the training's process has died
_NAP_S = 0.2
_LINES = 20_000  # most lines that wait in the sink's process; more wait in the pipe, then in the training
_POLITE = 10  # added to its niceness: the training needs the cores


class Apart:
    """The training's end of the pipe.

    A method may block as long as the sink does, so it belongs in a thread of its own. A forked process of
    the training may hold the pipe open; `close` ends the sink anyway. The sink has the environment of this process at
    its first line.
    """

    def __init__(self, what: Export) -> None:
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, whole: LogRecord) -> None:
        """Sends a line; raises OutputError with the sink's reason where the sink has ended."""
        line = whole.line
        if isinstance(line, DetailLine):  # no sink shows histograms, which are most of a line
            tensors = tuple(replace(tensor, histogram=None) for tensor in line.tensors)
            whole = replace(whole, line=replace(line, tensors=tensors))
        self._send(text_of(whole).encode("ascii"))

    def close(self) -> None:
        """Waits until the sink has finished; raises OutputError where it has failed."""
        process = self._process
        if process is not None:
            self._send(b"\n")
            if process.wait() != 0:
                raise OutputError(self._reason(process))
            self._forget(process)

    def abandon(self) -> None:
        """Kills its process where it still runs; the log has what was not sent."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._forget(process)

    def _send(self, text: bytes) -> None:
        process = self._process = self._process or _started(self._what)
        try:
            _pipe(process.stdin).write(text)
            _pipe(process.stdin).flush()
        except BrokenPipeError:
            process.wait()
            raise OutputError(self._reason(process)) from None

    def _reason(self, process: subprocess.Popen[bytes]) -> str:
        said = _pipe(process.stdout).read().decode("utf-8", "replace").strip()
        self._forget(process)
        return said or f"its process has ended with code {process.returncode}"

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                _pipe(pipe).close()


def main() -> None:
    """Runs the sink's process: reads lines until an empty one or the end, and gives them to the sink.

    Where that fails, it writes only the reason, and exits with 1; other output of libraries is discarded.
    """
    os.nice(_POLITE)
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    lines: Queue[bytes] = Queue(_LINES)
    parent = int(sys.argv[2])
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    try:
        _serve(export_of(sys.argv[1]), lines, parent)
    except BaseException as error:  # noqa: BLE001 - it is reported, and the process belongs to us
        with suppress(OSError):
            os.write(answer, sentence_of(error).encode()[:4000])
        os._exit(1)
    os._exit(0)  # a library could take any time at exit


def _serve(what: Export, lines: Queue[bytes], parent: int) -> None:
    exporter = Exporter(what.begin, often=what.kind.often)
    while True:
        try:
            text = lines.get(timeout=_NAP_S)
        except Empty:
            exporter.idle()
            if os.getppid() != parent:  # the training died, and a child of it holds the pipe
                break
            continue
        if not text.strip():
            break
        whole = line_of(text)
        if whole is not None:
            exporter.add(whole)
    exporter.close()


def _read(lines: Queue[bytes]) -> None:
    for text in sys.stdin.buffer:
        lines.put(text)
    lines.put(b"")


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_S)
    os._exit(1)


def _started(what: Export) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, since Ctrl-C is for the training; may raise OutputError."""
    command = beside("ampdoctor.health.sinks.export", str(what), str(os.getpid()))
    if not command:
        raise OutputError("there is no Python that could be started beside this one")
    return subprocess.Popen(  # noqa: S603 - our own module, with the user's target as argument
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # noqa: S101 for the type checker
    return pipe
