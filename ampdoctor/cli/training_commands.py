"""`ampdoctor run` and `ampdoctor health`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from ampdoctor.cli.configured_command import moved_in_the_file
from ampdoctor.cli.options import ExportOptions, GateOptions, OutputOptions, ThresholdOptions, files_of, flatten
from ampdoctor.cli.plan_command import bytes_of
from ampdoctor.cli.process import loading
from ampdoctor.cli.run_command import Action, run_command, run_watched
from ampdoctor.cli.suggest import close_file, no_script
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.live.script import Script, script_at
from ampdoctor.workflows.output_files import usual_folder
from ampdoctor.workflows.requests import USUAL_EVERY, USUAL_PROBATION, Look, OnSick, Progress, SetAside, WatchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How a training is watched, and what is kept of it."""

    health: Annotated[
        str | None,
        Option(metavar="DIR", help="Folder of the log and the bundles [default: ampdoctor-health/TIME-NAME]."),
    ] = None
    every: Annotated[int, Option(metavar="N", min=1, help="Steps from one close measurement to the next.")] = (
        USUAL_EVERY
    )
    on_sick: Annotated[
        OnSick,
        Option(
            help="record: look, log, keep a bundle, and let the training go on. stop: the same, then end it with code "
            "1."
        ),
    ] = "record"
    look: Annotated[
        Look,
        Option(
            help="When a sick step is run again: auto: before its update wherever no device has to be waited for. "
            "sync: everywhere, waiting for the device once a step. off: never."
        ),
    ] = "auto"
    guard: Annotated[bool, Option("--guard", help="Let a fused optimizer hold a sick update back on the device.")] = (
        False
    )
    bundle_max: Annotated[str, Option(metavar="SIZE", help="The most that a bundle takes, as in 512MB.")] = "4GB"
    checkpoints: Annotated[
        str | None,
        Option(
            metavar="DIR", help="Folder that the training saves to. Its last two good checkpoints stay in --health."
        ),
    ] = None
    probation: Annotated[int, Option(metavar="N", help="Clean steps after which a finite checkpoint is good.")] = (
        USUAL_PROBATION
    )
    good_max: Annotated[
        str, Option(metavar="SIZE", help="The most that copies of checkpoints take; links take nothing.")
    ] = "20GB"
    record_batches: Annotated[
        int,
        Option(
            metavar="K",
            min=0,
            help="Keep the batches of the last K updates, where a GPU tells that a step is sick only after its update: "
            "its bundle is then replayed from a checkpoint from before them. They stay on the GPU, and take as much as "
            "--bundle-max at most. 0 keeps none.",
        ),
    ] = 0
    no_bundle: Annotated[bool, Option("--no-bundle", help="Keep no bundle.")] = False


@flatten
def run(
    context: Context,
    script: Annotated[
        str, Argument(metavar="SCRIPT", help="The script that trains; with -m a module. As it is: nothing is added.")
    ],
    arguments: Annotated[
        list[str] | None, Argument(metavar="ARGS", help="The script's own arguments: all that follows it.")
    ] = None,
    *,
    module: Annotated[
        bool, Option("-m", "--module", allow_from_autoenv=False, help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    watch: WatchOptions,
    exporting: ExportOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Run a training script as it is, and watch it.

    The script keeps its own arguments, output and signals. On stderr a line at the start says where the log is, and one
    at the end what was seen. The exit code is the script's where that is not 0, else that of the findings. Options
    stand before SCRIPT. With torchrun: torchrun -m ampdoctor run SCRIPT.
    """
    given = tuple(arguments or ())
    named = _named(script, given, is_module=module)
    health = watch.health or usual_folder(script, is_module=module)
    request = WatchRequest(
        health=str(Path(health).absolute()),
        named=health,
        script=script,
        is_module=module,
        arguments=given,
        command=tuple(sys.orig_argv),
        every=watch.every,
        on_sick=watch.on_sick,
        look=watch.look,
        guard=watch.guard,
        bundle=not watch.no_bundle,
        bundle_max=bytes_of("--bundle-max", watch.bundle_max),
        checkpoints=watch.checkpoints,
        probation=watch.probation,
        good_max=bytes_of("--good-max", watch.good_max),
        record_batches=watch.record_batches,
        export=exporting.exports(),
        thresholds=limits.thresholds(moved_in_the_file(context)),
    )
    return partial(run_watched, named, request, output, gates)


def _named(script: str, arguments: tuple[str, ...], *, is_module: bool) -> Script:
    if is_module:
        if script.endswith(".py"):
            raise UsageError(f"-m {script}: a module is named without .py; a file without -m")
        return Script(named=script, arguments=arguments, is_module=True)
    other = no_script(script)
    if other is not None:
        raise UsageError(other)
    try:
        return script_at(script, arguments)
    except UsageError as error:
        near = close_file(script)
        raise UsageError(f"{error}; is {near} meant?" if near is not None else str(error)) from None


@flatten
def health(
    context: Context,
    logs: Annotated[
        list[str],
        Argument(
            metavar="LOG",
            help="The folder of a watched run, trainer_state.json, metrics.csv, a folder of event files, a .wandb "
            "file, a job's output, CSV or JSON lines; or a folder of runs. Or several.",
        ),
    ],
    *,
    following: Annotated[
        bool,
        Option(
            "--follow", help="Show the log while it grows, here or on another machine, and judge it once it has ended."
        ),
    ] = False,
    exporting: ExportOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Judge a run over time, from its log.

    The log is ampdoctor's own or another's, of a run that has ended or that goes on. Several are shown side by side.
    """
    if following and len(logs) > 1:
        raise UsageError(f"--follow takes one LOG, and {len(logs)} were given: follow each in a terminal of its own")
    if exporting.export and len(logs) > 1:
        raise UsageError(f"--export takes one LOG, and {len(logs)} were given: export each by itself")
    thresholds = limits.thresholds(moved_in_the_file(context))
    exports = exporting.exports()

    def work(progress: Progress | None, _: SetAside) -> Report:
        with loading():
            from ampdoctor.workflows import health as workflow

        if following:
            from ampdoctor.cli.follow import follow

            follow(logs[0], output, thresholds=thresholds)
        return workflow.health(logs, thresholds=thresholds, export=exports, progress=progress)

    return partial(run_command, work, output, gates, logs, also=files_of(exports))
