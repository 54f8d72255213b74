"""`ampdoctor health`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from ampdoctor.cli.options.export_options import ExportOptions, files_of
from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, refuse_empty
from ampdoctor.cli.options.thresholds import ThresholdOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.process import loading
from ampdoctor.cli.settings.configured import moved_in_the_file, on_the_command_line
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.sinks.export import Export
from ampdoctor.workflows.requests import Progress, SetAside


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """Whether a log is looked at once, or while it grows."""

    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Show the log while it grows, here or on another machine, and judge it once it has ended."
        ),
    ] = False

    def work(
        self,
        exports: tuple[Export, ...],
        logs: list[str],
        thresholds: Thresholds,
        output: OutputOptions,
        progress: Progress | None,
        _: SetAside,
    ) -> Report:
        """Do what is asked."""
        with loading():
            from ampdoctor.workflows import health as workflow

        if self.follow:
            from ampdoctor.cli.process.following.follow import follow

            follow(logs[0], output, thresholds=thresholds)
        return workflow.health(logs, thresholds=thresholds, export=exports, progress=progress)


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
    asked: FollowOptions,
    exporting: ExportOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Judge a run over time, from its log.

    The log is ampdoctor's own or another's, of a run that has ended or that goes on. Several are shown side by side.
    """
    for log in logs:
        refuse_empty("LOG", log)
    if asked.follow and len(logs) > 1:
        raise UsageError(f"--follow takes one LOG, and {len(logs)} were given: follow each in a terminal of its own")
    if exporting.export and len(logs) > 1:
        raise UsageError(f"--export takes one LOG, and {len(logs)} were given: export each by itself")
    thresholds = limits.thresholds(moved_in_the_file(context), typed=on_the_command_line(context))
    exports = exporting.exports()
    work = functools.partial(asked.work, exports, logs, thresholds, output)
    return reporting(work, output, gates, logs, also=files_of(exports))
