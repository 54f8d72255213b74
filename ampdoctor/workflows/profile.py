"""`profile`: what half precision would lose, place by place, along an fp32 reference of the run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampdoctor.evidence.report import Report, finding_order, verdict_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.ranges.profile import RangeProfile, merge
from ampdoctor.scaling.choice import choose_scale
from ampdoctor.workflows.measuring.measure import measure
from ampdoctor.workflows.measuring.profile_file import read_profile, write_profile
from ampdoctor.workflows.measuring.range_findings import range_checks, range_findings
from ampdoctor.workflows.measuring.range_section import profile_section
from ampdoctor.workflows.measuring.shadow_steps import shadowed
from ampdoctor.workflows.opening.open_replay import open_replay

if TYPE_CHECKING:
    from ampdoctor.workflows.opening.request import Progress, ReplayRequest


def profile(request: ReplayRequest, *, save: str | None = None, progress: Progress | None = None) -> Report:
    """Measure gradients, activations and weights over the steps of a run, and some of these steps in half precision.

    Args:
        request: What to replay; `steps` defaults to 50, or as many as there are batches.
        save: A file that is to hold the profile.
        progress: Told after each step.

    Returns:
        The report. Findings are notes and warnings, but for a run that is not finite in fp32.

    Raises:
        AmpdoctorError: The run cannot be replayed, or the file cannot be written, in one sentence.
    """
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        try:
            taken = measure(session, start, request.steps, progress, factory=replay.factory.name)
            ranges = taken.ranges
            if not ranges.nonfinite_steps:
                ranges = shadowed(session, start, taken, shadow_scales(ranges, request.thresholds), progress)
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
    """Show saved profiles of one run, their steps one after the other; nothing runs.

    Args:
        paths: At least one.
        save: A file that is to hold all of them together.
        thresholds: What counts as lost.

    Raises:
        AmpdoctorError: A file is no profile, they are not of one run, or `save` cannot be written.
    """
    ranges = merged_files(paths)
    if save is not None:
        write_profile(save, ranges)
    target = {**described_files(paths), "factory": ranges.run.factory or None}
    return report_of(ranges, target, {**run_of_file(ranges), **_saved(save)}, thresholds)


def described_files(paths: Sequence[str]) -> dict[str, Any]:
    """The report's `target` where nothing runs."""
    return {"profile": ", ".join(paths), **({"paths": list(paths)} if len(paths) > 1 else {})}


def _saved(file: str | None) -> dict[str, str]:
    """The file from which others can go on, for the report's `run` section."""
    return {} if file is None else {"saved": file}


def merged_files(paths: Sequence[str]) -> RangeProfile:
    """The profiles of these files as one."""
    return functools.reduce(merge, [read_profile(path) for path in paths])


def run_of_file(ranges: RangeProfile) -> dict[str, Any]:
    """The report's `run` section where nothing ran."""
    facts = ranges.run
    return {"precision": facts.precision, "autocast": facts.autocast, "steps": ranges.steps, "replays": 0}


def shadow_scales(ranges: RangeProfile, thresholds: Thresholds) -> tuple[float, ...]:
    """The run's own loss scale, and the one that fits where it is another."""
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
    """The report on a profile, wherever that came from."""
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
