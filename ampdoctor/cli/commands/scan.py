"""`ampdoctor scan`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, refuse_empty
from ampdoctor.cli.options.thresholds import ThresholdOptions
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.settings.configured import moved_in_the_file, on_the_command_line
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.opening.request import Progress, SetAside


@flatten
def scan(
    context: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH", help="A checkpoint: a file, or the folder of one or of many of one training. Or several."
        ),
    ],
    *,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="OLD", help="An earlier checkpoint of the training: what moved since?"),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Of a folder of many read every checkpoint, not only what a search needs.")
    ] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="Show what lies in it, without reading tensors or judging.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, max=256, help="Threads that read and examine; default: torch's."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Sort every element by magnitude, not a sample of large tensors.")
    ] = False,
    skip_lfs_pointers: Annotated[
        bool, typer.Option("--skip-lfs-pointers", help="Leave Git LFS pointers out, where they would be errors.")
    ] = False,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Examine a checkpoint, without the model's code.

    Nothing that the checkpoint holds is ever executed. Of a folder of many checkpoints the first sick one is found by
    halving.
    """
    for path in paths:
        refuse_empty("PATH", path)
    refuse_empty("--against", against)
    thresholds = limits.thresholds(moved_in_the_file(context), typed=on_the_command_line(context))
    _refuse_together(against=against, every=every, listing=listing, exact=exact)
    _refuse_several(paths, against=against, every=every, listing=listing)
    _refuse_pointers_left_out(asked=skip_lfs_pointers, against=against, every=every, listing=listing)

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        if listing:
            from ampdoctor.workflows.scanning.listing import list_structure

            return list_structure(paths[0])
        if against is not None:
            from ampdoctor.workflows.scanning.against import compare

            return compare(paths[0], against, progress=progress, jobs=jobs, exact=exact, thresholds=thresholds)
        if len(paths) > 1 or skip_lfs_pointers:
            from ampdoctor.workflows.scan_several import scan_several

            return scan_several(
                paths,
                progress=progress,
                jobs=jobs,
                exact=exact,
                skip_lfs_pointers=skip_lfs_pointers,
                thresholds=thresholds,
                set_aside=set_aside,
            )
        from ampdoctor.workflows import scan as workflow

        return workflow.scan(
            paths[0],
            progress=progress,
            jobs=jobs,
            exact=exact,
            every_member=every,
            thresholds=thresholds,
            set_aside=set_aside,
        )

    return reporting(work, output, gates, paths if against is None else [*paths, against])


def _refuse_together(*, against: str | None, every: bool, listing: bool, exact: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: Two of them do.
    """
    for option, given in (("--against", against is not None), ("--all", every), ("--exact", exact)):
        if listing and given:
            raise UsageError(f"--list reads no tensors, so that {option} has nothing to do: give one of the two")
    if against is not None and every:
        raise UsageError("--against compares two checkpoints and --all reads a folder of many: give one of the two")


def _refuse_several(paths: list[str], *, against: str | None, every: bool, listing: bool) -> None:
    """Refuse several paths where an option speaks of one.

    Raises:
        UsageError: There are several.
    """
    for option, given in (("--list", listing), ("--against", against is not None), ("--all", every)):
        if given and len(paths) > 1:
            raise UsageError(f"{option} takes one PATH, and {len(paths)} were given: run it once for each")


def _refuse_pointers_left_out(*, asked: bool, against: str | None, every: bool, listing: bool) -> None:
    """Refuse to leave pointers out where the one path that is named must be there.

    Raises:
        UsageError: That was asked.
    """
    for option, given in (("--list", listing), ("--against", against is not None), ("--all", every)):
        if asked and given:
            raise UsageError(f"--skip-lfs-pointers does not go with {option}: leave one of the two out")
