"""`ampdoctor health`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, refuse_empty
from ampdoctor.cli.options.thresholds import ThresholdOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.process import loading
from ampdoctor.cli.settings.configured import moved_in_the_file, on_the_command_line
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.opening.request import Progress, SetAside


@flatten
def health(
    context: typer.Context,
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG",
            help="The folder of a watched run, trainer_state.json, metrics.csv, a folder of event files, a .wandb "
            "file, a job's output, CSV or JSON lines; or a folder of runs. Or several.",
        ),
    ],
    *,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Judge a run over time, from its log.

    The log is ampdoctor's own or another's, of a run that has ended or that goes on. Several are shown side by side.
    """
    for log in logs:
        refuse_empty("LOG", log)
    thresholds = limits.thresholds(moved_in_the_file(context), typed=on_the_command_line(context))

    def work(progress: Progress | None, _: SetAside) -> Report:
        with loading():
            from ampdoctor.workflows import health as workflow

        return workflow.health(logs, thresholds=thresholds, progress=progress)

    return reporting(work, output, gates, logs)
