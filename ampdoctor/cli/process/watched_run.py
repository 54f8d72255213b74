"""The action of `ampdoctor run`: somebody's script, from its first line to its last, and what was seen meanwhile."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ampdoctor.cli.options.export_options import files_of
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions
from ampdoctor.cli.process import ctrl_c, ending
from ampdoctor.cli.process.action import Examination
from ampdoctor.cli.process.exit_code import Outcome
from ampdoctor.cli.process.output import Destination, deliver, destinations
from ampdoctor.cli.process.ranks import rank_of
from ampdoctor.cli.process.streams import STDOUT, note, report_on_stderr
from ampdoctor.errors import AmpdoctorError, ForkedChildError
from ampdoctor.evidence.report import Report
from ampdoctor.health.sinks.export import Export
from ampdoctor.live.log.facts import exit_code_ends_others
from ampdoctor.live.script import Script, run_script
from ampdoctor.reports.escape import sentence
from ampdoctor.workflows.requests import Progress, SetAside, WatchRequest

if TYPE_CHECKING:
    from ampdoctor.workflows.watch_script import Watching


@dataclass(slots=True, kw_only=True)
class _Job:
    """The script's one run.

    Attributes:
        script: What runs.
        request: How it is watched.
        code: Its exit code; None before it has ended.
        tell: Shows the diagnosis when it is made.
        still_open: In a process that the script has forked: the watch, which the parent ends.
        shown: The diagnoses that were shown when they were made.
    """

    script: Script
    request: WatchRequest
    code: int | None = None
    still_open: ExitStack | None = None
    shown: list[Report] = field(default_factory=list)
    home: ExitStack = field(default_factory=ExitStack)
    tell: Callable[[Report], None] | None = None
    watch: Watching | None = None

    @property
    def is_one_of_several(self) -> bool:
        """Whether a launcher, or other processes, take an exit code other than 0 for a crash."""
        doctor = None if self.watch is None else self.watch.doctor
        return exit_code_ends_others() or (doctor is not None and doctor.place.world > 1)

    def _told(self, report: Report) -> None:
        doctor = None if self.watch is None else self.watch.doctor
        if self.tell is not None and (doctor is None or doctor.speaks):
            self.tell(report)

    def __call__(self, _progress: Progress | None, _set_aside: SetAside) -> Report:
        """Run it, watched.

        Raises:
            ForkedChildError: The script has forked, and this is the child at the script's end.
            UsageError: There is nothing to run.
        """
        from ampdoctor.workflows.watch_script import watching

        process, folder = os.getpid(), Path.cwd()
        stack, watch = ExitStack(), None
        try:
            watch = self.watch = stack.enter_context(watching(self.request, tell=self._told, say=_say))
        except Exception as error:
            if isinstance(error, AmpdoctorError):
                raise
            _unwatched("cannot begin", error)
        ctrl_c.release()
        try:
            ended = run_script(self.script)
            if self.script.kind == "file":
                ending.flush()
            self.code = ending.answer(ended)
            if watch is not None and os.getpid() == process:
                watch.ended(ended)
            del ended  # its traceback leads to this frame: only the collector would free what the script's frames hold
        finally:
            if os.getpid() != process:
                self.still_open, stack = stack.pop_all(), ExitStack()
            try:
                stack.close()
            except Exception as error:  # noqa: BLE001 - nothing of ours ends somebody's script
                _unwatched("has failed", error)
        if os.getpid() != process:
            raise ForkedChildError
        with contextlib.suppress(OSError):  # files are named from where the command was typed
            self.home.enter_context(contextlib.chdir(folder))
        report = None if watch is None else watch.report
        logged = watch is not None and watch.has_begun
        return self._nothing_sick(logged=logged) if report is None else replace(report, command="run")

    def _nothing_sick(self, *, logged: bool) -> Report:
        target = {"factory": self.script.named, "arguments": list(self.script.arguments)}
        run = {"kept": {"health": self.request.named}} if logged else {}
        return Report(command="run", target=target, run=run, verdict="not_judged")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun(Examination):
    """Runs a script, and then does with the report what every command does; the script's own exit code goes first."""

    def __call__(self) -> Outcome:
        """Do it."""
        job = self.work
        assert isinstance(job, _Job)  # noqa: S101 for the type checker

        def tell(report: Report) -> None:
            """Show it now: the training may go on for days."""
            decided = replace(self._decide(report), gate=self._gate())
            here = [place for place in destinations(self.output, self.inputs) if _is_for_people(place)]
            job.shown.append(report)  # where stderr takes nothing, it does not take it at the end either
            deliver(decided, here, self.output)

        job.tell = tell
        with job.home, report_on_stderr():
            try:
                outcome = Examination.__call__(self)
            except ForkedChildError:
                return Outcome(job.code or 0)
            except Exception as error:
                if not job.code and not job.is_one_of_several:
                    raise
                note(f"ampdoctor: error: {sentence(str(error) or type(error).__name__)}")
                return Outcome(job.code or 0)
        if not job.code and outcome.code and job.is_one_of_several:
            return self._left_to_health(job, outcome)
        return Outcome(job.code or outcome.code, outcome.reason)

    def _left_to_health(self, job: _Job, outcome: Outcome) -> Outcome:
        """A launcher takes any code but 0 for a crash: it ends the other processes, or starts all of them anew."""
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
        """Return where this report goes: among what a script prints, only what has something to say."""
        job = self.work
        if isinstance(job, _Job) and job.shown:
            return tuple(place for place in places if not _is_for_people(place))
        if report.findings or report.errors:
            return places
        files = () if rank else places
        return tuple(place for place in files if not _is_for_people(place))


def watched_run(script: Script, request: WatchRequest, output: OutputOptions, gates: GateOptions) -> WatchedRun:
    """Return the action that runs the script, watched, and judges and delivers what was seen."""
    files = () if script.kind == "module" else (script.named,)
    job = _Job(script=script, request=request)
    exports = files_of(one for one in request.export if isinstance(one, Export))
    return WatchedRun(work=job, output=output, gates=gates, inputs=files, also=exports, log=request.health)


def _is_for_people(place: Destination) -> bool:
    return (place.format, place.file) == ("human", STDOUT)


def _say(sentence_: str) -> None:
    note(f"ampdoctor: {sentence(sentence_)}")


def _unwatched(what: str, error: Exception) -> None:
    note(f"ampdoctor: internal error: the watch {what}: {type(error).__name__}: {sentence(str(error))}")
