"""`ampdoctor profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.action import Action, reporting
from ampdoctor.cli.flatten import flatten
from ampdoctor.cli.options import OutputOptions, ReplayOptions, refuse_empty
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.request import Progress


@flatten
def profile(
    factory: Annotated[
        str, typer.Argument(metavar="FACTORY", help="package.module:function or path/file.py:function.")
    ],
    replay: ReplayOptions,
    output: OutputOptions,
) -> Action:
    """Measure ranges: what FP16, BF16 and FP8 would lose.

    Replays the run in fp32 and measures activations, gradients and weights layer by layer. The JSON report is the
    profile that `recommend` reads: --report json=FILE saves it.
    """
    refuse_empty("FACTORY", factory)
    request = replay.request(factory, allow_partial=output.allow_partial)

    def work(progress: Progress | None) -> Report:
        from ampdoctor.workflows import profile as workflow

        return workflow.profile(request, progress=progress)

    return reporting(work, output, replay.inputs(factory))
