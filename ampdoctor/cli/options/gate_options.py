"""The options that say what the findings come to: what fails a run, and what has been decided about it before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from ampdoctor.cli.options.options import refuse_empty
from ampdoctor.workflows.requests import SetAside, set_all_aside

FailOn = Literal["error", "warning", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """What exit code the report means."""

    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="Exit with 1 for findings of this severity and worse.")
    ] = "error"
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 where findings would exit with 1; other codes stay.")
    ] = False
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Accept a checkpoint that fits the model only in part, and an incomplete report that has a verdict.",
        ),
    ] = False
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="Set aside what is known there; only what is new counts."),
    ] = None
    write_baseline: Annotated[
        str | None,
        typer.Option(
            "--write-baseline", metavar="FILE", help="Write what is found as the baseline: from now on known."
        ),
    ] = None

    def __post_init__(self) -> None:
        refuse_empty("--baseline", self.baseline)
        refuse_empty("--write-baseline", self.write_baseline)

    def lived_with(self, set_aside: SetAside) -> SetAside:
        """What a replay goes on behind: what is set aside, and all failures where a baseline is to hold all of them."""
        return set_aside if self.write_baseline is None else lambda report: set_all_aside(set_aside(report))
