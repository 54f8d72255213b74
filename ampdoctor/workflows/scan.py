"""`scan`: the health of checkpoints, without the model's code and without executing anything in a file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.folder import neighbour
from ampdoctor.checkpoints.found import PathContents, find
from ampdoctor.checkpoints.series import step_in
from ampdoctor.checkpoints.torch_files import is_lfs_pointer
from ampdoctor.errors import (
    CheckpointError,
    LimitExceededError,
    NoCheckpointError,
    OtherFormatError,
    SeveralRunsError,
    UsageError,
)
from ampdoctor.evidence.paths import file_within, shown_path
from ampdoctor.evidence.report import ErrorNote, Report, Skipped, Verdict, finding_order, verdict_of, with_files
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.reading.opening import has_log, has_log_below
from ampdoctor.workflows.requests import Progress, SetAside, keep_all
from ampdoctor.workflows.scan_checkpoint import Examined, examine
from ampdoctor.workflows.scan_log import log_beside
from ampdoctor.workflows.scan_series import scan_family


def scan(
    path: str | os.PathLike[str] | PathContents,
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
        path: A file or a folder, as for `open_checkpoint`, or a folder of such; also what was found at one.
        progress: Called with (tensor, bytes done, bytes in all) after each block that was read.
        jobs: Threads that read and examine; None: as many as torch uses.
        exact: Sort every element by magnitude; otherwise an even sample of each tensor beyond 2^20 elements. The sample
            affects the shares that a cast would flush, never what is non-finite, largest, negative or saturated.
        every_member: Of many checkpoints read each, not only as many as it takes to find the first sick one.
        whole: The same, and no error for a single checkpoint, because a baseline must list everything.
        thresholds: Limits of the rules; see `diagnosis.catalogue.thresholds_from`.
        set_aside: Of many checkpoints, the first is searched that is sick after these findings are set aside.

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
    found = path if isinstance(path, PathContents) else find(path)

    def look(checkpoint: Checkpoint, member: str = "") -> Examined:
        told = progress_of(progress, member)
        return examine(checkpoint, progress=told, jobs=jobs, exact=exact, thresholds=thresholds)

    try:
        found.require_one_run()
    except SeveralRunsError as error:
        raise CheckpointError(f"{error} Type: ampdoctor scan {error.typed}") from None
    if every_member and len(found.members) < 2:
        raise UsageError(f"--all reads every checkpoint of a folder of many, and {found.path.name} is not one")
    every = every_member or whole or not found.contents.by_name
    report = _scanned(found, look, every_member=every, thresholds=thresholds, set_aside=set_aside)
    return _with_what_was_passed_over(report, found)


def _with_what_was_passed_over(report: Report, found: PathContents) -> Report:
    """Returns the report with the folders below that were not searched, and those that cannot be listed as errors."""
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
    found: PathContents,
    look: Callable[..., Examined],
    *,
    every_member: bool,
    thresholds: Thresholds,
    set_aside: SetAside,
) -> Report:
    if len(found.members) > 1:
        log, unread = log_beside(found.log_folders, thresholds)
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


def _opened(found: PathContents) -> Checkpoint:
    """Open the checkpoint; where there is only a training log, the error names the command that reads it."""
    try:
        return found.open()
    except CheckpointError as error:
        nothing = found.is_file or isinstance(error, NoCheckpointError | OtherFormatError)
        if not nothing or not has_log_below(found.path):  # a folder may hold a log beside a damaged checkpoint
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


# -- several paths at once, for example from a pre-commit hook --

T = TypeVar("T")

_WORST_FIRST: tuple[Verdict, ...] = ("sick", "inconclusive", "healthy", "not_judged")


def scan_several(  # noqa: D417 - what is as for `scan` stands in one line
    paths: Sequence[str | os.PathLike[str]],
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    exact: bool = False,
    skip_lfs_pointers: bool = False,
    whole: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    set_aside: SetAside = keep_all,
) -> Report:
    """Examine each of several checkpoints; one that is left out is in `skipped`, with its reason.

    As in a folder, files beside checkpoints whose names show that they hold none (random state, schedules) are left
    out.

    Args:
        paths: Each as for `scan`; a path that is named twice is examined once.
        progress, jobs, exact, whole, thresholds, set_aside: As for `scan`.
        skip_lfs_pointers: Leave out paths that are Git LFS pointers, even the only one. Otherwise a pointer is an
            error, because the file that it stands for was not examined; one in a folder always is.

    Returns:
        For one path, the report of `scan`. For several, one report: the findings of all, whose `where.file` begins with
        the path in the form of `evidence.paths.shown_path`; the worst verdict; complete if every report is. A path that
        cannot be read is one of `errors`, and the others are still examined. If all were left out, the verdict is
        `not_judged`.

    Raises:
        UsageError: `paths` is empty.
        CheckpointError: The only path cannot be read, or is refused.
    """
    given: dict[str, str] = {}
    for path in paths:
        given.setdefault(shown_path(path), os.fspath(path))
    if not given:
        raise UsageError("no path to scan")
    several = len(given) > 1
    names: list[str] = []
    reports: list[Report] = []
    for shown, path in given.items():
        found = PathContents(path)
        name = shown if several else found.name
        names.append(name)
        try:
            found = find(path)
            left_out = _left_out(found, name, pointers=skip_lfs_pointers) if several or skip_lfs_pointers else None
            if left_out is not None:
                reports.append(Report(command="scan", target={}, verdict="not_judged", skipped=(left_out,)))
                continue
            report = scan(
                found,
                progress=progress_of(progress, name if several else ""),
                jobs=jobs,
                exact=exact,
                whole=whole,
                thresholds=thresholds,
                set_aside=set_aside,
            )
        except CheckpointError as error:
            if not several:
                raise
            kind = "limit" if isinstance(error, LimitExceededError) else "unreadable"
            note = ErrorNote(what=name, kind=kind, message=str(error))
            reports.append(Report(command="scan", target={}, verdict="inconclusive", complete=False, errors=(note,)))
        else:
            if not several:
                return report
            reports.append(_of_one_path(report, found, name))
    return _together(names, reports, thresholds)


def _of_one_path(report: Report, found: PathContents, name: str) -> Report:
    """Returns the report on one of several paths, in which every file and check is named with the path."""

    def within(inner: str | None) -> str:
        if not inner:
            return name
        if found.listing is not None or name.endswith(".json"):  # an index, whose files lie beside it
            return file_within(name, inner)
        return name if inner == found.path.name else f"{name}: {inner}"  # a part inside the file

    return replace(
        report,
        target={
            **report.target,
            "files": [{**file, "path": within(file["path"])} for file in report.target.get("files", ())],
        },
        findings=tuple(with_files(finding, within) for finding in report.findings),
        elsewhere=tuple(tuple(with_files(finding, within) for finding in group) for group in report.elsewhere),
        checks=tuple(replace(check, name=f"{name}: {check.name}") for check in report.checks),
        skipped=tuple(replace(one, what=within(one.what)) for one in report.skipped),
        errors=tuple(replace(note, what=within(note.what)) for note in report.errors),
        tensors=tuple(replace(tensor, file=within(tensor.file)) for tensor in report.tensors or ()),
    )


def _together(names: Sequence[str], reports: Sequence[Report], thresholds: Thresholds) -> Report:
    """Returns one report on all paths; a section that can occur only once is kept if only one path has it."""
    errors = tuple(note for report in reports for note in report.errors)
    return Report(
        command="scan",
        target={
            "path": names[0] if len(names) == 1 else f"{len(names)} paths",
            "paths": list(names),
            "files": [file for report in reports for file in report.target.get("files", ())],
            "tensors": sum(report.target.get("tensors", 0) for report in reports),
            "bytes": sum(report.target.get("bytes", 0) for report in reports),
            "global_step": None,
        },
        verdict=next(verdict for verdict in _WORST_FIRST if verdict in {report.verdict for report in reports}),
        complete=not errors,
        findings=tuple(sorted((f for report in reports for f in report.findings), key=finding_order)),
        checks=tuple(check for report in reports for check in report.checks),
        skipped=tuple(one for report in reports for one in report.skipped),
        errors=errors,
        scaler=_only([report.scaler for report in reports]),
        trend=_only([report.trend for report in reports]),
        tensors=tuple(tensor for report in reports for tensor in report.tensors or ())
        if any(report.tensors is not None for report in reports)
        else None,
        thresholds=thresholds.listed(),
        elsewhere=tuple(group for report in reports for group in report.elsewhere),
    )


def _only(sections: Sequence[T | None]) -> T | None:
    there = [section for section in sections if section is not None]
    return there[0] if len(there) == 1 else None


def _left_out(found: PathContents, name: str, *, pointers: bool) -> Skipped | None:
    if pointers and found.is_file and is_lfs_pointer(found.path):
        return Skipped(what=name, reason="a Git LFS pointer, not the file itself", kind="lfs_pointer")
    reason = neighbour(found.path.name) if found.is_file else None
    return None if reason is None else Skipped(what=name, reason=reason)
