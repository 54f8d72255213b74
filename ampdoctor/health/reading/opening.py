"""Finds the log at a path: the kinds of log in the order in which they are asked, and where runs keep theirs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ampdoctor.checkpoints.files import RegularFile, is_folder, list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import Stamped
from ampdoctor.evidence.paths import shown_path, will_be_written
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.health.reading.deepspeed_monitor import DEEPSPEED_MONITOR
from ampdoctor.health.reading.event_files import TENSORBOARD
from ampdoctor.health.reading.log_kind import LOOKED_THROUGH, Budget, LogKind, Noticed, Place
from ampdoctor.health.reading.our_log import AMPDOCTOR
from ampdoctor.health.reading.places import last_written, places_below
from ampdoctor.health.reading.printed.elsewhere import log_elsewhere
from ampdoctor.health.reading.printed.outputs import CONSOLE, DEEPSPEED, MEGATRON
from ampdoctor.health.reading.tables import ANY_TABLE, LIGHTNING
from ampdoctor.health.reading.trainer_state import TRANSFORMERS
from ampdoctor.health.reading.wandb_file import WANDB

KINDS: tuple[LogKind, ...] = (
    AMPDOCTOR,
    TRANSFORMERS,
    LIGHTNING,
    DEEPSPEED_MONITOR,
    WANDB,
    TENSORBOARD,
    MEGATRON,
    ANY_TABLE,
    CONSOLE,
    DEEPSPEED,
)
"""In the order in which they are asked: a file is of the first that claims it."""

_READ = (
    "ampdoctor's own log, trainer_state.json, metrics.csv, TensorBoard's event files, a .wandb file, what a job prints "
    "(lines with a step and a loss, of Megatron-LM or DeepSpeed), CSV or JSON lines with a step and a loss"
)


class FileState(NamedTuple):
    """What tells a file from what it was before; the time of its last change, unlike that of its contents, nobody sets.

    Attributes:
        path: Its path.
        size: Bytes.
        written_ns: When its contents were last written, in nanoseconds.
        changed_ns: When it was last changed.
        inode: Its number on its disk.
    """

    path: str
    size: int
    written_ns: int
    changed_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLog:
    """A log that can be read, again and again.

    Attributes:
        typed: The path as it was typed.
        kind: Of which kind it is.
        folder: Where its files are.
        names: Its files.
        skipped: Other logs that lie there, and are not read.
        errors: What belongs to the log and cannot be read.
    """

    typed: str
    kind: LogKind
    folder: Path
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...] = field(default=())
    errors: tuple[ErrorNote, ...] = field(default=())

    @property
    def name(self) -> str:
        """A name for people: the folder's, or the file's."""
        return Path(self.typed).name or self.folder.absolute().name

    @property
    def shown(self) -> str:
        """Its path for people."""
        return shown_path(self.typed)

    @property
    def written_ns(self) -> int:
        """When it was last written to, in nanoseconds since 1970; 0 where a file is gone."""
        try:
            return max(file.written_ns for file in self.state())
        except CheckpointError:
            return 0

    def lines(self, noticed: Noticed) -> Iterator[Stamped]:
        """Yields its lines in the order of their arrival.

        Raises:
            CheckpointError: It cannot be read.
        """
        return self.kind.read(self.folder, self.names, noticed)

    def state(self) -> list[FileState]:
        """Returns of each file how it is now.

        Raises:
            CheckpointError: A file is gone.
        """
        found = []
        for name in self.names:
            try:
                of_file = (self.folder / name).stat()
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}.") from None
            found.append(
                FileState(
                    os.fspath((self.folder / name).absolute()),
                    of_file.st_size,
                    of_file.st_mtime_ns,
                    of_file.st_ctime_ns,
                    of_file.st_ino,
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLogs:
    """The logs at a path.

    Attributes:
        logs: They; the first is the one that is shown while it grows.
        skipped: What else may be a log and is not read.
        errors: Folders in which a log may lie, and that cannot be listed.
    """

    logs: tuple[FoundLog, ...]
    skipped: tuple[Skipped, ...] = ()
    errors: tuple[ErrorNote, ...] = ()


def find_log(path: str | os.PathLike[str]) -> FoundLog:
    """Returns the log at a path: a file, a folder with one, or a folder above the folders of runs, of which the last.

    Raises:
        CheckpointError: There is none, or the path cannot be read.
        LimitExceededError: The folder has too many entries.
    """
    found = find_logs(path)
    first, *others = found.logs
    names = [_beside(first, other, Path(path)) for other in others]
    return replace(first, typed=os.fspath(path), skipped=(*first.skipped, *names, *found.skipped))


def find_logs(path: str | os.PathLike[str]) -> FoundLogs:
    """Returns all logs at a path: a file, or those in a folder and in the folders below it.

    Raises:
        CheckpointError: There is none, or the path cannot be read.
        LimitExceededError: The folder has too many entries.
    """
    typed, budget = os.fspath(path), Budget()
    place = _place(Path(path), budget)
    if place.named:
        named = next(_logs_in(place), None)
        if named is not None:
            return FoundLogs(logs=(replace(named, typed=typed),))
        why = f"{Path(path).name} is no log that is read here: {log_elsewhere(place) or _READ}."
        raise CheckpointError(next(iter(place.refused.values()), why))
    below = places_below(Path(path))
    logs, refused = [*_logs_in(place)], dict(place.refused)
    for folder in below.folders:
        inner = _place(folder, budget)
        logs += _typed_by_its_folder(_logs_in(inner))
        refused |= {f"{folder.relative_to(path)}/{name}": why for name, why in inner.refused.items()}
    if not logs:
        raise CheckpointError(_none(place, refused, budget))
    if len(logs) == 1:
        logs = [replace(logs[0], typed=typed)]
    known = {_of(Path(path), one.folder, note.what) for one in logs for note in one.errors}
    return FoundLogs(
        logs=tuple(logs),
        skipped=(
            *(
                Skipped(what=name, reason=f"not read as a log: {why}")
                for name, why in refused.items()
                if name not in known
            ),
            *below.skipped,
            *_passed_by(budget),
        ),
        errors=tuple(below.errors),
    )


def _none(place: Place, refused: Mapping[str, str], budget: Budget) -> str:
    """Returns the sentence about a folder without a log."""
    name = place.folder.name or str(place.folder)
    if refused:
        return f"{name} holds no log that can be read: {next(iter(refused.values()))}"
    if budget.passed_by:
        return (
            f"{name} holds no log that was found: {budget.passed_by:,} of its files were not looked through, the "
            f"oldest ones, after the first {LOOKED_THROUGH >> 20} MB of the others: name the log's own file."
        )
    return f"{name} holds no log that is read here: {log_elsewhere(place) or _READ}."


def has_log(path: Path) -> bool:
    """Is there a log in a file or folder itself? What cannot be read is none."""
    return _has_log(path, Budget())


def _has_log(path: Path, budget: Budget) -> bool:
    try:
        return next(_logs_in(_place(path, budget)), None) is not None
    except CheckpointError:
        return False


def has_log_below(path: Path) -> bool:
    """Is there one in a folder above those of runs? What cannot be read is none."""
    try:
        find_log(path)
    except CheckpointError:
        return False
    return True


def _place(path: Path, budget: Budget) -> Place:
    if is_folder(path):
        return Place(path, tuple(list_folder(path).files), budget=budget)
    with RegularFile(path, path.name):  # says why, where it cannot be opened
        return Place(path.parent, (path.name,), named=True, budget=budget)


def _logs_in(place: Place) -> Iterator[FoundLog]:
    taken: set[str] = set()
    for kind in KINDS:
        for names in kind.claims(place):
            if not taken.isdisjoint(names):
                continue
            taken.update(names)
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
            if kind is AMPDOCTOR:  # what is exported beside our own log is none of the others, and written anew
                place = replace(place, names=tuple(n for n in place.names if not will_be_written(place.folder / n)))


def _typed_by_its_folder(logs: Iterable[FoundLog]) -> list[FoundLog]:
    """The logs of a folder; a single one goes by the folder's name."""
    found = list(logs)
    return [replace(one, typed=str(one.folder)) for one in found] if len(found) == 1 else found


def _passed_by(budget: Budget) -> list[Skipped]:
    count = budget.passed_by
    return [Skipped(what=f"{count:,} other files", reason="not looked through: they are older")] if count else []


def _of(root: Path, folder: Path, name: str) -> str:
    return str(folder.relative_to(root) / name)


def _beside(first: FoundLog, other: FoundLog, root: Path) -> Skipped:
    """Names another log than the one that is read."""
    if other.folder == first.folder:
        older = other.written_ns < first.written_ns
        reason = f"a log that was written before {first.names[0]}" if older else f"another log than {first.names[0]}"
        return Skipped(what=other.names[0], reason=reason)
    own, what = (str(one.folder.relative_to(root)) for one in (first, other))
    older = last_written(other.folder) < last_written(first.folder)
    return Skipped(what=what, reason=f"a log that was written before {own}'s" if older else f"another log than {own}'s")
