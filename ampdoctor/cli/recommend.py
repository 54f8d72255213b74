"""`ampdoctor recommend`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.action import Action, reporting
from ampdoctor.cli.flatten import flatten
from ampdoctor.cli.options import OutputOptions, ReplayOptions, refuse_empty
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.request import Progress


@flatten
def recommend(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="package.module:function, path/file.py:function, or a profile file.")
    ],
    replay: ReplayOptions,
    output: OutputOptions,
) -> Action:
    """Recommend loss-scaler settings and precision.

    Each with its evidence, and with what one replay has shown of it. The target is a factory, or a profile that was
    saved with `profile --report json=FILE`.
    """
    refuse_empty("TARGET", target)
    request = replay.request(target, allow_partial=output.allow_partial)

    def work(progress: Progress | None) -> Report:
        from ampdoctor.workflows import recommend as workflow

        return workflow.recommend(request, progress=progress)

    return reporting(work, output, replay.inputs(target))
