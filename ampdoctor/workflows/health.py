"""`health`: what the logs of runs show over their steps, and what the rules on runs over time find in them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdoctor.diagnosis.health.rolling import LEAST, LENGTH
from ampdoctor.diagnosis.health.tensor_state import LEAST_BEFORE
from ampdoctor.errors import CheckpointError, LimitExceededError, NoStepError, UsageError
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import (
    Check,
    ErrorNote,
    Finding,
    Report,
    Skipped,
    Verdict,
    finding_order,
    verdict_of,
    with_files,
)
from ampdoctor.evidence.report_health import CurveName, HealthRun, HealthSection
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import FoundLog, find_logs, without_copies
from ampdoctor.health.sinks.export import Export
from ampdoctor.health.sinks.export import export as export_lines
from ampdoctor.health.summary import LogSummary, OnProgress, grown_lately, look
from ampdoctor.workflows.log_listeners import refuse_log
from ampdoctor.workflows.requests import Progress

_SIGNALS: tuple[tuple[str, CurveName, frozenset[str], int], ...] = (
    ("loss", "loss", frozenset({"loss", "both", "data"}), LENGTH),
    ("gradient norm", "gradient_norm", frozenset({"gradient", "both"}), LENGTH),
    ("loss scale", "loss_scale", frozenset({"scale"}), 1),
    ("learning rate", "learning_rate", frozenset({"optimizer"}), LEAST),
    ("time of a step", "step_seconds", frozenset({"hardware"}), LENGTH),
)
"""Name, curve, what moved first in a finding about it, and the number of taken steps with it that all its rules
need."""
_OF_STEPS = frozenset({"AMP722", "AMP740"})
"""Rules on whether steps are taken, and with what."""
_OF_SCALE = frozenset({"AMP723", "AMP742"})
"""Rules on the loss scale, whatever moved first."""
_NOT_LOGGED = "not in the log"
MOST_LOGS = 64
"""Maximum number of logs of a folder that are judged at once; of a sweep's hundreds, the user can name some."""
_LISTED = 8
"""Number of these that an error lists."""
_NO_END = "no line end follows it, so that its last number may be cut off"


@dataclass(frozen=True, slots=True)
class _Read:
    shown: str
    found: FoundLog
    looked: LogSummary

    def name_file(self, _: str | None) -> str:
        return self.shown


def health(
    logs: Sequence[str | os.PathLike[str]],
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    export: Sequence[Export] = (),
    progress: Progress | None = None,
) -> Report:
    """Judge the logs of runs over time.

    Args:
        logs: Each a file, or a folder, of which every log in it and below it is judged; of several logs that hold the
            same run, one. Formats: ampdoctor's own log, `trainer_state.json`, Lightning's `metrics.csv`, TensorBoard's
            event files, the file of a W&B run, a job's printed output, CSV or JSON lines.
        thresholds: Limits of the rules.
        export: Where the numbers and alerts of the one log are sent as well.
        progress: Called with the number of lines read.

    Returns:
        A report with `health`, a run for each log (one for each optimizer of a log), and the findings, whose
        `where.file` names the log. Its verdict is `sick` if a finding is an error. A file that cannot be read is one of
        `errors`, and so is one of several logs.

    Raises:
        CheckpointError: The only log cannot be read, there is none, or a folder has more than `MOST_LOGS`.
        OutputError: An export has failed.
        UsageError: No log is named, or an export is for a training that runs, or would overwrite the log.
    """
    given: dict[str, str] = {}
    for log in logs:
        given.setdefault(shown_path(log), os.fspath(log))
    if not given:
        raise UsageError("no log to read")
    found, skipped, errors = _found(given)
    if export and len(found) > 1:
        raise UsageError(f"--export takes one log, and there are {len(found)}: name one of them")
    read: list[_Read] = []
    for shown, one in found.items():
        try:
            refuse_log(export, one)
            looked = look(one, thresholds, _told(progress))
        except CheckpointError as error:
            if len(given) == len(found) == 1:
                raise
            if isinstance(error, NoStepError) and shown not in given:  # one of many in a folder
                skipped.append(Skipped(what=shown, reason="it has no step"))
            else:
                errors.append(_unread(shown, error))
            continue
        read.append(_Read(shown, one, _as_of_now(looked, one)))
    if not read and not errors:
        raise NoStepError(f"{', '.join(given)}: none of the {len(found)} logs has a step.")
    unread = [error.what for error in errors if error.what in found or error.what in given]
    several = len(read) + len(unread) > 1
    errors += [
        replace(note, what=f"{one.shown}: {note.what}") if several else note
        for one in read
        for note in (*one.found.errors, *one.looked.errors)
    ]
    if export and read:
        export_lines(read[0].found.lines(ReadIssues()), export)
    paths = [shown for shown in (*given, *found) if shown in unread or any(shown == one.shown for one in read)]
    return _report(read, errors, skipped, list(dict.fromkeys(paths)), thresholds)


def _found(given: Mapping[str, str]) -> tuple[dict[str, FoundLog], list[Skipped], list[ErrorNote]]:
    """Returns logs, skipped files and errors at the paths; raises CheckpointError where the only path has no log."""
    found: dict[str, FoundLog] = {}
    skipped: list[Skipped] = []
    errors: list[ErrorNote] = []
    for shown, typed in given.items():
        beside = f"{shown}: " if len(given) > 1 else ""
        try:
            there = find_logs(typed)
            logs, copies = without_copies(there.logs)
            _refuse_too_many(shown, logs)
        except CheckpointError as error:
            if len(given) == 1:
                raise
            errors.append(_unread(shown, error))
            continue
        found |= {shown: replace(logs[0], typed=typed)} if len(logs) == 1 else {one.shown: one for one in logs}
        skipped += [replace(one, what=f"{beside}{one.what}") for one in (*there.skipped, *copies)]
        errors += [replace(one, what=f"{beside}{one.what}") for one in there.errors]
    return found, skipped, errors


def _unread(shown: str, error: CheckpointError) -> ErrorNote:
    kind = "limit" if isinstance(error, LimitExceededError) else "unreadable"
    return ErrorNote(what=shown, kind=kind, message=str(error))


def _refuse_too_many(shown: str, logs: Sequence[FoundLog]) -> None:
    if len(logs) > MOST_LOGS:
        typed = " ".join(shlex.quote(one.shown) for one in logs[:_LISTED])
        raise CheckpointError(
            f"{shown} holds {len(logs)} logs, and at most {MOST_LOGS} are judged at once. Name some of them. "
            f"Type: ampdoctor health {typed} ..."
        )


def _told(progress: Progress | None) -> OnProgress | None:
    return None if progress is None else lambda lines: progress("lines", lines, None, unit="lines")


def _as_of_now(looked: LogSummary, found: FoundLog) -> LogSummary:
    """Returns the result with what depends on whether the log still grows.

    If it grows, a run that has not ended in order still runs, and a last line without an end is being written.
    """
    if not grown_lately(found):
        cut_off = (Skipped(what=f"{name}: its last line", reason=_NO_END) for name in looked.unfinished)
        return replace(looked, skipped=(*looked.skipped, *cut_off))
    runs = (replace(run, ending="running") if run.ending == "cut_off" else run for run in looked.runs)
    return replace(looked, runs=tuple(runs))


def _report(
    read: Sequence[_Read],
    errors: Sequence[ErrorNote],
    skipped: Sequence[Skipped],
    shown: Sequence[str],
    thresholds: Thresholds,
) -> Report:
    several = len(shown) > 1
    found = (with_files(finding, one.name_file) for one in read for finding in one.looked.findings)
    findings = sorted(found, key=finding_order)
    runs = tuple(replace(run, source=one.shown) for one in read for run in one.looked.runs)
    return Report(
        command="health",
        target=_target(read, shown),
        verdict=_verdict(findings, runs, settled=not errors),
        complete=not errors,
        findings=tuple(findings),
        checks=tuple(
            replace(check, name=f"{one.shown}: {check.name}") if several else check
            for one in read
            for check in _checks(one.looked)
        ),
        skipped=(
            *skipped,
            *(
                replace(part, what=f"{one.shown}: {part.what}") if several else part
                for one in read
                for part in one.looked.skipped
            ),
        ),
        errors=tuple(errors),
        health=HealthSection(runs=runs, axis="step", detail_every=next((one.looked.detail_every for one in read), None))
        if runs
        else None,
        thresholds=thresholds.listed(),
    )


def _verdict(findings: Sequence[Finding], runs: Sequence[HealthRun], *, settled: bool) -> Verdict:
    told = any(finding.severity != "note" for finding in findings)
    if settled and not told and runs and all(_judged(run) < LEAST for run in runs):
        return "not_judged"
    return verdict_of(findings, settled=settled)


def _judged(run: HealthRun) -> int:
    """Returns the number of taken steps that the rules judge: with a loss or a norm, or all if the log has neither."""
    known = [_known(run, name) for name in ("loss", "gradient_norm")]
    return max(known) if any(known) else run.steps - run.skipped


def _known(run: HealthRun, name: CurveName) -> int:
    """Returns the number of taken steps with a value in the log; for a long log a lower bound, the spans with one."""
    curve = next((curve for curve in run.curves if curve.name == name), None)
    return 0 if curve is None else min(run.steps - run.skipped, sum(value is not None for value in curve.middle))


def _target(read: Sequence[_Read], shown: Sequence[str]) -> dict[str, object]:
    if len(shown) > 1:
        return {"path": f"{len(shown)} paths", "paths": list(shown), "global_step": None}
    (only,) = read
    return {
        "path": only.found.name,
        "location": only.shown,
        "format": only.found.kind.format,
        "files": [
            {"path": name, "bytes": file.size} for name, file in zip(only.found.names, only.found.state(), strict=True)
        ],
        "global_step": max(run.last_step for run in only.looked.runs),
    }


def _checks(looked: LogSummary) -> Iterator[Check]:
    """Yields what was examined; of several optimizers, the steps of the one with the most."""
    runs = looked.runs
    most = max(runs, key=lambda run: run.steps)
    steps, skipped = most.steps, most.skipped
    counts = {"steps": steps, "skipped": skipped, "ranks": looked.ranks}
    codes = {finding.code for finding in looked.findings}
    unplaced = _unplaced(looked.unplaced)
    result = unplaced or ("ok" if skipped < steps else f"none of {steps:,} steps was taken")
    yield Check(name="steps", result="found" if codes & _OF_STEPS else result, headroom=counts)
    first = {str(finding.evidence.get("first")) for finding in looked.findings}
    for name, curve, about, least in _SIGNALS:
        there = any(one.name == curve for run in runs for one in run.curves)
        known = max(_known(run, curve) for run in runs)
        seen = "ok" if known >= least else f"needs {least} steps, has {known}"
        of_scale = curve == "loss_scale"
        if of_scale:
            seen = unplaced or seen
        found = not about.isdisjoint(first) or (of_scale and not codes.isdisjoint(_OF_SCALE))
        result = "found" if found else looked.unread.get(name, seen if there else _NOT_LOGGED)
        yield Check(name=name, result=result)
    looks = max((len(one.steps) for run in runs for one in run.maps), default=0)
    seen = "ok" if looks > LEAST_BEFORE else f"needs {LEAST_BEFORE + 1} looks, has {looks}"
    tensors = max((one.of for run in runs for one in run.maps), default=0)
    of_tensors = any(finding.where.tensor is not None for finding in looked.findings)
    result = "found" if of_tensors else seen if tensors else _NOT_LOGGED
    yield Check(name="single tensors", result=result, headroom={"tensors": tensors} if tensors else {})
    if looked.undone:
        yield Check(name="steps that were undone", result=_undone(looked.undone))


def _unplaced(count: int) -> str:
    if not count:
        return ""
    return f"not judged: which {'step was' if count == 1 else f'{count:,} steps were'} skipped is not known"


def _undone(findings: Sequence[Finding]) -> str:
    first = findings[0]
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"what was found there stands no more: {first.code} at step {first.where.step}{more}"
