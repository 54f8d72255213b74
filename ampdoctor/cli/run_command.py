"""The action of a command: `main()` calls it after parsing.

Typer turns a broken pipe and Ctrl-C into exit codes of its own, so none of our work runs inside Typer: a command
returns a function, and `main()` calls it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ampdoctor.cli import interrupt
from ampdoctor.cli.config import Config
from ampdoctor.cli.options import GateOptions, OutputOptions, files_of
from ampdoctor.cli.output import (
    Destination,
    deliver,
    destinations,
    of_rank,
    place_in_repository,
    rank_of,
    refuse_unread,
    write_file,
)
from ampdoctor.cli.process import STDOUT, StdoutClosedError, note, read_text, report_on_stderr
from ampdoctor.cli.progress import progress_line
from ampdoctor.errors import (
    EXIT_ERROR,
    EXIT_FINDINGS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    AmpdoctorError,
    CheckpointError,
    FactoryError,
    ForkedChildError,
    OutputError,
    ReplayError,
    UsageError,
)
from ampdoctor.evidence.paths import shown_path, to_be_written
from ampdoctor.evidence.report import SEVERITIES, Configuration, ErrorNote, Gate, Report
from ampdoctor.gates.baseline import Baseline, apply_baseline, baseline_of, from_text, refuse_other_command, to_text
from ampdoctor.gates.findings import apply_ignores, apply_severities
from ampdoctor.health.sinks.export import Export
from ampdoctor.live.log.facts import exit_code_ends_others
from ampdoctor.live.script import Script, run_script
from ampdoctor.reports.escape import sentence
from ampdoctor.reports.text import count
from ampdoctor.workflows.output_files import refuse_of_log
from ampdoctor.workflows.requests import Progress, SetAside, WatchRequest

if TYPE_CHECKING:
    from ampdoctor.workflows.watch_script import ScriptWatch


# -- the exit code, decided from the report alone before anything is rendered: the same for every format --


@dataclass(frozen=True, slots=True)
class Outcome:
    """An exit code, and a sentence for stderr where the code does not come from the findings."""

    code: int
    reason: str | None = None


def judge(
    report: Report,
    *,
    fail_on: Literal["error", "warning", "never"] = "error",
    exit_zero: bool = False,
    allow_partial: bool = False,
) -> Outcome:
    """Return the exit code of a report: the first of these that applies.

    1. Incomplete, without `allow_partial`: 2. Parts that were not examined may be faulty, so 0 and 1 may be wrong.
       The message offers `allow_partial` only where it would change the code.
    2. Findings at or above `fail_on`: 1, or 0 with `exit_zero`.
    3. Verdict `not_reproduced` or `inconclusive`: 2. The question has no answer yet, and a script would read 0 as
       "healthy". `exit_zero` does not change this: it applies to findings.
    4. Otherwise 0.
    """
    if not report.complete and not allow_partial:
        parts = count(len(report.errors), "part")
        accepted = _answer(report, fail_on=fail_on, exit_zero=exit_zero)
        offer = "" if accepted.code == EXIT_ERROR else "; --allow-partial accepts that"
        return Outcome(EXIT_ERROR, f"incomplete: {parts} could not be examined{offer}")
    return _answer(report, fail_on=fail_on, exit_zero=exit_zero)


def _answer(report: Report, *, fail_on: Literal["error", "warning", "never"], exit_zero: bool) -> Outcome:
    threshold = () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    if any(finding.severity in threshold for finding in report.findings):
        return Outcome(EXIT_OK if exit_zero else EXIT_FINDINGS)
    if report.verdict == "not_reproduced":
        from ampdoctor.diagnosis.replay.outcome import comparison_left_out

        cut = comparison_left_out(report)
        more = "--max-steps" if "--until-sick" in (report.target.get("options") or {}) else "--steps"
        further = f"more {more} may reach it" if cut is None else f"one that stays finite shows without {cut}"
        return Outcome(EXIT_ERROR, f"not reproduced: the failure did not come back; {further}")
    if report.verdict == "inconclusive":
        return Outcome(EXIT_ERROR, "inconclusive: what was examined does not settle whether the run is healthy")
    return Outcome(EXIT_OK)


Action: TypeAlias = Callable[[], Outcome]
Work: TypeAlias = Callable[[Progress | None, SetAside], Report]
"""Makes the report. A search that stops at the first failure must not stop at a suppressed one."""

_SHOWING_AGAIN = "merge"  # the command that shows reports of other commands again
_MAX_BASELINE = 64 * 1024 * 1024  # in bytes; a finding takes about 200


@dataclass(frozen=True, slots=True)
class ReportCommand:
    """The action of a command that makes a report: work, gates, exit code, delivery."""

    work: Work
    output: OutputOptions
    gates: GateOptions
    inputs: Sequence[str] = ()  # files that are read, and must not be overwritten
    also: Sequence[str] = ()  # files that `work` itself writes
    log: str | None = None  # the folder of the log of `work`, which must not be overwritten; it may not exist yet
    command: str = ""  # its name, and the configuration for it: `ConfiguredCommand` sets both
    config: Config = field(default_factory=Config)

    def __call__(self) -> Outcome:
        """Run the command."""
        rank = rank_of()
        gates, write = self.gates, None if rank else self.gates.write_baseline
        known = self._baseline() if gates.baseline is not None and write is None else None
        read = [file for file in (self.config.file, gates.baseline if write is None else None) if file is not None]
        written = self.also if write is None else (*self.also, write)
        places = destinations(self.output, [*self.inputs, *read], written, rank=rank, log=self.log)
        files = [*written, *(place.file for place in places if place.file != STDOUT)]
        # Before user code runs, which may change the folder. A saved report names the place where it was made.
        placed = {} if self.command == _SHOWING_AGAIN else place_in_repository()
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
            except (UsageError, OutputError) as error:  # the report is still worth delivering
                refused = error
        name = write or gates.baseline
        if known is not None and name is not None:
            report = apply_baseline(report, known, name, written=write is not None)
        report = replace(report, gate=self._gate())
        outcome = judge(report, fail_on=gates.fail_on, exit_zero=gates.exit_zero, allow_partial=gates.allow_partial)
        wanted = self.wanted(report, places, rank)
        deliver(report, wanted, self.output)
        if rank and wanted and not self.output.quiet:
            note(f"ampdoctor: rank {rank}: the report is in {wanted[0].file}")
        return outcome if refused is None else Outcome(EXIT_ERROR, str(refused))

    def wanted(self, report: Report, places: tuple[Destination, ...], rank: int) -> tuple[Destination, ...]:  # noqa: ARG002 - for subclasses
        """Return the destinations of this report: all of them."""
        return places

    def _decide(self, report: Report) -> Report:
        return apply_severities(apply_ignores(report, self.config.ignores, today()), self.config.rules)

    def _set_aside(self, known: Baseline | None) -> SetAside:
        def left(report: Report) -> Report:
            decided = self._decide(report)
            return decided if known is None else apply_baseline(decided, known, self.gates.baseline or "")

        return left

    def _deliver_failure(self, error: AmpdoctorError, places: Iterable[Destination], placed: Mapping[str, Any]) -> None:
        """Write a report about what could not be examined, for programs that read reports and not stderr."""
        # An error while writing does not replace `error`, which ends the command
        named = self.inputs[0] if self.inputs else self.command
        target = {"path": named, "location": shown_path(named)} if self.inputs else {}
        report = Report(
            command=self.command,
            target={**target, **placed},
            verdict="inconclusive",
            complete=False,
            errors=(ErrorNote(what=named, kind=error.kind, message=str(error)),),
            configuration=self._configuration(),
            gate=self._gate(),
        )
        readers = [place for place in places if not _is_for_people(place)]
        with contextlib.suppress(OutputError, StdoutClosedError):
            deliver(report, readers, self.output)

    def _gate(self) -> Gate:
        return Gate(fail_on=self.gates.fail_on, exit_zero=self.gates.exit_zero)

    def _configuration(self) -> Configuration | None:
        file = self.config.file
        return Configuration(file=file) if self.config.sets_something and file is not None else None

    def _baseline(self) -> Baseline:
        name = self.gates.baseline or ""
        baseline = from_text(read_text(name, limit=_MAX_BASELINE, what="the baseline"), name)
        if self.command != _SHOWING_AGAIN:
            refuse_other_command(baseline, self.command, name)
        return baseline


def today() -> date:
    """Return the date that ignores expire by: in UTC, so that every machine agrees. No verdict uses another clock."""
    return datetime.now(tz=UTC).date()


# -- the end of a process that runs a user's script: exactly as Python itself ends it --

_RAISED = 1  # Python's exit code after an uncaught error


_interrupted: list[KeyboardInterrupt] = []  # the one that ended the script


def answer(error: BaseException | None) -> int:
    """Print what Python prints for the error that ended a script (None: its end), and return the exit code."""
    if error is None:
        return EXIT_OK
    if isinstance(error, SystemExit):
        return _asked(error)
    asked = _show(error)
    if asked is not None:
        return asked
    if isinstance(error, KeyboardInterrupt):
        _interrupted[:] = [error]
        return EXIT_INTERRUPTED
    return _RAISED


def flush() -> None:
    """Flush the streams, as Python does after a file's last line; a stream that cannot be written is reported later."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):
            stream.flush()


def end_as_python(code: int) -> int:
    """Return the exit code of the process."""
    # Raises KeyboardInterrupt where one ended the script; it has been printed already. Python then ends by the signal,
    # after exit handlers and threads, which is how a shell's loop knows to stop.
    if _interrupted and code == EXIT_INTERRUPTED:
        sys.excepthook = lambda *_: None  # it has been printed
        raise _interrupted.pop()
    return code


def _asked(error: SystemExit) -> int:
    if error.code is None:
        return EXIT_OK
    if isinstance(error.code, int):
        return error.code
    _write(error.code)
    _write("\n")
    return _RAISED


def _show(error: BaseException) -> int | None:
    """Call the script's `sys.excepthook`, or Python's; return an exit code where the hook ends the process."""
    told = (type(error), error, error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = told
    try:
        sys.excepthook(*told)
    except SystemExit as asked:
        return _asked(asked)
    except BaseException as failed:  # noqa: BLE001 - as Python does
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
        sys.__excepthook__(*told)
    return None


def _write(what: object) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(Exception):
            sys.stderr.write(str(what))


# -- `ampdoctor run` --


@dataclass(slots=True, kw_only=True)
class _Job:
    script: Script
    request: WatchRequest
    code: int | None = None  # the script's exit code; None before it has ended
    still_open: ExitStack | None = None  # in a process that the script forked: the watch, which the parent ends
    shown: list[Report] = field(default_factory=list)  # diagnoses that were shown when they were made
    home: ExitStack = field(default_factory=ExitStack)
    tell: Callable[[Report], None] | None = None  # shows the diagnosis when it is made
    watch: ScriptWatch | None = None

    @property
    def is_one_of_several(self) -> bool:
        """Whether a launcher or other processes take an exit code other than 0 for a crash."""
        doctor = None if self.watch is None else self.watch.doctor
        return exit_code_ends_others() or (doctor is not None and doctor.place.world > 1)

    def _told(self, report: Report) -> None:
        doctor = None if self.watch is None else self.watch.doctor
        if self.tell is not None and (doctor is None or doctor.speaks):
            self.tell(report)

    def __call__(self, _progress: Progress | None, _set_aside: SetAside) -> Report:
        """Run the script under the watch; raises ForkedChildError at the end of a child that the script forked."""
        from ampdoctor.workflows.watch_script import watching

        process, folder = os.getpid(), Path.cwd()
        stack, watch = ExitStack(), None
        try:
            watch = self.watch = stack.enter_context(
                watching(self.request, tell=self._told, say=lambda said: note(f"ampdoctor: {sentence(said)}"))
            )
        except Exception as error:
            if isinstance(error, AmpdoctorError):
                raise
            _unwatched("cannot begin", error)
        interrupt.release()
        try:
            ended = run_script(self.script)
            if not self.script.is_module:
                flush()
            self.code = answer(ended)
            if watch is not None and os.getpid() == process:
                watch.ended(ended)
            del ended  # its traceback holds this frame, so the script's frames would wait for the garbage collector
        finally:
            if os.getpid() != process:
                self.still_open, stack = stack.pop_all(), ExitStack()
            try:
                stack.close()
            except Exception as error:  # noqa: BLE001 - our errors must not end a user's script
                _unwatched("has failed", error)
        if os.getpid() != process:
            raise ForkedChildError
        with contextlib.suppress(OSError):  # file names are relative to the folder of the command line
            self.home.enter_context(contextlib.chdir(folder))
        report = None if watch is None else watch.report
        logged = watch is not None and watch.has_begun
        return self._nothing_sick(logged=logged) if report is None else replace(report, command="run")

    def _nothing_sick(self, *, logged: bool) -> Report:
        target = {"factory": self.script.named, "arguments": list(self.script.arguments)}
        run = {"kept": {"health": self.request.named}} if logged else {}
        return Report(command="run", target=target, run=run, verdict="not_judged")


@dataclass(frozen=True, slots=True)
class WatchedRun(ReportCommand):
    """Runs a script, then handles the report as every command does; the script's own exit code takes precedence."""

    def __call__(self) -> Outcome:
        """Run the script."""
        job = self.work
        assert isinstance(job, _Job)  # noqa: S101 for the type checker

        def tell(report: Report) -> None:
            """Show the diagnosis now: the training may run for days."""
            decided = replace(self._decide(report), gate=self._gate())
            here = [place for place in destinations(self.output, self.inputs) if _is_for_people(place)]
            job.shown.append(report)  # if stderr fails now, it would also fail at the end
            deliver(decided, here, self.output)

        job.tell = tell
        with job.home, report_on_stderr():
            try:
                outcome = ReportCommand.__call__(self)
            except ForkedChildError:
                return Outcome(job.code or 0)
            except Exception as error:
                if not job.code and not job.is_one_of_several:
                    raise
                note(f"ampdoctor: error: {sentence(str(error) or type(error).__name__)}")
                return Outcome(job.code or 0)
        if not job.code and outcome.code and job.is_one_of_several:
            outcome = self._left_to_health(job, outcome)
        doctor = None if job.watch is None else job.watch.doctor
        if doctor is not None and doctor.place.rank == 0 and doctor.cost and not self.output.quiet:
            note(f"ampdoctor: {doctor.cost}")
        return Outcome(job.code or outcome.code, outcome.reason)

    def _left_to_health(self, job: _Job, outcome: Outcome) -> Outcome:
        """Return 0: a launcher takes any other code for a crash, and ends or restarts all processes."""
        if outcome.reason and job.shown:
            note(f"ampdoctor: {sentence(outcome.reason)}")
        if job.shown or rank_of() == 0:
            folder = shlex.quote(job.request.named or job.request.health)
            note(
                "ampdoctor: the exit code is the script's, as one of several processes; the verdict: "
                f"ampdoctor health {folder} --fail-on error"
            )
        return Outcome(0)

    def wanted(self, report: Report, places: tuple[Destination, ...], rank: int) -> tuple[Destination, ...]:
        """Return the destinations of this report: stdout only where there is something to report."""
        shown = isinstance(self.work, _Job) and bool(self.work.shown)
        if not shown and (report.findings or report.errors):
            return places
        return () if rank and not shown else tuple(place for place in places if not _is_for_people(place))


def watched_run(script: Script, request: WatchRequest, output: OutputOptions, gates: GateOptions) -> WatchedRun:
    """Return the action that runs the script under the watch, then judges and delivers the report."""
    files = () if script.is_module else (script.named,)
    job = _Job(script=script, request=request)
    exports = files_of(one for one in request.export if isinstance(one, Export))
    return WatchedRun(work=job, output=output, gates=gates, inputs=files, also=exports, log=request.health)


def _is_for_people(place: Destination) -> bool:
    return (place.format, place.file) == ("human", STDOUT)


def _unwatched(what: str, error: Exception) -> None:
    note(f"ampdoctor: internal error: the watch {what}: {type(error).__name__}: {sentence(str(error))}")
