"""What a command hands to `main()`: the work, not yet begun.

Typer only parses. It turns a broken pipe and Ctrl-C into codes of its own, so nothing of ours runs inside it: a command
returns a function, and `main()` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ampdoctor.cli.exit_code import Outcome, judge
from ampdoctor.cli.options import OutputOptions
from ampdoctor.cli.output import deliver, destinations
from ampdoctor.cli.progress import progress_line
from ampdoctor.cli.ranks import of_rank, rank_of
from ampdoctor.cli.streams import note
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.request import Progress

Action: TypeAlias = Callable[[], Outcome]


def reporting(
    work: Callable[[Progress | None], Report],
    options: OutputOptions,
    inputs: Iterable[str] = (),
    also: Iterable[str] = (),
) -> Action:
    """Return the action that does `work`, judges its report and delivers it.

    Args:
        work: Gives the report.
        options: Where it goes.
        inputs: What is read: none of it is written over.
        also: Files that `work` itself writes.
    """

    def action() -> Outcome:
        rank = rank_of()
        places = destinations(options, inputs, also, rank=rank)
        with progress_line(wanted=not (rank or options.quiet or options.no_progress)) as progress:
            report = of_rank(work(progress), rank)
        outcome = judge(
            report, fail_on=options.fail_on, exit_zero=options.exit_zero, allow_partial=options.allow_partial
        )
        deliver(report, places, options)
        if rank and not options.quiet:
            note(f"ampdoctor: rank {rank}: the report is in {places[0].file}")
        return outcome

    return action
