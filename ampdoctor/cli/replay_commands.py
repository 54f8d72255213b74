"""`ampdoctor bisect-nan`, `ampdoctor profile` and `ampdoctor recommend`."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

from typer import Argument, Context, Option

from ampdoctor.cli.configured_command import moved_in_the_file, on_the_command_line, script_arguments
from ampdoctor.cli.options import GateOptions, OutputOptions, ReplayOptions, ThresholdOptions, flatten
from ampdoctor.cli.output import own_file, rank_of
from ampdoctor.cli.process import keep_freed_memory, loading
from ampdoctor.cli.run_command import Action, run_command
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.targets import DEFAULT_TARGET, TARGETS, Framework
from ampdoctor.workflows.requests import MOST_UNTIL_SICK, Progress, ReplayRequest, SetAside, is_profile

Targets = Annotated[
    list[str],
    Argument(
        metavar="TARGET",
        help="package.module:function or path/file.py:function; a script that trains, path/train.py; or profiles "
        "that were saved, of one run, or the folder of a run's log.",
    ),
]


@flatten
def bisect_nan(
    context: Context,
    factory: Annotated[
        str,
        Argument(
            metavar="FACTORY",
            help="package.module:function or path/file.py:function; or a script that trains, path/train.py.",
        ),
    ],
    replay: ReplayOptions,
    *,
    compare_steps: Annotated[
        int | None,
        Option(
            metavar="N", min=0, help="How many steps of a run that stays finite are held beside fp32 [default: all]."
        ),
    ] = None,
    no_compare: Annotated[
        bool, Option("--no-compare", help="Hold none beside fp32: only look for NaN and Inf.")
    ] = False,
    until_sick: Annotated[
        bool,
        Option(
            "--until-sick",
            help="Run on until a step is not finite, with only the cheap look on the way, and then look closely.",
        ),
    ] = False,
    max_steps: Annotated[
        int | None, Option(metavar="N", min=1, help=f"How far --until-sick runs at most [default: {MOST_UNTIL_SICK}].")
    ] = None,
    skip_batches: Annotated[
        str | None,
        Option(
            metavar="N|checkpoint",
            help="Micro-batches to pass over; checkpoint: those of its steps [default: 0, with --until-sick: "
            "checkpoint].",
        ),
    ] = None,
    fresh_scaler: Annotated[
        bool,
        Option("--fresh-scaler", help="Start with the loss scaler as the factory makes it, not with the checkpoint's."),
    ] = False,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Find what goes non-finite first, why, and a proven cure.

    Replays the run's first steps and names the step, module, op and source line, the cause with its numbers, and the
    smallest change with which the same steps stay finite.
    """
    thresholds = limits.thresholds(moved_in_the_file(context))
    request = replay.request(factory, allow_partial=gates.allow_partial, script_arguments=script_arguments(context))
    if no_compare and compare_steps:
        raise UsageError(f"--no-compare and --compare-steps {compare_steps} say two things: give one of them")
    compared = 0 if no_compare else compare_steps
    skipped: Any = skip_batches  # "checkpoint", or a number
    if skip_batches not in (None, "checkpoint"):
        if not re.fullmatch("[0-9]{1,9}", skip_batches):
            raise UsageError(f"--skip-batches {skip_batches}: a number of micro-batches, or checkpoint")
        skipped = int(skip_batches)
    if fresh_scaler and request.checkpoint is None:
        raise UsageError("--fresh-scaler stands in for a checkpoint's scaler: without --checkpoint it is fresh anyway")
    request = replace(
        request,
        compare_steps=compared,
        fresh_scaler=fresh_scaler,
        thresholds=thresholds,
        until_sick=until_sick,
        max_steps=max_steps,
        skip_batches=skipped,
    )

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        if not request.spill:
            keep_freed_memory()
        with loading():
            from ampdoctor.workflows import bisect_nan as workflow

        return workflow.bisect_nan(request, progress=progress, set_aside=gates.lived_with(set_aside))

    return partial(run_command, work, output, gates, replay.inputs(factory))


@flatten
def profile(
    context: Context,
    target: Targets,
    *,
    replay: ReplayOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
    save: Annotated[
        str | None, Option(metavar="FILE", help="Save the profile here, for `recommend` and `profile`.")
    ] = None,
) -> Action:
    """Measure ranges: what FP16, BF16 and FP8 would lose.

    Replays the run in fp32 and measures activations, gradients and weights layer by layer, and some steps in fp16
    beside it. --save keeps the measurement: a saved profile is shown, and read by `recommend`, without running anything
    again.
    """
    also = [] if save is None else [own_file(save, rank_of())]
    request, file, inputs = _asked(context, target, replay, limits, gates)

    def work(progress: Progress | None, _: SetAside) -> Report:
        if not (file or request.spill):
            keep_freed_memory()
        with loading():
            from ampdoctor.workflows import profile as workflow

        into = also[0] if also else None
        if file is not None:
            return workflow.profile_from_file(file, save=into, thresholds=request.thresholds)
        return workflow.profile(request, save=into, progress=progress)

    return partial(run_command, work, output, gates, inputs, also)


@flatten
def recommend(
    context: Context,
    target: Targets,
    *,
    replay: ReplayOptions,
    limits: ThresholdOptions,
    emit: Annotated[
        Framework | None, Option(help="Print the settings for this framework, whose scaler is then simulated.")
    ] = None,
    hardware: Annotated[
        str, Option("--target", metavar="HARDWARE", help=f"Recommend a precision for: {', '.join(TARGETS)}.")
    ] = DEFAULT_TARGET,
    precision_matters: Annotated[
        bool, Option("--precision-matters", help="bf16's 8 bits are too few (training and sampling must agree).")
    ] = False,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Recommend loss-scaler settings and precision.

    Each with its evidence, and with what one replay has shown of it. The target is a factory, or a profile that was
    saved with `profile --save FILE`; from that the settings are derived without a replay.
    """
    request, file, inputs = _asked(context, target, replay, limits, gates)
    request = replace(request, emit=emit, target=hardware, precision_matters=precision_matters)

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        if not (file or request.spill):
            keep_freed_memory()
        with loading():
            from ampdoctor.workflows import recommend as workflow

        if file is not None:
            return workflow.recommend_from_file(file, request)
        return workflow.recommend(request, progress=progress, set_aside=gates.lived_with(set_aside))

    return partial(run_command, work, output, gates, inputs)


def _asked(
    context: Context, targets: list[str], replay: ReplayOptions, limits: ThresholdOptions, gates: GateOptions
) -> tuple[ReplayRequest, str | None, list[str]]:
    """Return the request for the workflows, the saved profile where that is the target, and the files that are read.

    Raises UsageError for several targets, and for options of a replay where nothing runs.
    """
    if len(targets) > 1:
        raise UsageError(f"{targets[1]} is one target too many: give one factory, or one profile (they do not add up)")
    file = targets[0] if is_profile(targets[0]) else None
    arguments, typed = script_arguments(context), on_the_command_line(context)
    given = [typed[option.name] for option in fields(ReplayOptions) if option.name in typed]
    given += ["what follows --"] if arguments else []
    if file is not None and given:  # a setting from a file applies only to the runs that it fits
        raise UsageError(f"{', '.join(given)}: only for a replay, and a saved profile runs nothing")
    request = replay.request(targets[0], allow_partial=gates.allow_partial, script_arguments=arguments)
    request = replace(request, thresholds=limits.thresholds(moved_in_the_file(context)))
    return request, file, [*([] if file is None else [file]), *replay.inputs(targets[0])]
