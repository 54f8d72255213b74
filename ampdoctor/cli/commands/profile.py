"""`ampdoctor profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, ReplayOptions, refuse_empty
from ampdoctor.cli.options.thresholds import AdviceThresholdOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.process import keep_freed_memory, loading
from ampdoctor.cli.process.ranks import own_file, rank_of
from ampdoctor.cli.settings.configured import moved_in_the_file, on_the_command_line
from ampdoctor.cli.settings.script_arguments import script_arguments
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.requests import Progress, SetAside


@flatten
def profile(
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
    gates: GateOptions,
    output: OutputOptions,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="Save the profile here, for `recommend` and `profile`.")
    ] = None,
) -> Action:
    """Measure ranges: what FP16, BF16 and FP8 would lose.

    Replays the run in fp32 and measures activations, gradients and weights layer by layer, and some steps in fp16
    beside it. --save keeps the measurement: saved profiles are shown, merged and read by `recommend` without running
    anything again.
    """
    refuse_empty("--save", save)
    save = None if save is None else own_file(save, rank_of())
    typed = on_the_command_line(context)
    thresholds = limits.thresholds(moved_in_the_file(context), typed=typed)
    request, files = replay.target(
        target,
        thresholds,
        allow_partial=gates.allow_partial,
        typed=typed,
        script_arguments=script_arguments(context),
    )

    def work(progress: Progress | None, _: SetAside) -> Report:
        if not (files or request.spill):
            keep_freed_memory()
        with loading():
            from ampdoctor.workflows import profile as workflow

        if files:
            return workflow.profile_from_files(files, save=save, thresholds=request.thresholds)
        return workflow.profile(request, save=save, progress=progress)

    return reporting(work, output, gates, [*files, *replay.inputs(target[0])], [] if save is None else [save])
