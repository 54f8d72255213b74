"""`scan`: the health of a checkpoint, without the model's code and without executing anything in the file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace

from ampdoctor.checkpoints import Checkpoint
from ampdoctor.checkpoints.found import Found, find
from ampdoctor.checkpoints.layouts.step_names import step_in
from ampdoctor.errors import CheckpointError, NoCheckpointError, OtherFormatError, SeveralRunsError, UsageError
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import Report, verdict_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.reading.opening import has_log, has_log_below
from ampdoctor.workflows.opening.request import Progress, SetAside, keep_all
from ampdoctor.workflows.scanning.examining import Examined, examine
from ampdoctor.workflows.scanning.family_report import scan_family


def scan(
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    exact: bool = False,
    every_member: bool = False,
    whole: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    set_aside: SetAside = keep_all,
) -> Report:
    """Examine a checkpoint, or a folder of many checkpoints of one training.

    Args:
        path: A file or a folder, as for `open_checkpoint`, or a folder of such.
        progress: Told (tensor, bytes done, bytes in all) after each block that was read.
        jobs: Threads that read and examine; None: as many as torch uses.
        exact: Sort every element by magnitude; otherwise an even sample of each tensor beyond 2^20 elements, which
            concerns the shares that a cast would flush, never what is non-finite, largest, negative or saturated.
        every_member: Of many checkpoints read each, not only as many as it takes to find the first sick one.
        whole: The same, and no error for a single checkpoint: a baseline is to know all that is there.
        thresholds: What counts as harmful, as too many: see `diagnosis.catalogue.moving.thresholds_from`.
        set_aside: Of many checkpoints, the first is searched for that is sick in a way that this leaves.

    Returns:
        A report with verdict `sick` if a finding is an error; else `inconclusive` if something that should be there
        could not be read; else `healthy`. Two scans of one file give equal reports. For many checkpoints it is the
        report of the first sick one, or of the last if none is sick, with the trend. The run's log is judged with it,
        and with the only checkpoint of a run.

    Raises:
        CheckpointError: It cannot be read, is refused, changed meanwhile, or holds nothing to examine.
        LimitExceededError: It asks for more than a safe bound.
        UsageError: `every_member` is set for a single checkpoint.
    """
    return scan_found(
        find(path),
        progress=progress,
        jobs=jobs,
        exact=exact,
        every_member=every_member,
        whole=whole,
        thresholds=thresholds,
        set_aside=set_aside,
    )


def scan_found(
    found: Found,
    *,
    progress: Progress | None,
    jobs: int | None,
    exact: bool,
    every_member: bool = False,
    whole: bool = False,
    thresholds: Thresholds,
    set_aside: SetAside,
) -> Report:
    """Examine what was found at a path; arguments, report and errors are those of `scan`."""

    def look(checkpoint: Checkpoint, member: str = "") -> Examined:
        told = progress_of(progress, member)
        return examine(checkpoint, progress=told, jobs=jobs, exact=exact, thresholds=thresholds)

    try:
        found.require_one_run()
    except SeveralRunsError as error:
        raise CheckpointError(f"{error} Type: ampdoctor scan {error.typed}") from None
    if every_member and len(found.members) < 2:
        raise UsageError(f"--all reads every checkpoint of a folder of many, and {found.path.name} is not one")
    report = _scanned(found, look, every_member=every_member or whole, thresholds=thresholds, set_aside=set_aside)
    return _with_what_was_passed_over(report, found)


def _with_what_was_passed_over(report: Report, found: Found) -> Report:
    """The report with the folders below that were not looked through, and those that cannot be listed as errors."""
    below, unlisted = found.contents.below, found.unlisted
    if not below.skipped and not unlisted:
        return report
    errors = (*report.errors, *unlisted)
    return replace(
        report,
        verdict=verdict_of(report.found, settled=not errors),
        complete=not errors,
        skipped=(*report.skipped, *below.skipped),
        errors=errors,
    )


def _scanned(
    found: Found, look: Callable[..., Examined], *, every_member: bool, thresholds: Thresholds, set_aside: SetAside
) -> Report:
    if len(found.members) > 1:
        log, unread = found.log()
        place = {"path": found.name, "location": shown_path(found.path)}
        report = scan_family(
            found.name,
            found.members,
            look,
            log=log,
            every_member=every_member,
            thresholds=thresholds,
            set_aside=lambda report: set_aside(replace(report, target={**report.target, **place})),
        )
        target = {**report.target, **place}
        return replace(report, target=target, skipped=(*report.skipped, *unread))
    with _opened(found) as checkpoint:
        report = look(checkpoint).report
    named = found.members[0].path if found.members else found.path.absolute()
    target = {**report.target, "location": shown_path(named)}
    if target["global_step"] is None:
        target["global_step"] = step_in(named)
    return replace(report, target=target)


def _opened(found: Found) -> Checkpoint:
    """Opens the checkpoint; where there is none, but a training log, it says what reads that."""
    try:
        return found.open()
    except CheckpointError as error:
        nothing = found.is_file or isinstance(error, NoCheckpointError | OtherFormatError)
        if not nothing or not has_log_below(found.path):  # a folder may hold a log, and a checkpoint that is damaged
            raise
        command = shlex.join(["ampdoctor", "health", shown_path(found.path)])
        if not has_log(found.path):
            raise NoCheckpointError(f"{error} The training logs below it: `{command}` reads them.") from None
        raise NoCheckpointError(f"{found.name} is a training log and no checkpoint; `{command}` reads it.") from None


def progress_of(progress: Progress | None, member: str) -> Progress | None:
    """Returns a progress that names the checkpoint, one of many; "" stands for the only one."""
    if progress is None or not member:
        return progress

    def told(what: str, done: int, total: int | None, *, unit: str = "") -> None:
        progress(f"{member}: {what}", done, total, unit=unit)

    return told
