"""`ampdoctor recommend`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import AdviceOptions, OutputOptions, ReplayOptions
from ampdoctor.cli.options.thresholds import AdviceThresholdOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.process import keep_freed_memory, loading
from ampdoctor.cli.settings.configured import moved_in_the_file, on_the_command_line
from ampdoctor.cli.settings.script_arguments import script_arguments
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.requests import Progress, SetAside


@flatten
def recommend(
    context: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="package.module:function or path/file.py:function; a script that trains, path/train.py; or profiles "
            "that were saved, of one run, or the folder of a run's log.",
        ),
    ],
    *,
    replay: ReplayOptions,
    limits: AdviceThresholdOptions,
    advice: AdviceOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Recommend loss-scaler settings and precision.

    Each with its evidence, and with what one replay has shown of it. The target is a factory, or profiles that were
    saved with `profile --save FILE`; from those the settings are derived without a replay.
    """
    typed = on_the_command_line(context)
    thresholds = limits.thresholds(moved_in_the_file(context), typed=typed)
    request, files = replay.target(
        target,
        thresholds,
        allow_partial=gates.allow_partial,
        typed=typed,
        advice=advice,
        script_arguments=script_arguments(context),
    )

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        if not (files or request.spill):
            keep_freed_memory()
        with loading():
            from ampdoctor.workflows import recommend as workflow

        if files:
            return workflow.recommend_from_files(files, request)
        return workflow.recommend(request, progress=progress, set_aside=gates.lived_with(set_aside))

    return reporting(work, output, gates, [*files, *replay.inputs(target[0])])
