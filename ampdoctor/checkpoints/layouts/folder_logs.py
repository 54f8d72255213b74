"""Finds the training logs in a folder, and the longest of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from ampdoctor.checkpoints.formats.log_files import is_log, read_log
from ampdoctor.checkpoints.formats.tensorboard_events import is_event_file, read_events
from ampdoctor.checkpoints.layouts.run_log_folder import run_logs, steps_of
from ampdoctor.checkpoints.storage.files import RegularFile, is_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.report import Skipped

RUNS = "runs"
"""The folder in which the TensorBoard writers of torch and of the Hugging Face Trainer make one per start of a run."""
MAX_RUNS = 20
"""Folders in `RUNS` that are read: the last by name, because names begin with the date."""
MAX_EVENT_FILES = 100
"""Event files of one folder that are read: the last by name, which begins with the time, one for each restart."""
MAX_RUN_ENTRIES = 2000

Log = tuple[LogEntry, ...]


def may_be_log(name: str) -> bool:
    """Is a file's name that of a log that is read?"""
    return is_log(name) or is_event_file(name)


def longest_log(folder: Path, names: Iterable[str], prefix: str) -> tuple[Log, list[Skipped]]:
    """Returns the longest of a folder's logs, () if there is none, and the files that could not be read completely.

    The event files of one folder form one log, and so do the files of a log that ampdoctor has written.

    Args:
        folder: The folder.
        names: The names in it.
        prefix: The prefix of these names in reports.
    """
    there = sorted(names)
    skipped: list[Skipped] = []
    ours = run_logs(folder, there)
    others = set(there).difference(*ours)
    logs = [_text_log(folder / name, prefix + name, skipped) for name in there if is_log(name) and name in others]
    logs += [steps_of(folder, names, prefix, skipped) for names in ours]
    logs.append(_event_log(folder, there, prefix, skipped))
    if RUNS in there:
        runs = [name for name in _names(folder / RUNS) if is_folder(folder / RUNS / name)]
        for run in runs[-MAX_RUNS:]:
            inside = folder / RUNS / run
            logs.append(_event_log(inside, _names(inside), f"{prefix}{RUNS}/{run}/", skipped))
    return max(logs, key=len), skipped


def _text_log(path: Path, shown: str, skipped: list[Skipped]) -> Log:
    if is_folder(path):
        return ()
    try:
        with RegularFile(path, shown) as file:
            return read_log(file)
    except CheckpointError as error:
        skipped.append(_unread(shown, error))
        return ()


def _event_log(folder: Path, names: Iterable[str], prefix: str, skipped: list[Skipped]) -> Log:
    found = [name for name in names if is_event_file(name) and not is_folder(folder / name)]
    with ExitStack() as stack:
        files = list(_opened(folder, found[-MAX_EVENT_FILES:], prefix, stack, skipped))
        if len(found) > MAX_EVENT_FILES:
            what, earlier = prefix + found[0], len(found) - MAX_EVENT_FILES
            skipped.append(Skipped(what=what, reason=f"not read as a log: it and {earlier - 1} more are the earliest"))
        try:
            log = read_events(files)
        except CheckpointError as error:
            skipped.append(_unread(prefix + found[0], error))
            return ()
    skipped += log.damaged
    return log.entries


def _opened(
    folder: Path, names: Iterable[str], prefix: str, stack: ExitStack, skipped: list[Skipped]
) -> Iterator[RegularFile]:
    for name in names:
        try:
            yield stack.enter_context(RegularFile(folder / name, prefix + name))
        except CheckpointError as error:
            skipped.append(_unread(prefix + name, error))


def _unread(shown: str, error: CheckpointError) -> Skipped:
    return Skipped(what=shown, reason=f"not read as a log: {error}")


def _names(folder: Path) -> list[str]:
    """Returns the sorted names in a folder; [] if it cannot be listed, because nobody asked for it."""
    try:
        return sorted(path.name for path in islice(folder.iterdir(), MAX_RUN_ENTRIES))
    except OSError:
        return []
