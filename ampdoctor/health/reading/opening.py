"""Finds the log at a path: the kinds of log in the order in which they are tried, and the folders of runs."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ampdoctor.checkpoints.files import MAX_FOLDER_ENTRIES, Listing, RegularFile, identity_of, is_folder, list_folder
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.json_records import DuplicateKeyError
from ampdoctor.evidence.log_records import SCHEMA_VERSION, EndLine, LogRecord, StepLine
from ampdoctor.evidence.log_text import parse_lines
from ampdoctor.evidence.paths import log_name, logs_in, rank_and_number, run_name, shown_path, will_be_written
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.health.reading.log_files import HEAD, MAX_BYTES, begins_run_log, is_log, is_named_as_log, lines_in
from ampdoctor.health.reading.log_kind import LOOKED_THROUGH, Budget, LogKind, LogLocation, ReadIssues
from ampdoctor.health.reading.other_logs import ANY_TABLE, LIGHTNING, TENSORBOARD, TRANSFORMERS, WANDB
from ampdoctor.health.reading.printed_outputs import CONSOLE, DEEPSPEED, MEGATRON

# -- ampdoctor's own log --


def _claims(place: LogLocation) -> Sequence[Sequence[str]]:
    """Claims all files of a folder's log by name if one begins as ours: the first line of another may be damaged."""
    names = place.names if place.named else [name for files in logs_in(place.names).values() for name in files]
    heads = {name: place.head(name, HEAD) for name in names}
    ours = any(map(begins_run_log, heads.values()))
    return [[name for name in names if name not in place.refused]] if ours else ()


def _lacks(place: LogLocation) -> Iterator[ErrorNote | Skipped]:
    """Yields the files of each rank that cannot be read, are empty or missing."""
    # The oldest may be missing: they are deleted to free disk space
    if place.named:
        return
    for rank, names in logs_in(place.names).items():
        for name in names:
            if name in place.refused:
                yield ErrorNote(what=name, kind="unreadable", message=place.refused[name])
            elif (name != log_name(rank) or names == [name]) and not place.head(name, 1):
                yield ErrorNote(what=name, kind="truncated", message=f"{name} is empty: its lines are lost.")
        yield from _missing(rank, names)


def _missing(rank: int, names: Sequence[str]) -> Iterator[ErrorNote | Skipped]:
    numbers = [place[1] for name in names if (place := rank_and_number(name)) is not None and place[1] is not None]
    for before, after in pairwise([0, *numbers]):
        if after == before + 1:
            continue
        gone = log_name(rank, before + 1)
        gone += f" to {log_name(rank, after - 1)}" if after > before + 2 else ""
        if before:
            message = f"{gone} cannot be found, between {log_name(rank, before)} and {log_name(rank, after)}."
            yield ErrorNote(what=gone, kind="missing", message=message)
        else:
            yield Skipped(what=gone, reason=f"it is no longer there: the log begins with {log_name(rank, after)}")
    if numbers and log_name(rank) not in names:
        message = f"{log_name(rank)} cannot be found, which follows {log_name(rank, numbers[-1])}."
        yield ErrorNote(what=log_name(rank), kind="missing", message=message)


def _read(folder: Path, names: Sequence[str], noticed: ReadIssues) -> Iterator[LogRecord]:
    for name in names:
        with RegularFile(folder / name, name) as file:
            left = noticed.left[name]
            for text, whole in parse_lines(lines_in(file, MAX_BYTES, left)):
                if isinstance(whole, LogRecord):
                    yield whole
                elif isinstance(whole, DuplicateKeyError):
                    left.ambiguous += 1
                elif whole is not None:
                    left.damaged += 1
                else:  # an unknown kind of the own version is ignored
                    left.other_version += json.loads(text).get("schema_version") != SCHEMA_VERSION
            # the last line without newline, if it is whole: the process was killed or still writes
            text, left.unfinished = left.unfinished, b""
            yield from (whole for _, whole in parse_lines([text]) if isinstance(whole, LogRecord))


AMPDOCTOR = LogKind(format="ampdoctor", claims=_claims, read=_read, lacks=_lacks)


# -- the folders below a folder that may hold logs --

_LEVELS = 6  # how deep folders are searched: Hydra's `outputs/DATE/TIME/lightning_logs/name/version_0`
_LISTED = 8  # files without a log that are named
_MOST = 1000  # most folders that are searched; a data set has more
_NO_RUNS = frozenset({"calls.safetensors", "pyvenv.cfg"})
"""Files in a step that `ampdoctor run` has recorded, and in a virtual environment."""


@dataclass(slots=True)
class Places:
    """The folders below a folder."""

    folders: list[Path] = field(default_factory=list)  # the last written first
    skipped: list[Skipped] = field(default_factory=list)  # folders that were not searched, and why
    errors: list[ErrorNote] = field(default_factory=list)  # folders that cannot be listed


def places_below(root: Path) -> Places:
    """Returns the folders below `root`, each once, without hidden folders and virtual environments."""
    places, seen = Places(), {identity_of(root)}
    waiting = deque([("", list_folder(root), _LEVELS)])
    while waiting:  # level by level, so that a deep folder does not use up the limit before its neighbours
        prefix, listing, levels = waiting.popleft()
        for name in listing.names:
            path = listing.path / name
            if name not in listing.folders or name.startswith((".", "__")) or (one := identity_of(path)) in seen:
                continue
            if not levels or len(places.folders) == _MOST:
                why = "they lie too deep" if not levels else f"{_MOST:,} others come before them"
                places.skipped.append(Skipped(what=f"folders in {prefix or '.'}", reason=f"not looked into: {why}"))
                break
            seen.add(one)
            try:
                below = list_folder(path)
            except LimitExceededError:
                reason = f"not looked into: more than {MAX_FOLDER_ENTRIES:,} files are no run's"
                places.skipped.append(Skipped(what=f"{prefix}{name}", reason=reason))
                continue
            except CheckpointError as error:
                places.errors.append(ErrorNote(what=f"{prefix}{name}", kind="unreadable", message=str(error)))
                continue
            if _NO_RUNS.isdisjoint(below.names):
                places.folders.append(path)
                waiting.append((f"{prefix}{name}/", below, levels - 1))
    places.folders.sort(key=last_written, reverse=True)
    return places


def last_written(folder: Path) -> tuple[int, str]:
    """Returns the last modification of a folder's files in nanoseconds, and the folder's name, which decides ties."""
    try:
        times = [entry.stat().st_mtime_ns for entry in os.scandir(folder) if entry.is_file()]
    except OSError:
        times = []
    return max(times, default=0), folder.name


KINDS: tuple[LogKind, ...] = (
    AMPDOCTOR,
    TRANSFORMERS,
    LIGHTNING,
    WANDB,
    TENSORBOARD,
    MEGATRON,
    ANY_TABLE,
    CONSOLE,
    DEEPSPEED,
)
"""The order in which they are tried: a file belongs to the first kind that claims it."""

_READ = (
    "ampdoctor's own log, trainer_state.json, metrics.csv, TensorBoard's event files, a .wandb file, what a job prints "
    "(lines with a step and a loss, of Megatron-LM or DeepSpeed), CSV or JSON lines with a step and a loss"
)


class FileState(NamedTuple):
    """Shows whether a file has changed."""

    size: int
    written_ns: int  # the modification time


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLog:
    """A log that can be read repeatedly."""

    typed: str  # the path as it was typed
    kind: LogKind
    folder: Path
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...] = field(default=())  # other logs at the path, which are not read
    errors: tuple[ErrorNote, ...] = field(default=())  # parts of the log that cannot be read

    @property
    def name(self) -> str:
        """The folder's or the file's name, for people."""
        return Path(self.typed).name or self.folder.absolute().name

    @property
    def shown(self) -> str:
        """The path for people."""
        return shown_path(self.typed)

    @property
    def written_ns(self) -> int:
        """When it was last written, in nanoseconds since 1970; 0 where a file is gone."""
        try:
            return max(file.written_ns for file in self.state())
        except CheckpointError:
            return 0

    def lines(self, noticed: ReadIssues) -> Iterator[LogRecord]:
        """Yields its lines in the order of arrival; raises CheckpointError where it cannot be read."""
        return self.kind.read(self.folder, self.names, noticed)

    def state(self) -> list[FileState]:
        """Returns the current state of each file; raises CheckpointError where one is gone."""
        found = []
        for name in self.names:
            try:
                of_file = (self.folder / name).stat()
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}.") from None
            found.append(FileState(of_file.st_size, of_file.st_mtime_ns))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLogs:
    """The logs at a path."""

    logs: tuple[FoundLog, ...]  # the first is the one that --follow shows
    skipped: tuple[Skipped, ...] = ()  # other possible logs, which are not read
    errors: tuple[ErrorNote, ...] = ()  # logs by their names, and folders that may hold one, which cannot be read


def find_log(path: str | os.PathLike[str]) -> FoundLog:
    """Returns the log at a path: a file, a folder with one, or the last log below it; else raises CheckpointError."""
    found = find_logs(path)
    first, *others = found.logs
    names = [_beside(first, other, Path(path)) for other in others]
    unread = [Skipped(what=one.what, reason=f"not read as a log: {one.message}") for one in found.errors]
    return replace(first, typed=os.fspath(path), skipped=(*first.skipped, *names, *unread, *found.skipped))


def find_logs(path: str | os.PathLike[str]) -> FoundLogs:
    """Returns all logs at a path: a file, or those in a folder and below it; without one raises CheckpointError."""
    typed, budget = os.fspath(path), Budget()
    place = _place(Path(path), budget)
    if place.named:
        named = next(_logs_in(place), None)
        if named is not None:
            return FoundLogs(logs=(replace(named, typed=typed),))
        why = f"{Path(path).name} is no log that is read here: {_READ}."
        raise CheckpointError(next(iter(place.refused.values()), why))
    below = places_below(Path(path))
    logs = [*_logs_in(place)]
    refused, others = _unread_in(place), _others(place, logs)
    for folder in below.folders:
        inner, prefix = _place(folder, budget), f"{folder.relative_to(path)}/"
        found = list(_logs_in(inner))
        logs += [replace(one, typed=str(one.folder)) for one in found] if len(found) == 1 else found
        refused |= {f"{prefix}{name}": why for name, why in _unread_in(inner).items()}
        others += [f"{prefix}{name}" for name in _others(inner, found)]
    if not logs:
        raise CheckpointError(_none(place, refused, budget))
    if len(logs) == 1:
        logs = [replace(logs[0], typed=typed)]
    known = {str(one.folder.relative_to(path) / note.what) for one in logs for note in one.errors}
    unread = {name: why for name, why in refused.items() if name not in known}
    skipped = (*_left_out(unread, others, budget), *below.skipped)
    errors = (ErrorNote(what=name, kind="unreadable", message=why) for name, why in unread.items() if _is_a_logs(name))
    return FoundLogs(logs=tuple(logs), skipped=skipped, errors=(*below.errors, *errors))


def _is_a_logs(path: str) -> bool:
    return is_named_as_log(path.rpartition("/")[2])


def _left_out(unread: Mapping[str, str], others: Sequence[str], budget: Budget) -> Iterator[Skipped]:
    """Yields the files that no error is about; those that may have been meant as logs come first."""
    for name, why in unread.items():
        if not _is_a_logs(name):
            yield Skipped(what=name, reason=f"not read as a log: {why}")
    for name in sorted(others, key=lambda name: not _is_a_logs(name))[:_LISTED]:
        yield Skipped(what=name, reason="no log: it has no row with a step and a loss")
    if len(others) > _LISTED:
        more = f"{len(others) - _LISTED:,} more files"
        yield Skipped(what=more, reason="no logs: they have no row with a step and a loss")
    if budget.passed_by:
        yield Skipped(what=f"{len(budget.passed_by):,} other files", reason="not looked through: they are older")


def _unread_in(place: LogLocation) -> dict[str, str]:
    """Returns why logs of a folder cannot be read, by name; `run.json` without its log is one."""
    refused = dict(place.refused)
    gone = run_name(0) in place.names and not logs_in(place.names) and b'"run_id"' in place.head(run_name(0), HEAD)
    return refused | ({log_name(0): f"{log_name(0)} cannot be found beside {run_name(0)}."} if gone else {})


def _others(place: LogLocation, logs: Sequence[FoundLog]) -> list[str]:
    """Returns the tables and logs by their names of a folder that are no logs of a training."""
    known = {*place.refused, *(name for one in logs for name in one.names)}
    return [
        name
        for name in place.names
        if name not in known
        and place.folder / name not in place.budget.passed_by
        and (is_log(name) or Path(name).suffix in {".csv", ".tsv", ".log"})
        and not will_be_written(place.folder / name)
    ]


def _none(place: LogLocation, refused: Mapping[str, str], budget: Budget) -> str:
    name = place.folder.name or str(place.folder)
    if refused:
        return f"{name} holds no log that can be read: {next(iter(refused.values()))}"
    if budget.passed_by:
        return (
            f"{name} holds no log that was found: {len(budget.passed_by):,} of its files were not looked through, the "
            f"oldest ones, after the first {LOOKED_THROUGH >> 20} MB of the others: name the log's own file."
        )
    return f"{name} holds no log that is read here: {_READ}."


def has_log(path: Path) -> bool:
    """Whether a file or folder itself is or holds a log that can be read."""
    try:
        return next(_logs_in(_place(path, Budget())), None) is not None
    except CheckpointError:
        return False


def has_log_below(path: Path) -> bool:
    """Whether a folder or one below it holds a log that can be read."""
    try:
        find_log(path)
    except CheckpointError:
        return False
    return True


def _place(path: Path, budget: Budget) -> LogLocation:
    if is_folder(path):
        return LogLocation(path, tuple(list_folder(path).files), budget=budget)
    with RegularFile(path, path.name):  # raises with the reason where it cannot be opened
        return LogLocation(path.parent, (path.name,), named=True, budget=budget)


def _logs_in(place: LogLocation) -> Iterator[FoundLog]:
    for kind in KINDS:
        for names in kind.claims(place):
            if not set(names) <= set(place.names):
                continue
            lacks = tuple(kind.lacks(place))
            yield FoundLog(
                typed=str(place.folder / names[0]),
                kind=kind,
                folder=place.folder,
                names=tuple(names),
                skipped=tuple(one for one in lacks if isinstance(one, Skipped)),
                errors=tuple(one for one in lacks if isinstance(one, ErrorNote)),
            )
            if place.named:
                return
            place = replace(place, names=tuple(name for name in place.names if name not in names))
            if kind is AMPDOCTOR:  # exports beside our own log are no other logs, and are written anew
                place = replace(place, names=tuple(n for n in place.names if not will_be_written(place.folder / n)))


def logs_in_folder(listing: Listing) -> tuple[list[FoundLog], Mapping[str, str]]:
    """Returns the logs among a folder's files, and why others cannot be read, by name."""
    place = LogLocation(listing.path, tuple(listing.files))
    return [*_logs_in(place)], place.refused


def _beside(first: FoundLog, other: FoundLog, root: Path) -> Skipped:
    if other.folder == first.folder:
        return Skipped(what=other.names[0], reason=f"another log than {first.names[0]}")
    own, what = (str(one.folder.relative_to(root)) for one in (first, other))
    return Skipped(what=what, reason=f"another log than {own}'s")


# -- logs of one run in several forms, such as a table beside event files: the complete one is read --

MOST_BYTES = 64 * 1024 * 1024
MOST_ROWS = 50_000  # largest log that is compared with others; a longer one is judged by itself
_ALIKE = 1e-3  # relative difference of a number in two logs of one run: one of them prints four digits
_NUMBERS = ("loss", "gradient_norm", "loss_scale", "skipped")

_Row: TypeAlias = tuple[float | None, ...]


def without_copies(logs: Sequence[FoundLog]) -> tuple[list[FoundLog], list[Skipped]]:
    """Returns the logs with numbers that no other log has, and notes about the rest; the first of two equal logs stays.

    A log is a copy where another one has all its rows in the same order and with all their numbers. Steps are not
    compared, as one logger begins at 0 and another at 1. So a copy never has a problem that the other log lacks.
    """
    if len(logs) < 2:
        return list(logs), []
    kept: list[_Held] = []
    copies: list[Skipped] = []
    for log in logs:
        held = _held(log)
        whole = next((one for one in kept if held.is_in(one)), None)
        if whole is not None:
            copies.append(_copy(log, whole.log))
            continue
        copies += [_copy(one.log, log) for one in kept if one.is_in(held)]
        kept = [*(one for one in kept if not one.is_in(held)), held]
    return [one.log for one in kept], copies


@dataclass(frozen=True, slots=True)
class _Held:
    """A log to compare with others."""

    log: FoundLog
    rows: list[_Row]  # the numbers of its steps; empty where they were not read
    has_more: bool  # whether it has more than these numbers, so that it must be read

    def is_in(self, other: _Held) -> bool:
        """Whether another log has all of it."""
        if self.has_more or not self.rows or len(self.rows) > len(other.rows):
            return False
        rest = iter(other.rows)
        return all(any(_says(one, row) for one in rest) for row in self.rows)


def _copy(log: FoundLog, whole: FoundLog) -> Skipped:
    return Skipped(what=log.shown, reason=f"the same run as {whole.shown}, which has each of its numbers")


def _held(log: FoundLog) -> _Held:
    rows: list[_Row] = []
    has_more = log.kind is AMPDOCTOR or bool(log.errors)
    try:
        if sum(file.size for file in log.state()) > MOST_BYTES:
            return _Held(log, [], has_more=True)
        for one in log.lines(ReadIssues()):
            line = one.line
            if isinstance(line, StepLine):
                there = (1.0 if told else None for told in (line.learning_rates, line.seconds))  # present or not
                rows.append((*(getattr(line, name) for name in _NUMBERS), *there))
            elif isinstance(line, EndLine):
                has_more = has_more or bool(line.exit_code or line.reason)
            if len(rows) > MOST_ROWS:
                return _Held(log, [], has_more=True)
    except CheckpointError:  # judging the log reports it
        return _Held(log, [], has_more=True)
    return _Held(log, rows, has_more)


def _says(whole: _Row, row: _Row) -> bool:
    return all(
        mine is None or (other is not None and _alike(float(mine), float(other)))
        for mine, other in zip(row, whole, strict=True)
    )


def _alike(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= _ALIKE * max(abs(one), abs(other))
