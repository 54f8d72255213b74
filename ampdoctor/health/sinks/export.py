"""`Exporter`: hands the lines of one log on to one sink; and `export`, which does so with a whole log at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from time import monotonic  # a script may put another in its place
from typing import IO, Any

from ampdoctor.errors import AmpdoctorError, OutputError, UsageError
from ampdoctor.evidence.log_records import DetailLine, Stamped
from ampdoctor.evidence.log_text import line_of, text_of
from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks import to_csv, to_mlflow, to_openmetrics, to_tensorboard, to_trackio, to_wandb
from ampdoctor.health.sinks.metrics import PREFIX, Alert, Projection, Row, together
from ampdoctor.health.sinks.sink import Kind, RunFacts, Sink, text_of_alert, title_of
from ampdoctor.package import beside

# The sinks that there are, and what `--export KIND=TARGET` means.


KINDS: tuple[Kind, ...] = (
    to_tensorboard.KIND,
    to_wandb.KIND,
    to_mlflow.KIND,
    to_trackio.KIND,
    to_openmetrics.KIND,
    to_csv.KIND,
)
"""A new sink is a file with a `KIND`, and its line here."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
"""How a URL begins; one letter and a colon are a disk of Windows."""


@dataclass(frozen=True, slots=True)
class Export:
    """A sink that was asked for.

    Attributes:
        kind: Of which kind.
        target: Where to; of a path the absolute one.
    """

    kind: Kind
    target: str

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.kind.name}={self.target}"

    @property
    def is_path(self) -> bool:
        """Whether the target is a path."""
        return self.kind.is_path and not self.kind.is_endpoint(self.target) and not is_url(self.target)

    def files(self, run: str = "") -> tuple[str, ...]:
        """Returns the files that it writes for a run of this name, as far as their names are known."""
        return self.kind.writes(self.target, run) if self.is_path else ()

    def begin(self, facts: RunFacts) -> Sink:
        """Makes the sink; its library is imported now."""
        return self.kind.begin(self.target, facts)


def is_url(target: str) -> bool:
    """Is a target the name of a thing elsewhere, as `s3://bucket/logs`, and no path?"""
    return _URL.match(target) is not None


def export_of(text: str) -> Export:
    """Returns the sink that an `--export` names.

    Raises:
        UsageError: There is no such kind, its target makes no sense or is none that can be written, or its library is
            not installed.
    """
    name, equals, target = text.partition("=")
    forms = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        raise UsageError(f"--export {text}: no such sink; there are {forms}")
    if not equals or not target.strip():
        raise UsageError(f"--export {text}: say where to: {kind.name}={kind.target}")
    refusal = _no_url(kind, target) or kind.refuse(target)
    if refusal is not None:
        raise UsageError(f"--export {text}: {refusal}")
    if kind.module is not None and find_spec(kind.module) is None:
        raise UsageError(f"--export {text}: {kind.module} is not installed: pip install 'ampdoctor[{kind.name}]'")
    asked = Export(kind, target)
    if asked.is_path:
        asked = Export(kind, str(Path(target).expanduser().absolute()))
    for file in asked.files():
        if os.path.exists(file) and not os.path.isfile(file):  # noqa: PTH110, PTH113 - these never raise
            what = "a folder" if os.path.isdir(file) else "no regular file"  # noqa: PTH112 - the same
            raise UsageError(f"--export {text}: cannot write {file}: it is {what}")
    return asked


def _no_url(kind: Kind, target: str) -> str | None:
    if not kind.is_path or not is_url(target) or (kind.takes_urls and not target.startswith("file:")):
        return None
    return f"it is a URL, and {kind.name} is written to a path of this machine"


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


# Sinks that a user has made: an object of ours, or a writer of scalars as TensorBoard's.


class ScalarWriter:
    """Writes to any object with `add_scalar(tag, value, step)`; `add_text` and `flush` are used where it has them.

    It is the user's, who closes it.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:  # noqa: ARG002 - not all take it
        """As in `Sink`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{PREFIX}/{name}", value, step)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - the same
        """As in `Sink`."""
        if hasattr(self._writer, "add_text"):
            self._writer.add_text(f"{PREFIX}/alerts/{title_of(finding)}", text_of_alert(finding, step), step)

    def flush(self) -> None:
        """As in `Sink`."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()

    def close(self) -> None:
        """As in `Sink`, but for the writer's own end."""
        self.flush()


def sink_of(given: Any) -> Sink:
    """Returns a user's object as a sink.

    Raises:
        UsageError: It is none.
    """
    if isinstance(given, Sink):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return ScalarWriter(given)
    raise UsageError(
        f"export: a {type(given).__name__} is neither text like tensorboard=DIR, nor has it log, alert, flush and "
        "close, nor add_scalar"
    )


# A sink in a process of its own, which lives by a pipe: lines of the log go in, as text, and nothing comes back.
#
# A library that asks a server imports for seconds, starts threads, patches what it finds and waits at exit as long as
# it likes: none of that belongs into a training. What is done here with lines that come is what `export` does with a
# log.


ORPHAN_S = 60.0
"""How long a sink may finish what it has begun after the training's process has gone without a goodbye."""
_NAP_S = 0.2
_LINES = 20_000
"""Lines that wait in the sink's process, while a library is imported or a server asked; more wait in the pipe, and then
in the training's process."""
_POLITE = 10
"""Added to its niceness: the cores are the training's."""


class Apart:
    """The near end: what a listener of a log gives to a sink that lives elsewhere.

    A method may wait as long as the sink does: it is for a thread that nobody waits for. A forked process of the
    training may hold the pipe open; `close` says the end nevertheless.

    Args:
        what: The sink; its environment is that of this process when its first line comes.
    """

    def __init__(self, what: Export) -> None:
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None

    def hear(self, whole: Stamped) -> None:
        """Hands a line on.

        Raises:
            OutputError: The sink has ended, for the reason that it gave.
        """
        line = whole.line
        if isinstance(line, DetailLine):  # no sink shows histograms, and they are most of a line
            tensors = tuple(replace(tensor, histogram=None) for tensor in line.tensors)
            whole = replace(whole, line=replace(line, tensors=tensors))
        self._send(text_of(whole).encode("ascii"))

    def close(self) -> None:
        """Has the sink finish, and waits until it has.

        Raises:
            OutputError: It has failed.
        """
        process = self._process
        if process is not None:
            self._send(b"\n")
            if process.wait() != 0:
                raise OutputError(self._reason(process))
            self._forget(process)

    def abandon(self) -> None:
        """Ends its process where it still runs; what it has not sent is in the log."""
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
    """The far end: reads lines until an empty one or the end, and hands them on to the sink.

    Where that fails, the reason is all that it writes, and it ends with 1; whatever a library prints goes nowhere.
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
    except BaseException as error:  # noqa: BLE001 - it is said, and this process is nobody else's
        with suppress(OSError):
            os.write(answer, sentence_of(error).encode()[:4000])
        os._exit(1)
    os._exit(0)  # what a library would still do at exit has no bound


def _serve(what: Export, lines: Queue[bytes], parent: int) -> None:
    exporter = Exporter(what.begin, often=what.kind.often)
    while True:
        try:
            text = lines.get(timeout=_NAP_S)
        except Empty:
            exporter.idle()
            if os.getppid() != parent:  # gone without a goodbye, and a child of its holds the pipe
                break
            continue
        if not text.strip():
            break
        whole = line_of(text)
        if whole is not None:
            exporter.hear(whole)
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
    """Start the process, in a session of its own: Ctrl-C is for the training.

    Raises:
        OutputError: There is no interpreter to start.
    """
    command = beside("ampdoctor.health.sinks.export", str(what), str(os.getpid()))
    if not command:
        raise OutputError("there is no Python that could be started beside this one")
    return subprocess.Popen(  # noqa: S603 - our own, with what the user has named as arguments
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # noqa: S101 for the type checker
    return pipe
