"""`ampdoctor scan`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.action import Action, reporting
from ampdoctor.cli.flatten import flatten
from ampdoctor.cli.options import OutputOptions, refuse_empty
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.request import Progress


@flatten
def scan(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a file, or the folder of one.")],
    output: OutputOptions,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, max=256, help="Threads that read and examine; as many as torch uses.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Sort every element by magnitude, not a sample of large tensors.")
    ] = False,
) -> Action:
    """Examine a checkpoint, without the model's code.

    Nothing that the checkpoint holds is ever executed.
    """
    refuse_empty("PATH", path)

    def work(progress: Progress | None) -> Report:
        from ampdoctor.workflows import scan as workflow

        return workflow.scan(path, progress=progress, jobs=jobs, exact=exact)

    return reporting(work, output, [path])
