"""`ampdoctor plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, refuse_empty
from ampdoctor.cli.options.plan_options import BatchOptions, ClusterOptions, MemoryOptions, PlanOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.bounded_file import read_text
from ampdoctor.cli.process.process import loading
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.requests import Progress, SetAside

_MAX_BYTES = 1 << 20
"""Of a configuration: they have some kilobytes."""


@flatten
def plan(
    settings: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="What is in force: a DeepSpeed JSON, Megatron-LM's arguments, Trainer arguments as JSON or YAML, an "
            "Accelerate YAML, a torchtitan TOML, or the folder of a watched run's log. Options stand in its place.",
        ),
    ] = None,
    *,
    batch: BatchOptions,
    cluster: ClusterOptions,
    fit: MemoryOptions,
    wanted: PlanOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Keep the global batch on another number of devices.

    Which micro-batch and accumulation give it exactly, what fits, and what that changes: above all what fp16 gradients
    feel. Exit code 0 where an exact plan fits, 1 where there are only near ones.
    """
    refuse_empty("CONFIG", settings)

    def work(_: Progress | None, __: SetAside) -> Report:
        with loading():
            from ampdoctor.batching.config_files import read_settings
            from ampdoctor.batching.plans import BatchSettings
            from ampdoctor.workflows import plan as workflow

        read = BatchSettings()
        if settings is not None and Path(settings).is_dir():
            from ampdoctor.workflows.plan import batch_of_log

            read = batch_of_log(settings)
        elif settings is not None:
            read = read_settings(read_text(settings, limit=_MAX_BYTES, what="the configuration"), settings)
        return workflow.plan(wanted.request(read, settings, cluster, batch, fit))

    files = [file for file in (settings, wanted.profile) if file is not None]
    return reporting(work, output, gates, files)
