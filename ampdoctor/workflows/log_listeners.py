"""Listeners of a training's log while it runs: the judge that raises alerts, and the exports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter  # bound here, because a script may patch it
from typing import TYPE_CHECKING, Any

from ampdoctor.checkpoints.files import is_folder
from ampdoctor.diagnosis.catalogue import effects
from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.diagnosis.health.rolling import LEAST
from ampdoctor.errors import UsageError
from ampdoctor.evidence.log_records import AlertLine, Line, LogRecord, RunLine, StepLine
from ampdoctor.evidence.log_text import kind_of, line_of
from ampdoctor.evidence.paths import LAST_GOOD, file_key, logs_in
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.reading.opening import AMPDOCTOR, FoundLog
from ampdoctor.health.sinks.export import Apart, Export, Exporter, export_of, sink_of
from ampdoctor.health.sinks.sink import Sink
from ampdoctor.hooks.interfaces import OWN_TIME
from ampdoctor.live.log.facts import grouped, launched, restarts, run_id_of_all
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.workflows.output_files import refuse_of_log

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Report
    from ampdoctor.live.data_stats import DataStats
    from ampdoctor.live.log.step_lines import StepLines
    from ampdoctor.workflows.good_checkpoints import CheckpointKeeper
    from ampdoctor.workflows.requests import WatchRequest


OnAlert = Callable[[Finding], None]
_LOUD = ("error", "warning")
_SCANS_S = 60.0
"""Seconds that the end of a training waits for scans of its checkpoints."""
_ENOUGH_BYTES = 4 * 2**20
"""Bytes at the end of a log that are read: some ten thousand steps, of which the judge keeps a few hundred."""


class Alerting:
    """Judges the lines of a log; each finding becomes a line of the log, a sentence, and a call of the user's function.

    `say` gets no notes. What `on_alert` raises is reported once, and it is not called again. `earlier` are the steps of
    the process that this one replaces, read on the judge's thread. `errors` has the last of each rule by its code.
    """

    def __init__(
        self,
        write: Callable[[Line], None],
        say: Callable[[str], None],
        thresholds: Thresholds,
        on_alert: OnAlert | None = None,
        earlier: Iterable[StepLine] = (),
    ) -> None:
        self.fired: str | None = None
        self.errors: dict[str, Finding] = {}
        self.loud: dict[tuple[str, int | None], Finding] = {}  # each error and warning, by code and step
        self._judge = Judge(thresholds)
        self._write, self._say, self._on_alert = write, say, on_alert
        self._earlier: Iterable[StepLine] | None = earlier

    def add(self, whole: LogRecord) -> None:
        """Judge a line of the log."""
        if self._earlier is not None:
            for step in self._earlier:
                self._judge.add(step)
            self._judge.resumes()
            self._earlier = None
        for finding in self._judge.add(whole.line):
            self._write(AlertLine(step=finding.where.step or 0, finding=finding))
            if finding.severity == "error":
                self.errors[finding.code] = finding
            if finding.severity in _LOUD:
                self.fired = finding.name
                self.loud[finding.code, finding.where.step] = finding
                whose = finding.evidence.get("optimizer")  # named where there are several
                at = f"step {finding.where.step}" + (f" of {whose}" if whose else "")
                self._say(f"{finding.severity} {finding.code} at {at}: {finding.message}")
            self._tell(finding)

    def taken(self) -> str | None:
        """Returns the rule that has fired since the last call, or None."""
        fired, self.fired = self.fired, None
        return fired

    def _tell(self, finding: Finding) -> None:
        if self._on_alert is None:
            return
        try:
            self._on_alert(finding)
        except Exception as error:  # noqa: BLE001 - somebody else's function, on our thread
            self._on_alert = None
            self._say(f"on_alert is called no more: {type(error).__name__}: {error}")


class Tally:
    """What the last line about a training says: its steps, the findings, and what the watch took of the time."""

    def __init__(self, *, incomplete: bool) -> None:
        self.incomplete = incomplete  # something was not seen: without findings, the training is not proved healthy
        self.unscaled = False  # it computed in fp16, and no scaler scaled a loss
        self.warned: set[tuple[str, int | None]] = set()  # code and step of the warnings that are no alerts
        self._before = OWN_TIME.seconds, OWN_TIME.apart, perf_counter()
        self._share = ""

    def ended(self, exit_code: int | None) -> None:
        """The training is over; looks at sick steps are no part of what the watch took."""
        self.incomplete |= bool(exit_code)
        seconds, apart, began = self._before
        share = (OWN_TIME.seconds - seconds) / (perf_counter() - began - (OWN_TIME.apart - apart))
        self._share = f"{100 * share:.1f} %" if share >= 0.0005 else "less than 0.1 %"

    def said(
        self, lines: StepLines, report: Report | None, alerting: Alerting | None, request: WatchRequest, *, lost: int
    ) -> str | None:
        """Returns the line; None where there was no step. With fewer steps than a rule needs, nothing is healthy.

        Nor is fp16 without a GradScaler: the loss goes on although gradients become zero, which only a replay shows.
        """
        steps, taken = lines.attempted, lines.taken
        if not steps:
            return None
        seen = (*(() if report is None else report.findings), *(alerting.loud.values() if alerting else ()))
        behind = effects(seen)
        found = self.warned | {(one.code, one.where.step) for at, one in enumerate(seen) if at not in behind}
        count = len(found) or int(report is not None)
        judged = not self.incomplete and not self.unscaled and taken - lost >= LEAST
        state = f"{count} finding{'s' * (count != 1)}" if count else "healthy" if judged else "no finding"
        cost = f"the watch took {self._share} of the time"
        more = f"; what to do: ampdoctor health {shlex.quote(request.named or request.health)}" if count else ""
        if self.unscaled and not count:
            again = shlex.join([request.script, *(["--", *request.arguments] if request.arguments else [])])
            more = f"; fp16 without a GradScaler: lost gradients are found by ampdoctor bisect-nan {again}"
        return f"{steps} step{'s' * (steps != 1)} watched, {state}, {steps - taken} skipped ({cost}){more}"


def steps_before(folder: str, *, rank: int, restarts: int) -> Iterator[StepLine]:
    """Yields the last steps that a rank's previous process has logged to `folder`; none for the first process."""
    if not restarts:
        return
    with suppress(OSError):
        *before, _ = logs_in(os.listdir(folder)).get(rank, [""])  # noqa: PTH208 - names are all that is wanted
        for name in before[-1:]:
            with Path(folder, name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _ENOUGH_BYTES))
                for text in file.read().splitlines():
                    with suppress(ValueError):  # the first and the last may be cut off
                        whole = line_of(text) if kind_of(text) == "step" else None
                        if whole is None or whole.stamp.restarts != restarts - 1:
                            continue
                        if isinstance(whole.line, StepLine):
                            yield whole.line


class LogOfRank:
    """The log of this process, its place among the others, and its listeners; `alerting` comes with `take_place`."""

    def __init__(self, request: WatchRequest, say: Callable[[str], None], on_alert: OnAlert | None) -> None:
        self.place, self._restarts = launched(), restarts()
        self.alerting: Alerting | None = None
        self._keeper: CheckpointKeeper | None = None
        self._request, self._say, self._on_alert = request, say, on_alert
        self._process, self._is_placed = os.getpid(), False
        self.log = RunLog(
            request.health,
            RunLine(name=Path(request.health).name, detail_every=request.every),
            rank=self.place.rank,
            world_size=self.place.world,
            restarts=self._restarts,
            say=say,
            held=True,
        )

    def take_place(self, intake: DataStats) -> None:
        """Begin the log of this rank, once: a script may make its process group at any time before its first update."""
        if self._is_placed or os.getpid() != self._process:
            return
        self._is_placed = True
        request, place = self._request, grouped() or launched()
        self.place = place
        before = steps_before(request.health, rank=place.rank, restarts=self._restarts)
        self.log.begin(run_id=run_id_of_all(), rank=place.rank, world_size=place.world)
        intake.batches.world_size = place.world
        self.alerting = Alerting(self.log.write, self._say, request.thresholds, self._on_alert, before)
        if place.rank == 0 and not self.log.closed:  # the others' numbers are the same, or parts of these
            export_while_it_runs(self.log, request.export)
            if self.log.failed is None:  # reported already
                self.log.listen(self.alerting.add, name="the judge of the run over time", answers=True)
                self._keep_checkpoints()

    def _keep_checkpoints(self) -> None:
        request = self._request
        if request.checkpoints is None:
            return
        from ampdoctor.workflows.good_checkpoints import CheckpointKeeper  # here, because it imports torch

        self._keeper = keeper = CheckpointKeeper(
            Path(request.checkpoints).absolute(),
            Path(request.health),
            self.log.write,
            self._say,
            probation=request.probation,
            most_bytes=request.good_max,
        )
        name = "the keeping of checkpoints"
        self.log.listen(keeper.add, name=name, idle=keeper.idle, end=keeper.close, dropped=keeper.close)

    def finish_scans(self, error: BaseException | None) -> KeyboardInterrupt | None:
        """Wait for the scans that can still make a checkpoint good; returns the Ctrl-C that has ended the waiting."""
        if self._keeper is not None:
            self.log.flush()
            try:
                self._keeper.finish(0 if isinstance(error, KeyboardInterrupt) else _SCANS_S)
            except KeyboardInterrupt as interrupted:
                self._say("the scans of the last checkpoints were interrupted")
                return interrupted
        return None

    def resume_from(self) -> str:
        """Returns the end of a sentence that names the last good checkpoint; "" where none was asked for."""
        if self._keeper is None:
            return ""
        if self._keeper.good is None:
            return f"; {self._keeper.result()}"
        return f"; resume from {Path(self._request.named or self._request.health, LAST_GOOD)} ({self._keeper.good})"


# -- exports while the training runs --


def exports_of(given: Iterable[Any]) -> tuple[Export | Sink, ...]:
    """Returns the exports of texts like `tensorboard=DIR` and of sinks; raises UsageError for anything else."""
    if isinstance(given, str):
        given = (given,)
    return tuple(export_of(one) if isinstance(one, str) else sink_of(one) for one in given)


def refuse_log(exports: Iterable[Export], log: FoundLog) -> None:
    """Raises UsageError for exports that would overwrite the log that is read, or lie where the next run reads logs."""
    read = {file_key(log.folder / name) for name in log.names}
    for one in exports:
        for file in one.files(log.folder.absolute().name):
            if file_key(file) in read:
                raise UsageError(f"--export {one}: cannot write {file}: it is what is to be read")
            if log.kind is AMPDOCTOR:
                refuse_of_log(file, log.folder)
            elif is_folder(Path(log.typed)) and file_key(Path(file).parent) == file_key(log.folder):
                raise UsageError(f"--export {one}: the next run would read {file} as a log as well; name another place")


def export_while_it_runs(log: RunLog, exports: Iterable[Export | Sink]) -> None:
    """Let sinks listen to a log: those with a library in their own processes, a user's object here, on a thread."""
    for one in exports:
        if isinstance(one, Export):
            far = Apart(one)
            log.listen(far.add, name=f"the export {one}", end=far.close, dropped=far.abandon)
        else:
            near = Exporter(lambda _, sink=one: sink, often=True)  # type: ignore[misc]
            log.listen(near.add, name=f"the export {type(one).__name__}", idle=near.idle, end=near.close)
