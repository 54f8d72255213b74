"""`ampdoctor scan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from typer import Argument, Context, Option

from ampdoctor.cli.configured_command import moved_in_the_file
from ampdoctor.cli.options import GateOptions, OutputOptions, ThresholdOptions, flatten
from ampdoctor.cli.process import loading
from ampdoctor.cli.run_command import Action, run_command
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.requests import Progress, SetAside


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """Which parts of a checkpoint are read, and how closely."""

    against: Annotated[
        str | None, Option(metavar="OLD", help="An earlier checkpoint of the training: what moved since?")
    ] = None
    every: Annotated[
        bool, Option("--all", help="Of a folder of many read every checkpoint, not only what a search needs.")
    ] = False
    listing: Annotated[bool, Option("--list", help="Show what lies in it, without reading tensors or judging.")] = False
    jobs: Annotated[
        int | None, Option(hidden=True, min=1, max=256, help="Threads that read and examine; none: torch's.")
    ] = None
    exact: Annotated[
        bool, Option("--exact", hidden=True, help="true: sort every element, not a sample of large tensors.")
    ] = False
    skip_lfs_pointers: Annotated[
        bool, Option("--skip-lfs-pointers", help="Leave Git LFS pointers out, where they would be errors.")
    ] = False

    def refuse_contradictions(self, paths: list[str]) -> None:
        """Raise UsageError for options that contradict each other, or the number of paths."""
        of_one = {"--list": self.listing, "--against": self.against is not None, "--all": self.every}
        given = [option for option, typed in of_one.items() if typed]
        tensors = {**of_one, "--threshold exact": self.exact, "--list": False}
        for option in (option for option, typed in tensors.items() if typed and self.listing):
            raise UsageError(f"--list reads no tensors, so that {option} has nothing to do: give one of the two")
        if self.against is not None and self.every:
            raise UsageError("--against compares two checkpoints and --all reads a folder of many: give one of the two")
        if given and len(paths) > 1:
            raise UsageError(f"{given[0]} takes one PATH, and {len(paths)} were given: run it once for each")
        if given and self.skip_lfs_pointers:
            raise UsageError(f"--skip-lfs-pointers does not go with {given[0]}: leave one of the two out")


@flatten
def scan(
    context: Context,
    paths: Annotated[
        list[str],
        Argument(
            metavar="PATH", help="A checkpoint: a file, or the folder of one or of many of one training. Or several."
        ),
    ],
    *,
    asked: ScanOptions,
    limits: ThresholdOptions,
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Examine a checkpoint, without the model's code.

    Nothing that the checkpoint holds is ever executed. Of a folder of many checkpoints the first sick one is found by
    halving.
    """
    thresholds = limits.thresholds(moved_in_the_file(context))
    asked.refuse_contradictions(paths)

    def work(progress: Progress | None, set_aside: SetAside) -> Report:
        """Run the scan; each workflow is imported only where it is needed, so that `--help` is fast."""
        if asked.listing:
            with loading():
                from ampdoctor.workflows.scan_checkpoint import list_structure

            return list_structure(paths[0])
        how: dict[str, Any] = {"progress": progress, "jobs": asked.jobs, "exact": asked.exact, "thresholds": thresholds}
        if asked.against is not None:
            with loading():
                from ampdoctor.workflows.scan_against import compare

            return compare(paths[0], asked.against, **how)
        how |= {"whole": gates.write_baseline is not None, "set_aside": set_aside}  # a baseline holds every checkpoint
        with loading():
            from ampdoctor.workflows import scan as workflow

        if len(paths) > 1 or asked.skip_lfs_pointers:
            return workflow.scan_several(paths, skip_lfs_pointers=asked.skip_lfs_pointers, **how)
        return workflow.scan(paths[0], every_member=asked.every, **how)

    return partial(run_command, work, output, gates, paths if asked.against is None else [*paths, asked.against])
