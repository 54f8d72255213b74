"""Finds the log at a path: the kinds of log in the order in which they are asked, and where runs keep theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ampdoctor.checkpoints.storage.files import RegularFile, is_folder
from ampdoctor.checkpoints.storage.listing import list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.evidence.run_log.lines import Stamped
from ampdoctor.health.reading.deepspeed_monitor import DEEPSPEED_MONITOR
from ampdoctor.health.reading.elsewhere import log_elsewhere
from ampdoctor.health.reading.event_files import TENSORBOARD
from ampdoctor.health.reading.log_kind import LOOKED_THROUGH, Budget, LogKind, Noticed, Place
from ampdoctor.health.reading.our_log import AMPDOCTOR
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
"""Of a folder that has several, the first is read: it says most."""

_BELOW = (
    ("", "checkpoint-*"),
    ("", "version_*"),
    ("lightning_logs", "version_*"),
    ("runs", "*"),
    ("logs", "*"),
    ("", "offline-run-*"),
    ("", "run-*"),
    ("wandb", "*run-*"),
    ("ampdoctor-health", "*"),
    ("", "*"),
    ("", "*/version_*"),  # Lightning's loggers that have a name
    ("", "*/vis_data"),  # mmengine's
    ("", "*/*"),
    ("runs", "*/*"),  # Ultralytics' runs/detect/train
)
"""Where runs keep their logs in a folder that has none itself: the folder, and the names in it, of which the latest
counts."""
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


def find_log(path: str | os.PathLike[str]) -> FoundLog:
    """Returns the log at a path: a file, a folder with one, or a folder above the folders of runs, of which the last.

    Raises:
        CheckpointError: There is none, or the path cannot be read.
        LimitExceededError: The folder has too many entries.
    """
    typed, budget = os.fspath(path), Budget()
    place = _place(Path(path), budget)
    found = _in(typed, place)
    if found is not None:
        return found
    refused = dict(place.refused)
    hint = log_elsewhere(place)
    if place.named:
        why = f"{Path(path).name} is no log that is read here: {hint or _READ}."
        raise CheckpointError(next(iter(refused.values()), why))
    folders = list(dict.fromkeys(folder for runs in _runs_below(Path(path)) for folder in runs))
    for folder in folders:
        place = _place(folder, budget)
        found = _in(typed, place)
        if found is not None:
            others = [one for one in folders if one != folder and _has_log(one, budget)]
            return _beside(found, folder, others, Path(path), refused)
        refused |= {f"{folder.relative_to(path)}/{name}": why for name, why in place.refused.items()}
    name = Path(path).name or typed
    if refused:
        raise CheckpointError(f"{name} holds no log that can be read: {next(iter(refused.values()))}")
    if budget.passed_by:
        raise CheckpointError(
            f"{name} holds no log that was found: {budget.passed_by:,} of its files were not looked through, the "
            f"oldest ones, after the first {LOOKED_THROUGH >> 20} MB of the others: name the log's own file."
        )
    raise CheckpointError(f"{name} holds no log that is read here: {hint or _READ}.")


def has_log(path: Path) -> bool:
    """Is there a log in a file or folder itself? What cannot be read is none."""
    return _has_log(path, Budget())


def _has_log(path: Path, budget: Budget) -> bool:
    try:
        return _in(str(path), _place(path, budget)) is not None
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


def _in(typed: str, place: Place) -> FoundLog | None:
    for kind in KINDS:
        names = tuple(kind.claims(place))
        if names:
            lacks = tuple(kind.lacks(place))
            errors = tuple(one for one in lacks if isinstance(one, ErrorNote))
            known = {one.what for one in errors} | set(names)
            refused = {name: why for name, why in place.refused.items() if name not in known}
            return FoundLog(
                typed=typed,
                kind=kind,
                folder=place.folder,
                names=names,
                skipped=(*(one for one in lacks if isinstance(one, Skipped)), *_not_read(refused), *_passed_by(place)),
                errors=errors,
            )
    return None


def _not_read(refused: Mapping[str, str]) -> list[Skipped]:
    return [Skipped(what=name, reason=f"not read as a log: {why}") for name, why in refused.items()]


def _passed_by(place: Place) -> list[Skipped]:
    count, place.budget.passed_by = place.budget.passed_by, 0
    return [Skipped(what=f"{count:,} other files", reason="not looked through: they are older")] if count else []


def _runs_below(folder: Path) -> Iterator[Sequence[Path]]:
    for inner, pattern in _BELOW:
        try:
            runs = [path for path in (folder / inner).glob(pattern) if is_folder(path) and not path.is_symlink()]
        except OSError:
            continue
        if runs:
            yield sorted(runs, key=_last_written, reverse=True)


def _last_written(folder: Path) -> tuple[int, str]:
    """By the last change of what lies in it; of equal ones the last by name."""
    try:
        times = [entry.stat().st_mtime_ns for entry in os.scandir(folder) if entry.is_file()]
    except OSError:
        times = []
    return max(times, default=0), folder.name


def _beside(found: FoundLog, folder: Path, others: Sequence[Path], root: Path, refused: Mapping[str, str]) -> FoundLog:
    own = folder.relative_to(root)
    skipped = tuple(
        Skipped(
            what=str(other.relative_to(root)),
            reason=f"a log that was written before {own}'s"
            if _last_written(other) < _last_written(folder)
            else f"another log than {own}'s",
        )
        for other in others
    )
    return replace(found, skipped=(*found.skipped, *skipped, *_not_read(refused)))
