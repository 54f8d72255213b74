"""What a command hands to `main()`: the work, not yet begun.

Typer only parses. It turns a broken pipe and Ctrl-C into codes of its own, so nothing of ours runs inside it: a command
returns a function, and `main()` calls it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions
from ampdoctor.cli.process.bounded_file import read_text
from ampdoctor.cli.process.exit_code import Outcome, judge
from ampdoctor.cli.process.output import Destination, deliver, destinations, refuse_unread, write_file
from ampdoctor.cli.process.progress import progress_line
from ampdoctor.cli.process.ranks import of_rank, rank_of
from ampdoctor.cli.process.repository import place_in_repository
from ampdoctor.cli.process.streams import STDOUT, StdoutClosedError, note
from ampdoctor.errors import (
    EXIT_ERROR,
    AmpdoctorError,
    CheckpointError,
    FactoryError,
    OutputError,
    ReplayError,
    UsageError,
)
from ampdoctor.evidence.paths import shown_path, to_be_written
from ampdoctor.evidence.report import Configuration, ErrorNote, Gate, Report
from ampdoctor.workflows.output_files import refuse_of_log
from ampdoctor.workflows.requests import Progress, SetAside

if TYPE_CHECKING:  # they know every rule, which --help does not need
    from ampdoctor.gates.baseline import Baseline
    from ampdoctor.gates.findings import Ignore, RuleSettings

Action: TypeAlias = Callable[[], Outcome]
Work: TypeAlias = Callable[[Progress | None, SetAside], Report]
"""Makes a command's report; where it reads no more than it takes, what is set aside does not end its search."""

_SHOWING_AGAIN = "merge"
"""The command whose reports are of other commands."""
_MAX_BASELINE = 64 * 1024 * 1024
"""Bytes: of some 200 for each finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was decided before the run, in the configuration.

    Attributes:
        command: The command that runs; None where nobody has said.
        file: The configuration's file, which nothing may overwrite.
        sets: Whether it sets anything for this command; then the report names it.
        rules: Settings of rules, by code.
        ignores: Findings to set aside.
    """

    command: str | None = None
    file: str | None = None
    sets: bool = False
    rules: Mapping[str, RuleSettings] = field(default_factory=dict)
    ignores: tuple[Ignore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The action of a command that makes a report: work, gates, exit code, delivery.

    Attributes:
        work: Gives the report.
        output: Where it goes.
        gates: What its findings come to.
        inputs: What is read: none of it is written over.
        also: Files that `work` itself writes.
        log: The folder in which `work` keeps a log, no part of which is written over; it need not exist yet.
        decided: What the configuration says.
    """

    work: Work
    output: OutputOptions
    gates: GateOptions
    inputs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    log: str | None = None
    decided: Decided = field(default_factory=Decided)

    def __call__(self) -> Outcome:
        """Do it."""
        from ampdoctor.gates.baseline import baseline_of, set_known_aside, to_text

        rank = rank_of()
        gates, write = self.gates, None if rank else self.gates.write_baseline
        known = self._baseline() if gates.baseline is not None and write is None else None
        read = [file for file in (self.decided.file, gates.baseline if write is None else None) if file is not None]
        written = self.also if write is None else (*self.also, write)
        places = destinations(self.output, [*self.inputs, *read], written, rank=rank, log=self.log)
        files = [*written, *(place.file for place in places if place.file != STDOUT)]
        # found before user code runs, which may go elsewhere; a saved report has the place where it was made
        placed = {} if self.decided.command == _SHOWING_AGAIN else place_in_repository()
        if self.log is not None and not rank:
            for file in files:
                refuse_of_log(file, self.log)
        with to_be_written(files):
            try:
                with progress_line(wanted=not (rank or self.output.quiet or self.output.no_progress)) as progress:
                    report = of_rank(self.work(progress, self._set_aside(known)), rank)
            except (CheckpointError, FactoryError, ReplayError) as error:
                refuse_unread(self.inputs, files)
                self._deliver_failure(error, places, placed)
                raise
        report = self._decide(replace(report, target={**report.target, **placed}))
        report = replace(report, configuration=self._configuration())
        refused: AmpdoctorError | None = None
        if write is not None:
            try:
                made = baseline_of(report)
                write_file(write, to_text(made))
                known = made
            except (UsageError, OutputError) as error:  # the report is worth as much without it
                refused = error
        name = write or gates.baseline
        if known is not None and name is not None:
            report = set_known_aside(report, known, name, written=write is not None)
        report = replace(report, gate=self._gate())
        outcome = judge(report, fail_on=gates.fail_on, exit_zero=gates.exit_zero, allow_partial=gates.allow_partial)
        wanted = self.wanted(report, places, rank)
        deliver(report, wanted, self.output)
        if rank and wanted and not self.output.quiet:
            note(f"ampdoctor: rank {rank}: the report is in {wanted[0].file}")
        return outcome if refused is None else Outcome(EXIT_ERROR, str(refused))

    def wanted(self, report: Report, places: tuple[Destination, ...], rank: int) -> tuple[Destination, ...]:  # noqa: ARG002 - who has a say in it
        """Return where this report goes: everywhere."""
        return places

    def _decide(self, report: Report) -> Report:
        """The report with what the configuration says of its findings."""
        from ampdoctor.gates.findings import apply_ignores, apply_severities

        return apply_severities(apply_ignores(report, self.decided.ignores, today()), self.decided.rules)

    def _set_aside(self, known: Baseline | None) -> SetAside:
        from ampdoctor.gates.baseline import set_known_aside

        def left(report: Report) -> Report:
            decided = self._decide(report)
            return decided if known is None else set_known_aside(decided, known, self.gates.baseline or "")

        return left

    def _deliver_failure(self, error: AmpdoctorError, places: Iterable[Destination], placed: Mapping[str, Any]) -> None:
        """Write a report that says what could not be examined, for whoever reads a report and no sentence on stderr.

        What is written cannot hide `error`, which ends the command.
        """
        if self.decided.command is None:
            return
        named = self.inputs[0] if self.inputs else self.decided.command
        target = {"path": named, "location": shown_path(named)} if self.inputs else {}
        report = Report(
            command=self.decided.command,
            target={**target, **placed},
            verdict="inconclusive",
            complete=False,
            errors=(ErrorNote(what=named, kind=error.kind, message=str(error)),),
            configuration=self._configuration(),
            gate=self._gate(),
        )
        readers = [place for place in places if (place.format, place.file) != ("human", STDOUT)]
        with contextlib.suppress(OutputError, StdoutClosedError):
            deliver(report, readers, self.output)

    def _gate(self) -> Gate:
        return Gate(fail_on=self.gates.fail_on, exit_zero=self.gates.exit_zero)

    def _configuration(self) -> Configuration | None:
        file = self.decided.file
        return Configuration(file=file) if self.decided.sets and file is not None else None

    def _baseline(self) -> Baseline:
        from ampdoctor.gates.baseline import from_text, refuse_other_command

        name = self.gates.baseline or ""
        if not os.path.lexists(name):
            why = f"No such file or directory; `{shlex.join(['--write-baseline', name])}` makes one"
            raise UsageError(f"cannot read the baseline {name}: {why}")
        baseline = from_text(read_text(name, limit=_MAX_BASELINE, what="the baseline"), name)
        if self.decided.command is not None and self.decided.command != _SHOWING_AGAIN:
            refuse_other_command(baseline, self.decided.command, name)
        return baseline


def today() -> date:
    """The day by which ignores expire: in UTC, so that every machine says the same. The only clock in a verdict."""
    return datetime.now(tz=UTC).date()


def reporting(
    work: Work,
    output: OutputOptions,
    gates: GateOptions,
    inputs: Iterable[str] = (),
    also: Iterable[str] = (),
) -> Examination:
    """Return the action that does `work`, judges its report and delivers it; arguments are those of `Examination`."""
    return Examination(work=work, output=output, gates=gates, inputs=tuple(inputs), also=tuple(also))
