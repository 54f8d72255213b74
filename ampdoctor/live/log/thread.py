"""The threads of a log's writer and its listeners, the queue between the training and them, and the log's files."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from time import (
    monotonic,  # bound here, because a script may patch it
    time_ns,  # bound here, because a script may patch it
)
from typing import Any, TypeAlias

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.log_records import DetailLine, Line, LogRecord, LostLine, RunLine, Stamp, StepLine
from ampdoctor.evidence.log_text import kind_of, text_of
from ampdoctor.evidence.paths import log_name, logs_in, rank_and_number, run_name

# -- listeners: each has a thread of its own, and slows down neither training nor log --

OnLine = Callable[[LogRecord], None]
Say = Callable[[str], None]
_Waiting = tuple[int, LogRecord]


class Listening(Thread):
    """Calls `on_line` with each line in order, `idle` where none waits, `end` last; `dropped` instead, if it fails."""

    def __init__(
        self,
        on_line: OnLine,
        *,
        name: str,
        idle: Callable[[], None],
        end: Callable[[], None],
        dropped: Callable[[], None],
        limits: Limits,
        say: Say,
    ) -> None:
        super().__init__(name="ampdoctor-listener", daemon=True)
        self.failed: str | None = None  # the sentence with which it was dropped
        self.dropped = 0  # lines that it did not get
        self._on_line, self._idle, self._end, self._dropped, self._what = on_line, idle, end, dropped, name
        self._limits, self._say = limits, say
        self._calls: Calls = SimpleQueue()
        self._count = itertools.count()
        self._lines: deque[_Waiting] = deque(maxlen=limits.lines)
        self._details: deque[_Waiting] = deque(maxlen=limits.listener_details)
        self._names: LogRecord | None = None  # a header that was dropped, but that later lines refer to

    def put(self, whole: LogRecord) -> None:
        """Queues a line; never waits."""
        if self.failed is not None:
            return
        waiting = self._details if isinstance(whole.line, DetailLine) else self._lines
        if len(waiting) == waiting.maxlen:
            self.dropped += 1
            with suppress(IndexError):
                oldest = waiting[0][1]
                self._names = oldest if isinstance(oldest.line, RunLine) else self._names
        waiting.append((next(self._count), whole))

    def run(self) -> None:
        """Runs on the thread."""
        try:
            going = True
            while going and self.failed is None:
                call = _nap(self._calls)
                going = call is not None
                while self.failed is None and (whole := self._take()) is not None:
                    self._on_line(whole)
                if isinstance(call, SimpleQueue):
                    call.put(True)
                elif going:
                    self._idle()
            if self.failed is None:
                self._end()
        except Exception as error:  # noqa: BLE001 - the training goes on after any error
            named = "" if isinstance(error, AmpdoctorError) else type(error).__name__
            self.give_up(": ".join(part for part in (named, str(error)) if part))

    def give_up(self, reason: str) -> None:
        """Drops the listener, with one sentence."""
        if self.failed is not None:
            return
        self.failed = f"{self._what} ends here: {reason}; the training goes on without it"
        self._lines.clear()
        self._details.clear()
        with suppress(Exception):
            self._dropped()
        with suppress(Exception):
            self._say(self.failed)

    def wait(self, timeout: float) -> bool:
        """Waits until the listener has got all queued lines; False after the timeout."""
        reply: SimpleQueue[bool] = SimpleQueue()
        self._calls.put(reply)
        deadline = monotonic() + timeout
        while self._is_elsewhere() and (left := deadline - monotonic()) > 0:
            with suppress(Empty):
                return reply.get(timeout=min(left, NAP_S))
        return False

    def let_go(self) -> None:
        """Ends the thread after all queued lines; `join` waits for that."""
        self._calls.put(None)

    def left(self, deadline: float, seconds: float) -> None:
        """Waits for the end of the thread until `deadline`, a value of `monotonic()`; `seconds` is for the sentence."""
        if not self._is_elsewhere():
            return
        self.join(max(deadline - monotonic(), 0.0))
        if self.is_alive():
            self.give_up(f"it has not finished within {seconds:g} s")

    def _is_elsewhere(self) -> bool:
        return self.is_alive() and threading.current_thread() is not self

    def _take(self) -> LogRecord | None:
        """Returns the oldest waiting line, or None."""
        names, self._names = self._names, None
        if names is not None:
            return names
        heads = [(waiting[0][0], waiting) for waiting in (self._lines, self._details) if waiting]
        return min(heads, key=lambda head: head[0])[1].popleft()[1] if heads else None


# -- the queue between training and writer --
#
# Nothing here takes a lock that the writer could hold: a training queues a line in a microsecond, whatever the writer
# does, also in a signal handler. A deque's ends are thread-safe.

Make: TypeAlias = Callable[[], Line | None]


class QueuedLine:
    """A line, or a function that makes one, with its time; `origin` is its stamp without the time."""

    __slots__ = ("origin", "time_ns", "what")

    def __init__(self, origin: Stamp, time_ns: int, what: Line | Make) -> None:
        self.origin = origin
        self.time_ns = time_ns
        self.what = what

    def stamped(self, line: Line) -> LogRecord:
        """Returns the whole line."""
        return LogRecord(stamp=replace(self.origin, time_ms=self.time_ns // 1_000_000), line=line)


class LogQueue:
    """Holds the waiting lines, within its bounds; when it is full, the oldest of a kind are dropped."""

    def __init__(self, origin: Stamp, header: RunLine, limits: Limits) -> None:
        self.origin = origin  # replaced after a rollback
        self.facts: dict[str, Any] = {}  # for `run.json`; replaced at each change
        self.last: deque[QueuedLine] = deque(maxlen=limits.last)  # the last steps
        self.lost = LostLine()  # counts lines that will not be in the log
        self._header = header
        self._names = {name: index for index, name in enumerate(header.tensors)}
        self._naming = RLock()
        self._lines: deque[QueuedLine] = deque(maxlen=limits.lines)
        self._details: deque[QueuedLine] = deque(maxlen=limits.details)

    def put(self, handed: QueuedLine) -> None:
        """Queues a line."""
        what = handed.what
        if isinstance(what, DetailLine) or callable(what):
            if len(self._details) == self._details.maxlen:
                self.lost = replace(self.lost, details=self.lost.details + 1)
            self._details.append(handed)
            return
        if isinstance(what, StepLine):
            self.last.append(handed)
        if len(self._lines) == self._lines.maxlen:
            self._count(self._lines[0].what)
        self._lines.append(handed)

    def now(self, line: Line) -> LogRecord:
        """Returns the line with the present time."""
        return QueuedLine(self.origin, time_ns(), line).stamped(line)

    def become(self, *, run_id: str, rank: int, world_size: int) -> None:
        """Sets run and rank of all waiting and later lines, before the writer begins to take any."""
        of = {"run_id": run_id, "rank": rank, "world_size": world_size}
        self.origin = replace(self.origin, **of)  # type: ignore[arg-type]
        self.facts = {**self.facts, "run_id": run_id} if "run_id" in self.facts else self.facts
        for one in (*self._details, *self._lines, *self.last):
            one.origin = replace(one.origin, **of)  # type: ignore[arg-type]

    def take(self) -> QueuedLine | None:
        """Takes the next line or None, details first, so that the end of a run is also the end of its log."""
        for waiting in (self._details, self._lines):
            try:
                return waiting.popleft()
            except IndexError:
                continue
        return None

    def clear(self) -> None:
        """Drops the waiting lines."""
        self._details.clear()
        self._lines.clear()

    @property
    def waiting(self) -> int:
        """The number of waiting lines."""
        return len(self._details) + len(self._lines)

    def index_of(self, name: str) -> int:
        """Returns the index of a tensor's name; a new name is added to the table."""
        found = self._names.get(name)
        if found is None:
            with self._naming:
                found = self._names.setdefault(name, len(self._names))
        return found

    @property
    def header(self) -> RunLine:
        """The header of a file, with the table of names; the same object as long as nothing was added."""
        if len(self._header.tensors) != len(self._names):
            with self._naming:
                self._header = replace(self._header, tensors=tuple(self._names))
        return self._header

    def head(self, **changes: Any) -> None:
        """Changes fields of the header."""
        with self._naming:
            self._header = replace(self._header, **changes, tensors=tuple(self._names))

    def unmade(self) -> None:
        """Counts a line that could not be made into text."""
        self.lost = replace(self.lost, unmade=self.lost.unmade + 1)

    def unread(self, steps: int) -> None:
        """Counts steps whose numbers never arrived."""
        self.lost = replace(self.lost, steps=self.lost.steps + steps)

    def _count(self, what: Line | Make) -> None:
        step = isinstance(what, StepLine)
        self.lost = replace(self.lost, steps=self.lost.steps + step, others=self.lost.others + (not step))


NAP_S = 0.05
"""Between two checks for waiting lines: a line is on its way to the disk after at most this time."""
LOST_EVERY_S = 60.0
"""Between two lines that count lost lines."""
AT_ONCE = 64
"""Tensors of a detail in one line: at 1.3 kB each, a line stays below 100 kB, so that readers may limit its length."""

Reply = SimpleQueue[bool]
Calls = SimpleQueue[Reply | None]
"""Requests to a thread: a reply: take all waiting lines, then put True; None: then end, too."""


def _nap(calls: Calls) -> Reply | bool | None:
    """Returns a request that came meanwhile; False if none did."""
    try:
        return calls.get(timeout=NAP_S)
    except Empty:
        return False


class Writer(Thread):
    """Writes the lines of a tray until it is stopped, or the sink fails; then `say` gets one sentence."""

    def __init__(self, tray: LogQueue, folder: Path, limits: Limits, say: Callable[[str], None]) -> None:
        super().__init__(name="ampdoctor-log", daemon=True)
        self.failed: str | None = None  # that sentence
        self.calls: Calls = SimpleQueue()
        self.listeners: tuple[Listening, ...] = ()  # get each written line; replaced at each change
        self._tray, self._folder, self._limits, self._say = tray, folder, limits, say
        self._segments: Segments | None = None
        self._header: RunLine | None = None
        self._facts: Mapping[str, Any] = tray.facts
        self._lost = LostLine()
        self._told_lost = monotonic()

    def run(self) -> None:
        """Runs on the thread."""
        try:
            self._segments = Segments(self._folder, self._tray.origin.rank, self._limits)
            going = True
            while going and self.failed is None:
                call = _nap(self.calls)
                going = call is not None
                self._drain(self._segments, ends=not going)
                if isinstance(call, SimpleQueue):
                    call.put(True)
        except OSError as error:
            self.give_up(error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - the training goes on after any error
            self.give_up(f"{type(error).__name__}: {error}")
        finally:
            if self._segments is not None:
                self._segments.close()

    def give_up(self, reason: str) -> None:
        """Ends the log, with one sentence."""
        if self.failed is not None:
            return
        path = self._folder / log_name(self._tray.origin.rank)
        self.failed = f"the log {path} ends here: {reason}; the training goes on without it"
        self._tray.clear()
        with suppress(Exception):
            self._say(self.failed)

    def _drain(self, segments: Segments, *, ends: bool) -> None:
        tray = self._tray
        self._describe(segments)
        while self.failed is None and (handed := tray.take()) is not None:
            for whole, text in self._texts(handed):
                self._begin(segments)
                self._write(segments, whole, text)
        self._begin(segments)
        lost = replace(tray.lost, thinned=segments.thinned)
        if lost != self._lost and (ends or monotonic() - self._told_lost > LOST_EVERY_S):
            self._lost, self._told_lost = lost, monotonic()
            self._write_now(segments, lost)

    def _texts(self, handed: QueuedLine) -> Iterator[tuple[LogRecord, str]]:
        """Yields whole lines with their text: several for a long detail, none for an empty or failed one."""
        try:
            line = handed.what() if callable(handed.what) else handed.what
            wholes = [handed.stamped(part) for part in _parts(line)]
            yield from [(whole, text_of(whole)) for whole in wholes]
        except Exception:  # noqa: BLE001 - a line that cannot be made is counted; the others are written
            self._tray.unmade()

    def _begin(self, segments: Segments) -> None:
        """Begins a file with its header, and writes the header again where it has grown."""
        if segments.full:
            segments.next()
            self._header = None
        header = self._tray.header
        if header is not self._header:
            self._header = header
            self._write_now(segments, replace(header, segment=segments.number))

    def _write(self, segments: Segments, whole: LogRecord, text: str) -> None:
        segments.write(text.encode("ascii"))
        for listener in self.listeners:
            listener.put(whole)

    def _write_now(self, segments: Segments, line: Line) -> None:
        whole = self._tray.now(line)
        self._write(segments, whole, text_of(whole))

    def _describe(self, segments: Segments) -> None:
        facts = self._tray.facts
        if facts is self._facts:
            return
        self._facts = facts
        try:
            text = json.dumps(to_plain(facts, "run"), indent=2, allow_nan=False)
        except (TypeError, ValueError):
            self._tray.unmade()
            return
        segments.describe(text.encode("ascii") + b"\n")


def _parts(line: Line | None) -> list[Line]:
    if not isinstance(line, DetailLine) or len(line.tensors) <= AT_ONCE:
        return [] if line is None else [line]
    tensors = line.tensors
    return [replace(line, tensors=tensors[at : at + AT_ONCE]) for at in range(0, len(tensors), AT_ONCE)]


# -- the files of a log: one that grows, and finished ones, of which the oldest lose their details --


def without_details(path: Path) -> int:
    """Removes the details of a finished file, and returns their number; after an OSError it is unchanged."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if kind_of(line) != "detail"]
    if len(kept) < len(lines):
        replace_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def details_in(path: Path) -> int:
    """Returns the bytes of a file that are details."""
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True) if kind_of(line) == "detail")


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a file completely, or leaves its earlier contents and raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)  # left by an earlier process with this number, or a link
        with beside.open("xb") as file:  # "x" follows no link
            file.write(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a log."""

    file_bytes: int = 16 * 1024 * 1024  # then a new file begins; a file of this size is read in a second
    detail_bytes: int = 512 * 1024 * 1024  # of details; then the oldest go. Steps stay: a million take 150 MB
    lines: int = 20_000  # that wait, without details: 20 seconds of steps of 1 ms, some 10 MB
    details: int = 16  # that wait; each may hold a histogram of every tensor
    last: int = 256  # steps that are kept for a bundle
    listener_details: int = 64  # lines of details that wait for a listener, up to 100 kB each; for other lines, `lines`
    close_timeout: float = 10.0  # for all listeners together at the end: a metrics server needs the last lines


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
_FLAGS |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Segments:
    """The files of one rank in a folder, made if missing; a file of another process is renamed. May raise OSError."""

    def __init__(self, folder: Path, rank: int, limits: Limits) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank, self._limits = folder, rank, limits
        self.path = folder / log_name(rank)  # the running file
        self.thinned = 0  # details removed from finished files
        self._file = -1
        self._finished: dict[Path, int | None] = {
            folder / name: None for name in self._names() if name != self.path.name
        }
        self._begin(left=True)

    @property
    def full(self) -> bool:
        """Whether a new file is due: the running one is large, or was deleted."""
        return self._size >= self._limits.file_bytes or not os.fstat(self._file).st_nlink

    def write(self, data: bytes) -> None:
        """Writes a whole line at once; after an error, the part that was written is removed where possible."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def next(self) -> None:
        """Finishes the running file and begins another."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._finished = {path: size for path, size in self._finished.items() if path.exists()}
        self._begin()
        self._thin()

    def describe(self, data: bytes) -> None:
        """Replaces `run.json`, completely or not at all."""
        replace_whole(self._folder / run_name(self._rank), data)

    def close(self) -> None:
        """Closes the running file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with suppress(OSError):  # the data is already written
                os.close(file)

    def _names(self) -> list[str]:
        """Returns the names of this rank's files, the oldest first; another process may have made some since."""
        return logs_in(os.listdir(self._folder)).get(self._rank, [])  # noqa: PTH208 - names are all that is wanted

    def _begin(self, *, left: bool = False) -> None:
        """Begins a file; one that is there gets the next number (`left`: another process's, perhaps still in use)."""
        self.number = 1 + max(
            (number or 0 for _, number in filter(None, map(rank_and_number, self._names()))), default=0
        )
        if self.path.exists():
            finished = self.path.rename(self.path.with_name(log_name(self._rank, self.number)))
            if left:  # it is never thinned
                facts = self._folder / run_name(self._rank)
                with suppress(FileNotFoundError):
                    facts.rename(facts.with_name(run_name(self._rank, self.number)))
            else:
                self._finished[finished] = None
            self.number += 1
        self._file = os.open(self.path, _FLAGS, 0o666)
        self._size = 0

    def _thin(self) -> None:
        """Removes the details of the oldest files until the bound is met."""
        sizes = self._finished
        sizes |= {path: details_in(path) for path, size in sizes.items() if size is None}
        for path, size in sizes.items():
            if sum(one or 0 for one in sizes.values()) <= self._limits.detail_bytes:
                return
            if size:
                self.thinned += without_details(path)
                sizes[path] = 0
