"""The log that ampdoctor writes of a run: beside a checkpoint its training log, and alone what is examined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.contents.scalers import scaler_fields
from ampdoctor.checkpoints.contents.structure import Sections
from ampdoctor.checkpoints.formats.run_log_files import is_run_log, last_state, log_entry_of, read_steps
from ampdoctor.checkpoints.layouts.gathering import Gathering
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.listing import list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import RUN_LOG, LogEntry
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.evidence.paths import logs_in
from ampdoctor.evidence.report import Skipped


def run_logs(folder: Path, names: Iterable[str]) -> list[list[str]]:
    """Returns the logs of a run among a folder's files: the files of each rank, the oldest first.

    A file that cannot be opened is one of a log's by its name, so that whoever reads that log says why.
    """
    known = [{name: _is_ours(folder / name) for name in files} for files in logs_in(names).values()]
    return [[name for name, ours in files.items() if ours is not False] for files in known if any(files.values())]


def has_run_log(folder: Path) -> bool:
    """Is there a run's log in a folder that nobody named?"""
    try:
        return bool(run_logs(folder, list_folder(folder).names))
    except CheckpointError:
        return False


def steps_of(folder: Path, names: Sequence[str], prefix: str, skipped: list[Skipped]) -> tuple[LogEntry, ...]:
    """Returns what a log says of each step; of several optimizers, what it says of the first one's.

    Args:
        folder: Of the log.
        names: Its files, the oldest first.
        prefix: The prefix of these names in reports.
        skipped: Gets what cannot be read.
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


def add_run_log(into: Gathering, folder: Path, names: Sequence[str]) -> None:
    """Makes a run's log what is examined: its files are the parts, with the scaler as it stood in the end.

    Args:
        into: Has no part, and the log's steps already.
        folder: Of the log.
        names: Its files, the oldest first.
    """
    into.layout = RUN_LOG
    for name in names:
        try:
            into.parts.append(Part(RegularFile(folder / name, name), Sections(), name))
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
    """The files are open inside.

    Raises:
        CheckpointError: One of them cannot be opened.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(RegularFile(folder / name, prefix + name)) for name in names]


def _is_ours(path: Path) -> bool | None:
    """Does a file begin like a log of ours? None where it cannot be opened."""
    try:
        with RegularFile(path, path.name) as file:
            return is_run_log(file)
    except CheckpointError:
        return None


def _now(step: StepLine | None) -> dict[str, float | int]:
    """What of a scaler's state has changed since the run began."""
    if step is None:
        return {}
    now = {"scale": step.loss_scale, "_growth_tracker": step.growth_tracker}
    return {key: value for key, value in now.items() if value is not None}
