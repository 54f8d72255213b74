"""What a command does after parsing: work, gates, report, exit code; and `run`, which watches a script on the way.

Typer turns a broken pipe and Ctrl-C into exit codes of its own, so none of our work runs inside Typer: a command
returns a function, and `main()` calls it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ampdoctor.cli import interrupt
from ampdoctor.cli.config import Config
from ampdoctor.cli.options import FailOn, GateOptions, OutputOptions, files_of
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
from ampdoctor.cli.process import STDOUT, StdoutClosedError, note, progress_line, read_text, report_on_stderr
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
from ampdoctor.workflows.output_files import is_run_log, refuse_of_log
from ampdoctor.workflows.requests import Progress, SetAside, WatchRequest

if TYPE_CHECKING:
    from ampdoctor.evidence.report_target import Run
    from ampdoctor.workflows.watch import ScriptWatch
    from ampdoctor.workflows.watcher import TrainingWatcher

Places: TypeAlias = tuple[Destination, ...]


# -- the exit code, decided from the report alone before anything is rendered: the same for every format --


@dataclass(frozen=True, slots=True)
class Outcome:
    """An exit code, and a sentence for stderr where the code does not come from the findings."""

    code: int
    reason: str | None = None


def judge(
    report: Report, *, fail_on: FailOn = "error", exit_zero: bool = False, allow_partial: bool = False
) -> Outcome:
    """Return the exit code of a report: the first of these that applies.

    1. Incomplete, without `allow_partial`: 2. Parts that were not examined may be faulty, so 0 and 1 may be wrong.
       The message offers `allow_partial` only where it would change the code.
    2. Findings at or above `fail_on`: 1, or 0 with `exit_zero`.
    3. Verdict `not_reproduced` or `inconclusive`: 2. The question has no answer yet, and a script would read 0 as
       "healthy". `exit_zero` does not change this: it applies to findings.
    4. Otherwise 0; with a sentence where nothing was judged, as 0 would be read as "healthy" there, too.
    """
    if not report.complete and not allow_partial:
        parts = count(len(report.errors), "part")
        accepted = _answer(report, fail_on=fail_on, exit_zero=exit_zero)
        offer = "" if accepted.code == EXIT_ERROR else "; --allow-partial accepts that"
        return Outcome(EXIT_ERROR, f"incomplete: {parts} could not be examined{offer}")
    return _answer(report, fail_on=fail_on, exit_zero=exit_zero)


def _answer(report: Report, *, fail_on: FailOn, exit_zero: bool) -> Outcome:
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
    if report.verdict == "not_judged" and report.command in ("scan", "health") and report.structure is None:
        return Outcome(EXIT_OK, "not judged: nothing that was read shows whether it is healthy")
    return Outcome(EXIT_OK)


Action: TypeAlias = Callable[..., Outcome]
Work: TypeAlias = Callable[[Progress | None, SetAside], Report]
"""Makes the report. A search that stops at the first failure must not stop at a suppressed one."""

_SHOWING_AGAIN = "merge"  # the command that shows reports of other commands again
_MAX_BASELINE = 64 * 1024 * 1024  # in bytes; a finding takes about 200


def run_command(
    work: Work,
    output: OutputOptions,
    gates: GateOptions,
    inputs: Sequence[str] = (),
    also: Sequence[str] = (),
    *,
    command: str,
    config: Config,
    log: str | None = None,
    wanted: Callable[[Report, Places], Places] = lambda _, places: places,
) -> Outcome:
    """Run a command: its work, the gates, the report, the exit code.

    `inputs` are files that are read and must not be overwritten, `also` files that `work` itself writes, and `log` is
    the folder of its log, which may not exist yet. `wanted` chooses the destinations of a report.
    """
    rank = rank_of()
    write = None if rank else gates.write_baseline
    name = write or gates.baseline
    known = None if write or name is None else _baseline(name, command)
    read = [file for file in (config.file, None if write else gates.baseline) if file is not None]
    written = also if write is None else (*also, write)
    places = destinations(output, [*inputs, *read], written, rank=rank, log=log)
    files = [*written, *(place.file for place in places if place.file != STDOUT)]
    # Before user code runs, which may change the folder. A saved report names the place where it was made.
    placed = {} if command == _SHOWING_AGAIN else place_in_repository()
    if log is not None and not rank:
        for file in files:
            refuse_of_log(file, log)

    def set_aside(report: Report) -> Report:
        decided = _decided(report, config)
        return decided if known is None else apply_baseline(decided, known, name or "")

    with to_be_written(files):
        try:
            with progress_line(wanted=not (rank or output.quiet or output.no_progress)) as progress:
                report = of_rank(work(progress, set_aside), rank)
        except (CheckpointError, FactoryError, ReplayError) as error:
            refuse_unread(inputs, files)
            readers = [place for place in places if not _is_for_people(place)]
            # An error while writing does not replace `error`, which ends the command
            with contextlib.suppress(OutputError, StdoutClosedError):
                deliver(replace(_failure(error, inputs, placed, command, config), gate=_gate(gates)), readers, output)
            raise
    report = _decided(replace(report, target={**report.target, **placed}), config)
    report = replace(report, configuration=_configuration(config))
    refused: AmpdoctorError | None = None
    if write is not None:
        try:
            made = baseline_of(report)
            write_file(write, to_text(made))
            known = made
        except (UsageError, OutputError) as error:  # the report is still worth delivering
            refused = error
    if known is not None and name is not None:
        report = apply_baseline(report, known, name, written=write is not None)
    report = replace(report, gate=_gate(gates))
    outcome = judge(report, fail_on=gates.fail_on, exit_zero=gates.exit_zero, allow_partial=gates.allow_partial)
    chosen = wanted(report, places)
    deliver(report, chosen, output, made_at=None if command == _SHOWING_AGAIN else time.time())
    if rank and chosen and not output.quiet:
        note(f"ampdoctor: rank {rank}: the report is in {chosen[0].file}")
    return outcome if refused is None else Outcome(EXIT_ERROR, str(refused))


def _decided(report: Report, config: Config) -> Report:
    return apply_severities(apply_ignores(report, config.ignores, today()), config.rules)


def _gate(gates: GateOptions) -> Gate:
    return Gate(fail_on=gates.fail_on, exit_zero=gates.exit_zero)


def _configuration(config: Config) -> Configuration | None:
    """Return the file, where it sets anything for the command."""
    sets = config.values or config.rules or config.ignores
    return Configuration(file=config.file) if sets and config.file is not None else None


def _failure(
    error: AmpdoctorError, inputs: Sequence[str], placed: Mapping[str, Any], command: str, config: Config
) -> Report:
    """Return a report about what could not be examined, for programs that read reports and not stderr."""
    named = inputs[0] if inputs else command
    target = {"path": named, "location": shown_path(named)} if inputs else {}
    return Report(
        command=command,
        target={**target, **placed},
        verdict="inconclusive",
        complete=False,
        errors=(ErrorNote(what=named, kind=error.kind, message=str(error)),),
        configuration=_configuration(config),
    )


def _baseline(name: str, command: str) -> Baseline:
    baseline = from_text(read_text(name, limit=_MAX_BASELINE, what="the baseline"), name)
    if command != _SHOWING_AGAIN:
        refuse_other_command(baseline, command, name)
    return baseline


def _is_for_people(place: Destination) -> bool:
    return (place.format, place.file) == ("human", STDOUT)


def today() -> date:
    """Return the date that ignores expire by: in UTC, so that every machine agrees. No verdict uses another clock."""
    return datetime.now(tz=UTC).date()


# -- the end of a process that runs a user's script: exactly as Python itself ends it --

_RAISED = 1  # Python's exit code after an uncaught error
_interrupted: list[KeyboardInterrupt] = []  # the one that ended the script


def answer(error: BaseException | None) -> int:
    """Print what Python prints for the error that ended a script (None: its end), and return the exit code."""
    if error is not None and not isinstance(error, SystemExit):
        told = (type(error), error, error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = told
        try:
            sys.excepthook(*told)
        except SystemExit as asked:
            error = asked
        except BaseException as failed:  # noqa: BLE001 - as Python does
            sys.__excepthook__(type(failed), failed, failed.__traceback__)
            sys.__excepthook__(*told)
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or EXIT_OK
        for part in (error.code, "\n"):
            with contextlib.suppress(Exception):
                sys.stderr.write(str(part))
        return _RAISED
    if isinstance(error, KeyboardInterrupt):
        _interrupted[:] = [error]
        return EXIT_INTERRUPTED
    return EXIT_OK if error is None else _RAISED


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


# -- `ampdoctor run` --

_NO_STEP = "no optimizer step was seen in this process: nothing of {} was judged"


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A script that runs under the watch, and what came of it."""

    script: Script
    request: WatchRequest
    quiet: bool
    tell: Callable[[Report], None]  # shows a diagnosis at once: the training may run for days
    home: ExitStack = field(default_factory=ExitStack)
    code: int | None = None  # the script's exit code; None before it has ended
    watch: ScriptWatch | None = None
    still_open: ExitStack | None = None  # in a process that the script forked: the watch, which the parent ends

    @property
    def doctor(self) -> TrainingWatcher | None:
        return None if self.watch is None else self.watch.doctor

    @property
    def folder(self) -> str:
        """The folder of the log, for a shell."""
        return shlex.quote(self.request.named or self.request.health)

    @property
    def is_one_of_several(self) -> bool:
        """Whether a launcher or other processes take an exit code other than 0 for a crash."""
        return exit_code_ends_others() or (self.doctor is not None and self.doctor.place.world > 1)

    def _told(self, report: Report) -> None:
        if self.doctor is None or self.doctor.speaks:
            self.tell(report)

    def work(self, _progress: Progress | None, _set_aside: SetAside) -> Report:
        """Run the script under the watch; raises ForkedChildError at the end of a child that the script forked."""
        from ampdoctor.workflows.watch import watching

        if not (self.quiet or rank_of()):
            follow = f"live view: ampdoctor health {self.folder} --follow"
            note(f"ampdoctor: watching {self.script.named}; log in {self.folder}; {follow}")
        process, here = os.getpid(), Path.cwd()
        stack = ExitStack()
        try:
            self.watch = stack.enter_context(
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
            if self.watch is not None and os.getpid() == process:
                self.watch.ended(ended)
            del ended  # its traceback holds this frame, so the script's frames would wait for the garbage collector
        finally:
            if os.getpid() != process:
                self.still_open = stack.pop_all()
            try:
                stack.close()
            except Exception as error:  # noqa: BLE001 - our errors must not end a user's script
                _unwatched("has failed", error)
        if os.getpid() != process:
            raise ForkedChildError
        with contextlib.suppress(OSError):  # file names are relative to the folder of the command line
            self.home.enter_context(contextlib.chdir(here))
        return self._report()

    def _report(self) -> Report:
        """Return the diagnosis, or a report that nothing was sick; `kept` has only what is there."""
        report = None if self.watch is None else self.watch.report
        if report is None:
            target = {"factory": self.script.named, "arguments": list(self.script.arguments)}
            run: Run = {"kept": {"health": self.request.named}}
            report = Report(command="run", target=target, run=run, verdict="not_judged")
        kept = report.run.get("kept") or {}
        if not is_run_log(kept.get("health", "")):
            kept = {}
        elif not Path(kept.get("bundle", "")).exists():
            kept = {"health": kept["health"]}
        others = {key: value for key, value in report.run.items() if key != "kept"}
        return replace(report, command="run", run={**others, "kept": kept} if kept else others)

    def say_what_was_seen(self) -> None:
        """Print the last line: what was watched, and what that took."""
        doctor = self.doctor
        if rank_of() if doctor is None else doctor.place.rank:
            return
        seen = None if doctor is None else doctor.summary()
        if seen is not None and not self.quiet:
            note(f"ampdoctor: {seen}")
        if not self.code and (doctor is None or not doctor.trained):
            note(f"ampdoctor: warning: {_NO_STEP.format(self.script.named)}")


def run_watched(
    script: Script, request: WatchRequest, output: OutputOptions, gates: GateOptions, *, command: str, config: Config
) -> Outcome:
    """Run a script under the watch, then handle the report as every command does; the script's exit code goes first."""
    inputs = () if script.is_module else (script.named,)
    shown: list[Report] = []  # diagnoses that were shown when they were made

    def tell(report: Report) -> None:
        here = [place for place in destinations(output, inputs) if _is_for_people(place)]
        shown.append(report)  # if stderr fails now, it would also fail at the end
        deliver(replace(_decided(report, config), gate=_gate(gates)), here, output)

    def wanted(report: Report, places: Places) -> Places:
        """Return stdout only where there is something to report."""
        if not shown and (report.findings or report.errors):
            return places
        return () if rank_of() and not shown else tuple(place for place in places if not _is_for_people(place))

    run = _Watched(script=script, request=request, quiet=output.quiet, tell=tell)
    also = files_of(one for one in request.export if isinstance(one, Export))
    with run.home, report_on_stderr():
        try:
            outcome = run_command(
                run.work, output, gates, inputs, also, command=command, config=config, log=request.health, wanted=wanted
            )
        except ForkedChildError:
            return Outcome(run.code or 0)
        except Exception as error:
            if not run.code and not run.is_one_of_several:
                raise
            note(f"ampdoctor: error: {sentence(str(error) or type(error).__name__)}")
            return Outcome(run.code or 0)
    if not run.code and outcome.code and run.is_one_of_several:  # a launcher takes it for a crash, and ends all
        if outcome.reason and shown:
            note(f"ampdoctor: {sentence(outcome.reason)}")
        if shown or rank_of() == 0:
            note(
                "ampdoctor: the exit code is the script's, as one of several processes; the verdict: "
                f"ampdoctor health {run.folder} --fail-on error"
            )
        outcome = Outcome(EXIT_OK)
    run.say_what_was_seen()
    return Outcome(run.code or outcome.code, outcome.reason)


def _unwatched(what: str, error: Exception) -> None:
    note(f"ampdoctor: internal error: the watch {what}: {type(error).__name__}: {sentence(str(error))}")
