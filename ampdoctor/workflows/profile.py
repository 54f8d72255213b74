"""`profile`: measures in an fp32 replay what half precision would lose at each place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampdoctor.evidence.report import Report, finding_order, verdict_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.ranges.profile import RangeProfile, merge
from ampdoctor.scaling.choice import choose_scale
from ampdoctor.workflows.measuring.log_ranges import NOTE, ranges_of_log
from ampdoctor.workflows.measuring.measure import measure
from ampdoctor.workflows.measuring.profile_file import read_profile, write_profile
from ampdoctor.workflows.measuring.range_findings import range_checks, range_findings
from ampdoctor.workflows.measuring.range_section import profile_section
from ampdoctor.workflows.measuring.shadow_steps import shadowed
from ampdoctor.workflows.opening.open_replay import open_replay
from ampdoctor.workflows.opening.request import is_run_log

if TYPE_CHECKING:
    from ampdoctor.workflows.opening.request import Progress, ReplayRequest


def profile(request: ReplayRequest, *, save: str | None = None, progress: Progress | None = None) -> Report:
    """Measure gradients, activations and weights over a run's steps, and some of these steps in half precision.

    Args:
        request: What to replay; `steps` defaults to 50, or as many as there are batches.
        save: The file to which the profile is written, if any.
        progress: Called after each step.

    Returns:
        The report. Its findings are notes and warnings, except for a run that is not finite in fp32.

    Raises:
        AmpdoctorError: The run cannot be replayed, or the file cannot be written; one sentence says why.
    """
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        try:
            taken = measure(session, start, request.steps, progress, factory=replay.factory.name)
            ranges = taken.ranges
            if not ranges.nonfinite_steps:
                ranges = shadowed(session, taken, shadow_scales(ranges, request.thresholds), progress)
        finally:
            start.restore()
            session.close()
        replay.notes.extend(taken.notes)
        run = {**replay.described(session, ranges.steps), **_saved(save), "notes": list(dict.fromkeys(replay.notes))}
        target = request.described(replay.factory.name)
    if save is not None:
        write_profile(save, ranges)
    return report_of(ranges, target, run, request.thresholds, expect_failure=request.expect_failure)


def profile_from_files(
    paths: Sequence[str], *, save: str | None = None, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> Report:
    """Show saved profiles of one run, with their steps one after the other; nothing runs.

    Args:
        paths: At least one file.
        save: The file to which all of them are written together, if any.
        thresholds: What counts as lost.

    Raises:
        AmpdoctorError: A file is not a profile, the profiles are of several runs, or `save` cannot be written.
    """
    ranges = merged_files(paths)
    if save is not None:
        write_profile(save, ranges)
    target = {**described_files(paths), "factory": ranges.run.factory or None}
    return report_of(ranges, target, {**run_of_files(paths, ranges), **_saved(save)}, thresholds)


def described_files(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the report's `target` if nothing runs."""
    return {"profile": ", ".join(paths), **({"paths": list(paths)} if len(paths) > 1 else {})}


def _saved(file: str | None) -> dict[str, str]:
    """Returns the saved file for the report's `run` section; later commands can start from it."""
    return {} if file is None else {"saved": file}


def merged_files(paths: Sequence[str]) -> RangeProfile:
    """Returns the profiles of these files, or what the logs of a run hold, as one."""
    read = [ranges_of_log(path) if is_run_log(path) else read_profile(path) for path in paths]
    return functools.reduce(merge, read)


def run_of_files(paths: Sequence[str], ranges: RangeProfile) -> dict[str, Any]:
    """Returns the report's `run` section if nothing ran."""
    facts = ranges.run
    notes = {"notes": [NOTE]} if any(map(is_run_log, paths)) else {}
    return {"precision": facts.precision, "autocast": facts.autocast, "steps": ranges.steps, "replays": 0, **notes}


def shadow_scales(ranges: RangeProfile, thresholds: Thresholds) -> tuple[float, ...]:
    """Returns the run's own loss scale, and the recommended one if it differs."""
    choice = choose_scale(ranges, thresholds)
    fits = [] if choice is None else [choice.settings.scale]
    return tuple(dict.fromkeys([ranges.run.loss_scale, *fits]))


def report_of(
    ranges: RangeProfile,
    target: Mapping[str, Any],
    run: Mapping[str, Any],
    thresholds: Thresholds,
    *,
    expect_failure: bool = False,
) -> Report:
    """Returns the report on a profile, whatever its source."""
    findings = tuple(sorted(range_findings(ranges, thresholds), key=finding_order))
    choice = None if ranges.nonfinite_steps else choose_scale(ranges, thresholds)
    return Report(
        command="profile",
        target=target,
        run=run,
        verdict=verdict_of(findings, expect_failure=expect_failure),
        findings=findings,
        checks=range_checks(ranges),
        profile=profile_section(ranges, None if choice is None else choice.settings.scale),
        thresholds=thresholds.listed(),
    )
