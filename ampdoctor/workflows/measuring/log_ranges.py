"""The ranges that a run's log holds: what `profile` and `recommend` take in place of a saved profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampdoctor.checkpoints.formats.run_log_files import read_details, read_steps
from ampdoctor.checkpoints.layouts.run_log_folder import opened, run_logs
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.listing import list_folder
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.run_log.details import DetailLine
from ampdoctor.evidence.run_log.lines import StepLine
from ampdoctor.ranges.from_log import profile_from_log
from ampdoctor.ranges.profile import RangeProfile

NOTE = (
    "the ranges are those that the run has measured of itself: what its gradients had lost at the run's own scale "
    "before they were counted is not in them"
)
"""For a report that rests on a log."""


def ranges_of_log(path: str) -> RangeProfile:
    """Returns the ranges that a run's log holds.

    Args:
        path: Its folder, or one of its files.

    Raises:
        UsageError: It is no such log, cannot be read, or holds no histograms.
    """
    try:
        with _files(Path(path)) as files:
            details, steps = read_details(files), read_steps(files)
    except CheckpointError as error:
        raise UsageError(f"the log cannot be read: {error}") from None
    found = [(entry.run, entry.line) for entry in details.standing if isinstance(entry.line, DetailLine)]
    try:
        return profile_from_log(found, [entry.line for entry in steps.standing if isinstance(entry.line, StepLine)])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


@contextmanager
def _files(path: Path) -> Iterator[list[RegularFile]]:
    if not path.is_dir():
        with opened(path.parent, [path.name]) as files:
            yield files
        return
    logs = run_logs(path, list_folder(path).names)
    if not logs:
        raise UsageError(
            f"{path} holds no log of a run: `ampdoctor recommend` takes a factory, a profile or such a log"
        )
    with opened(path, logs[0]) as files:
        yield files
