"""Logs in a folder: those of `ampdoctor run`, and those that lie beside a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.event_files import is_event_file, read_events
from ampdoctor.checkpoints.file_contents import FileContents
from ampdoctor.checkpoints.files import RegularFile, is_folder, list_folder
from ampdoctor.checkpoints.gathering import CheckpointBuilder
from ampdoctor.checkpoints.log_files import is_log, is_run_log, last_state, log_entry_of, read_log, read_steps
from ampdoctor.checkpoints.scalers import scaler_fields
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import RUN_LOG, LogEntry
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.evidence.paths import logs_in
from ampdoctor.evidence.report import Skipped


def run_logs(folder: Path, names: Iterable[str]) -> list[list[str]]:
    """Returns the logs of a run among a folder's files: the files of each rank, the oldest first.

    A file that cannot be opened is included because of its name: reading that log then reports the error.
    """
    known = [{name: _is_ours(folder / name) for name in files} for files in logs_in(names).values()]
    return [[name for name, ours in files.items() if ours is not False] for files in known if any(files.values())]


def has_run_log(folder: Path) -> bool:
    """Whether a folder holds a run's log; False if it cannot be listed."""
    try:
        return bool(run_logs(folder, list_folder(folder).names))
    except CheckpointError:
        return False


def steps_of(folder: Path, names: Sequence[str], prefix: str, skipped: list[Skipped]) -> tuple[LogEntry, ...]:
    """Returns a log's entries by step (of several optimizers, the first one's); `names` has the oldest file first.

    `skipped` receives what cannot be read.
    """
    with ExitStack() as stack:
        files = []
        for name in names:
            try:
                files.append(stack.enter_context(RegularFile(folder / name, prefix + name)))
            except CheckpointError as error:
                skipped.append(Skipped(what=prefix + name, reason=f"not read as a log: {error}"))
        try:
            read = read_steps(files)
        except CheckpointError as error:
            skipped.append(Skipped(what=prefix + names[-1], reason=f"not read as a log: {error}"))
            return ()
    for name, count in sorted(read.damaged.items()):
        lines = "a line that is" if count == 1 else f"{count} lines that are"
        skipped.append(Skipped(what=name, reason=f"it has {lines} none of a run's log"))
    steps = [entry.line for entry in read.standing if isinstance(entry.line, StepLine)]
    first = min((step.optimizer for step in steps), default=0)
    by_step = {step.step: log_entry_of(step) for step in steps if step.optimizer == first}
    return tuple(by_step.values())


def add_run_log(into: CheckpointBuilder, folder: Path, names: Sequence[str]) -> None:
    """Makes a run's log the examined object: its files become the parts, with the scaler as it was in the end.

    `into` has no part, and the log's steps already; `names` has the oldest file first.
    """
    into.layout = RUN_LOG
    for name in names:
        try:
            into.parts.append(FilePart(RegularFile(folder / name, name), FileContents(), name))
        except CheckpointError as error:
            into.refuse(name, error)
    if not into.parts:
        return
    try:
        state = last_state([part.file for part in into.parts])
    except CheckpointError as error:
        into.refuse(into.parts[-1].name, error)
        return
    if state is None:
        return
    run, step = state
    if step is not None:
        into.global_step = step.step
    scaler = scaler_fields({**run.scaler, **_now(step)}) if run.scaler else None
    if scaler:
        into.parts[-1].sections.scalers["scaler"] = scaler


@contextmanager
def opened(folder: Path, names: Sequence[str], prefix: str = "") -> Iterator[list[RegularFile]]:
    """The files are open inside; raises CheckpointError if one cannot be opened."""
    with ExitStack() as stack:
        yield [stack.enter_context(RegularFile(folder / name, prefix + name)) for name in names]


def _is_ours(path: Path) -> bool | None:
    """Whether a file begins like a log of ours; None if it cannot be opened."""
    try:
        with RegularFile(path, path.name) as file:
            return is_run_log(file)
    except CheckpointError:
        return None


def _now(step: StepLine | None) -> dict[str, float | int]:
    """Returns the entries of a scaler's state that have changed since the run began."""
    if step is None:
        return {}
    now = {"scale": step.loss_scale, "_growth_tracker": step.growth_tracker}
    return {key: value for key, value in now.items() if value is not None}


# -- the training logs in a folder, and the longest of them --

RUNS = "runs"
"""The folder in which the TensorBoard writers of torch and of the Hugging Face Trainer make one per start of a run."""
MAX_RUNS = 20
"""Folders in `RUNS` that are read: the last by name, because names begin with the date."""
MAX_EVENT_FILES = 100
"""Event files of one folder that are read: the last by name, which begins with the time, one for each restart."""
MAX_RUN_ENTRIES = 2000

Log = tuple[LogEntry, ...]


def may_be_log(name: str) -> bool:
    """Whether a file of this name is a log that is read."""
    return is_log(name) or is_event_file(name)


def longest_log(folder: Path, names: Iterable[str], prefix: str) -> tuple[Log, list[Skipped]]:
    """Returns the longest of a folder's logs, () if there is none, and the files that could not be read completely.

    The event files of one folder form one log, and so do the files of a log that ampdoctor has written.
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
    """Returns the sorted names in a folder; [] if it cannot be listed."""
    try:
        return sorted(path.name for path in islice(folder.iterdir(), MAX_RUN_ENTRIES))
    except OSError:
        return []
