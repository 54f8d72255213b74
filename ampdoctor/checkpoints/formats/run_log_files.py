"""The log that ampdoctor writes while a training runs: the lines of its files that stand in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ampdoctor.checkpoints.formats.log_files import BYTE_ORDER_MARK, MAX_LINES, MAX_PARSED, lines_in, thinned
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.log_records import DetailLine, RunLine, Stamp, Stamped, StepLine
from ampdoctor.evidence.log_text import kind_of, line_of

MAX_DETAILS = 20_000
"""Lines of details that are parsed: with 64 tensors each, 300 details of 4,000 tensors. More are thinned evenly."""
MAX_BYTES = 8 * 1024 * 1024
"""Of a line: a table of 100,000 names."""
HEAD = 64
"""Bytes by which its first line is known."""
_TAIL = 256 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A line, with what its file says before it.

    Attributes:
        run: What its indices refer to.
        stamp: As of the line.
        line: A step or a detail.
    """

    run: RunLine
    stamp: Stamp
    line: StepLine | DetailLine


@dataclass(frozen=True, slots=True)
class Entries:
    """What was read of a log.

    Attributes:
        standing: By step; without what a rollback, or a restart from an earlier checkpoint, has undone.
        damaged: By name of a file, how many of its lines cannot be read, but for a last one that was cut off.
    """

    standing: tuple[Entry, ...]
    damaged: Counter[str]


def is_run_log(file: RegularFile) -> bool:
    """Does a file begin like a log that ampdoctor writes?"""
    return begins_run_log(file.head(HEAD))


def begins_run_log(head: bytes) -> bool:
    """Is this, of `HEAD` bytes, how a log begins that ampdoctor writes?"""
    return kind_of(head.removeprefix(BYTE_ORDER_MARK)) == "run"


def read_steps(files: Sequence[RegularFile]) -> Entries:
    """Returns the steps of a log; of more than `MAX_PARSED`, evenly chosen ones.

    Args:
        files: Of one rank, the oldest first.

    Raises:
        CheckpointError: Bytes cannot be read.
        LimitExceededError: There are more than `MAX_LINES` lines.
    """
    return _entries(files, "step", MAX_PARSED)


def read_details(files: Sequence[RegularFile]) -> Entries:
    """Returns the details of a log; of more than `MAX_DETAILS` lines, evenly chosen ones.

    Raises:
        CheckpointError: Bytes cannot be read.
        LimitExceededError: There are more than `MAX_LINES` lines.
    """
    return _entries(files, "detail", MAX_DETAILS)


def last_state(files: Sequence[RegularFile]) -> tuple[RunLine, StepLine | None] | None:
    """Returns the last file's header, and the last whole step near its end; None if there is no such header.

    Raises:
        CheckpointError: Bytes cannot be read.
    """
    last = files[-1]
    header = _whole(next(lines_in(last, MAX_BYTES), b""))
    if header is None or not isinstance(header.line, RunLine):
        return None
    start = max(last.size - _TAIL, 0)
    texts = last.read(start, last.size - start).split(b"\n")
    steps = (_whole(text) for text in reversed(texts) if kind_of(text) == "step")
    found = next((whole.line for whole in steps if whole is not None and isinstance(whole.line, StepLine)), None)
    return header.line, found


def log_entry_of(step: StepLine) -> LogEntry:
    """Returns a step as the rules on training logs know it: the norm unscaled, and none that was clipped."""
    norm = None if step.norm_clipped else step.gradient_norm
    if norm is not None and step.norm_scaled:
        norm = norm / step.loss_scale if step.loss_scale else None
    return LogEntry(
        step=step.step,
        loss=step.loss,
        grad_norm=norm,
        learning_rate=next(iter(step.learning_rates), None),
        scale=step.loss_scale,
        skipped=step.skipped,
    )


def _entries(files: Sequence[RegularFile], kind: str, limit: int) -> Entries:
    damaged: Counter[str] = Counter()
    found = []
    for name, run, text in thinned(_texts(files, kind, damaged), limit):
        whole = _whole(text)
        if whole is None:
            damaged[name] += 1
        elif isinstance(whole.line, StepLine | DetailLine):
            found.append(Entry(run, whole.stamp, whole.line))
    for file in files:
        if damaged[file.name] and file.read(file.size - 1, 1) != b"\n":
            damaged[file.name] -= 1
    return Entries(standing(found), +damaged)


def _texts(files: Sequence[RegularFile], kind: str, damaged: Counter[str]) -> Iterator[tuple[str, RunLine, bytes]]:
    """Yields the lines of a kind, each with its file's name and the header before it."""
    count = 0
    for file in files:
        run = RunLine(name="")
        for text in lines_in(file, MAX_BYTES):
            count += 1
            if count > MAX_LINES:
                raise LimitExceededError(f"{file.name}: lines of a log", MAX_LINES, count)
            found = kind_of(text)
            header = _whole(text) if found == "run" else None
            if header is not None and isinstance(header.line, RunLine):
                run = header.line
            elif found in {None, "run"}:
                damaged[file.name] += 1
            elif found == kind:
                yield file.name, run, text


def _whole(text: bytes) -> Stamped | None:
    try:
        return line_of(text)
    except ValueError:
        return None


def standing(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Returns the lines that count in the end, by step.

    A later attempt, restart or run in the same folder undoes what came before it from its own first step on.
    """
    groups: dict[tuple[int, int, int], list[Entry]] = {}
    runs: dict[str, int] = {}
    for entry in entries:
        stamp = entry.stamp
        run = runs.setdefault(stamp.run_id, len(runs))
        groups.setdefault((run, stamp.restarts, stamp.attempt), []).append(entry)
    kept: list[Entry] = []
    for key in sorted(groups):
        group = sorted(groups[key], key=lambda entry: entry.line.step)
        first = group[0].line.step
        kept = [entry for entry in kept if entry.line.step < first] + group
    return tuple(kept)
