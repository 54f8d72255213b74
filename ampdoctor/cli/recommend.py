"""`ampdoctor recommend`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.action import Action, reporting
from ampdoctor.cli.flatten import flatten
from ampdoctor.cli.options import AdviceOptions, OutputOptions, ReplayOptions
from ampdoctor.cli.thresholds import AdviceThresholdOptions
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.request import Progress


@flatten
def recommend(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="package.module:function or path/file.py:function; or profiles that were saved, of one run.",
        ),
    ],
    replay: ReplayOptions,
    limits: AdviceThresholdOptions,
    advice: AdviceOptions,
    output: OutputOptions,
) -> Action:
    """Recommend loss-scaler settings and precision.

    Each with its evidence, and with what one replay has shown of it. The target is a factory, or profiles that were
    saved with `profile --save FILE`; from those the settings are derived without a replay.
    """
    request, files = replay.target(target, limits, allow_partial=output.allow_partial, advice=advice)

    def work(progress: Progress | None) -> Report:
        from ampdoctor.workflows import recommend as workflow

        return (
            workflow.recommend_from_files(files, request) if files else workflow.recommend(request, progress=progress)
        )

    return reporting(work, output, [*files, *replay.inputs(request.factory)])
