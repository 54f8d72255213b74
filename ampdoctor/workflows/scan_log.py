"""The training log beside a checkpoint: found in its folders, read and judged as by `health`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampdoctor.checkpoints.files import Listing, list_folder
from ampdoctor.checkpoints.folder import TRAINER_STATE
from ampdoctor.diagnosis.health.loss_rules import GRADIENTS_VANISHED
from ampdoctor.diagnosis.scan.scaler import explained_zeros
from ampdoctor.errors import CheckpointError, NoStepError
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.paths import will_be_written
from ampdoctor.evidence.report import Check, Finding, Skipped
from ampdoctor.evidence.report_health import HealthRun
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.reading.event_files import is_event_file
from ampdoctor.health.reading.log_files import is_log
from ampdoctor.health.reading.opening import FoundLog, logs_in_folder
from ampdoctor.health.reading.other_logs import TRANSFORMERS
from ampdoctor.health.summary import LogSummary, look

MOST_BYTES = 64 * 1024 * 1024
"""A longer log is left to `health`: half a million steps take about half a minute."""
RUNS = "runs"
"""The folder in which the TensorBoard writers of torch and of the Hugging Face Trainer make one per start of a run."""
MAX_RUNS = 20
"""Folders in `RUNS` that are read: the last by name, because names begin with the date."""
_BACK = " The run has come back from it since."


@dataclass(frozen=True, slots=True)
class LogBeside:
    """The log beside a checkpoint."""

    looked: LogSummary

    @property
    def run(self) -> HealthRun:
        """The run, or that of the optimizer with the most steps."""
        return max(self.looked.runs, key=lambda run: run.steps)

    def findings(self) -> Iterator[Finding]:
        """Yields what `health` finds; it is a note where the run has come back from it by the end of the log."""
        for at, finding in enumerate(self.looked.findings):
            places = [replace(where, step=None, global_step=where.step) for where in finding.places]
            told = replace(finding, where=places[0], also=tuple(places[1:]))
            over = at in self.looked.over and told.severity != "note"
            yield replace(told, severity="note", message=told.message + _BACK) if over else told

    def findings_beside(self, summary: CheckpointSummary, thresholds: Thresholds) -> list[Finding]:
        """Returns the findings, explained by the checkpoint where it can."""
        return [
            explained_zeros(one, summary, thresholds) if one.code == GRADIENTS_VANISHED.code else one
            for one in self.findings()
        ]

    def check(self, findings: Sequence[Finding]) -> Check:
        """Returns what was judged; `findings` are those of the log."""
        headroom = {"entries": self.run.steps, "last_step": self.run.last_step}
        return Check(name="training log", result="found" if findings else "ok", headroom=headroom)

    def loss_until(self, step: float) -> float | None:
        """Returns the last loss logged up to a step, or None."""
        run = self.run
        curve = next((curve for curve in run.curves if curve.name == "loss"), None)
        if curve is None:
            return None
        lost = curve.nonfinite or (0,) * len(curve.middle)
        for last, loss, others in reversed([*zip(run.axis.last, curve.middle, lost, strict=True)]):
            if last <= step and (loss is not None or others):
                return math.nan if loss is None else loss
        return None


def log_beside(
    folders: Iterable[tuple[Listing, str]], thresholds: Thresholds
) -> tuple[LogBeside | None, tuple[Skipped, ...]]:
    """Returns the longest log of these folders (a Trainer's own before others), and those that could not be read."""
    longest: LogBeside | None = None
    skipped: list[Skipped] = []
    searched: set[Path] = set()
    for listing, prefix in folders:
        if listing.path in searched:
            continue
        searched.add(listing.path)
        found = [(one, prefix) for one in _logs_in(listing, prefix, skipped)]
        if RUNS in listing.folders:
            found += _logs_of_runs(listing.path / RUNS, f"{prefix}{RUNS}/", skipped)
        own = [one for one in found if one[0].kind is TRANSFORMERS]
        for logs in (own, [one for one in found if one not in own]):
            read = [judged for one, of in logs if (judged := _judged(one, of, thresholds, skipped)) is not None]
            if read:
                longest = max([*([longest] if longest else []), *read], key=lambda one: one.run.steps)
                break
    return longest, tuple(skipped)


def _logs_in(listing: Listing, prefix: str, skipped: list[Skipped]) -> list[FoundLog]:
    # a configuration (config.json) is never opened; of other formats a log is told by its name or its beginning
    names = [name for name in listing.names if name == TRAINER_STATE or not name.endswith(".json")]
    # what this command writes is no log of the training, but what is named like one is not written over
    names = [n for n in names if is_log(n) or is_event_file(n) or not will_be_written(listing.path / n)]
    found, refused = logs_in_folder(listing.only(names))
    skipped += [_unread(prefix + name, why) for name, why in refused.items() if name != TRAINER_STATE]
    return found


def _logs_of_runs(folder: Path, prefix: str, skipped: list[Skipped]) -> Iterator[tuple[FoundLog, str]]:
    try:
        for name in sorted(list_folder(folder).folders)[-MAX_RUNS:]:
            for one in _logs_in(list_folder(folder / name), f"{prefix}{name}/", skipped):
                yield one, f"{prefix}{name}/"
    except CheckpointError as error:
        skipped.append(_unread(prefix, str(error)))


def _judged(found: FoundLog, prefix: str, thresholds: Thresholds, skipped: list[Skipped]) -> LogBeside | None:
    name = prefix + found.names[0]
    try:
        size = sum(file.size for file in found.state())
        if size > MOST_BYTES:
            why = f"{size >> 20} MB are more than the {MOST_BYTES >> 20} that a scan reads; `ampdoctor health` does"
            skipped.append(_unread(name, why))
            return None
        looked = look(found, thresholds)
    except NoStepError:
        return None
    except CheckpointError as error:
        if name != prefix + TRAINER_STATE:  # the checkpoint's own reader says so
            skipped.append(_unread(name, str(error)))
        return None
    skipped += [_unread(prefix + note.what, note.message) for note in (*found.errors, *looked.errors)]
    skipped += [replace(one, what=prefix + one.what) for one in looked.skipped if one.what in found.names]
    return LogBeside(looked)


def _unread(what: str, why: str) -> Skipped:
    return Skipped(what=what, reason=f"not read as a log: {why}")
