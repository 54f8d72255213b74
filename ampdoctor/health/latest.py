"""`Latest`: the state of a running training from its log: last steps, worst tensors, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.log_records import (
    ActionLine,
    AlertLine,
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    LookLine,
    LostLine,
    RunLine,
    Stamp,
    StepLine,
    TensorDetail,
)
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds

STEPS = 4096  # last steps that are kept: more than a terminal has columns, and few enough to draw in a millisecond
EVENTS = 64  # last events that are kept
_LATELY = 64  # last steps over which a rate is computed

Kind = Literal["alert", "look", "checkpoint", "action", "attempt", "run", "end"]
Level = Literal["error", "warning", "note", "good"]
Measure = Literal["flushed_share", "log2_headroom", "zero_share"]
_OF_HEALTH: Mapping[str, Level] = MappingProxyType({"sick": "error", "good": "good"})
_OF_ZEROS = frozenset({"gradient", "activation_gradient"})  # zeros of an activation come from its ReLU


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event in a run."""

    step: int | None  # the attempted step
    kind: Kind
    level: Level
    says: str  # a sentence, with names as in the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates over the last steps; None where the log has no numbers for them."""

    steps: float | None = None  # a second
    samples: float | None = None  # a second
    tokens: float | None = None  # a second
    data_share: float | None = None  # share of the time spent waiting for data


@dataclass(slots=True)
class Latest:
    """Takes a log line by line, in constant memory; of several optimizers only the first one's steps are kept."""

    thresholds: Thresholds = DEFAULT_THRESHOLDS
    run: RunLine | None = None  # None before the log's first line
    stamp: Stamp | None = None  # of the last line
    steps: deque[StepLine] = field(default_factory=lambda: deque(maxlen=STEPS))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    findings: list[Finding] = field(default_factory=list)  # each alert once
    skipped: int = 0  # of the steps that were read
    first_step: int | None = None  # the first step that was read
    lost: LostLine | None = None
    end: EndLine | None = None  # None until the log's last line
    detail_step: int | None = None  # the last step with measured tensors
    _judge: Judge = field(init=False)
    _times: deque[tuple[int, StepLine]] = field(default_factory=lambda: deque(maxlen=_LATELY))
    _details: dict[tuple[int, str, str, int], TensorDetail] = field(default_factory=dict)
    _told: set[tuple[str, str | None, int | None]] = field(default_factory=set)
    _optimizer: int | None = None

    def __post_init__(self) -> None:
        self._judge = Judge(self.thresholds)

    def add(self, whole: LogRecord) -> tuple[Event, ...]:
        """Takes a line, and returns its events."""
        line, before = whole.line, self.stamp
        happened: list[Event] = []
        if before is not None and _begins_anew(before, whole.stamp):
            happened += self._begin_anew(before, whole.stamp)
        self.stamp = whole.stamp
        if isinstance(line, RunLine):
            self.run = line
        elif isinstance(line, StepLine):
            self._take_step(whole.stamp, line)
        elif isinstance(line, DetailLine):
            self._take_detail(line)
        elif isinstance(line, LostLine):
            self.lost = line
        elif isinstance(line, EndLine):
            self.end = line
        happened += _event_of(line)
        if isinstance(line, AlertLine):
            happened += self._alerts([line.finding], line.step)
        happened += self._alerts(self._judge.add(line), getattr(line, "step", None))
        self.events.extend(happened)
        return tuple(happened)

    @property
    def last(self) -> StepLine | None:
        """The last step."""
        return self.steps[-1] if self.steps else None

    @property
    def rates(self) -> Rates:
        """The rates of the last steps."""
        if len(self._times) < 2:
            return Rates()
        (began, first), (ended, last) = self._times[0], self._times[-1]
        seconds = (ended - began) / 1000
        lines = [line for _, line in self._times][1:]
        waits = [(line.data_seconds, line.seconds) for line in lines if line.data_seconds is not None and line.seconds]
        spent = sum(whole for _, whole in waits if whole is not None)
        share = sum(wait for wait, _ in waits if wait is not None) / spent if spent else None
        if seconds <= 0.0:
            return Rates(data_share=share)
        return Rates(
            steps=(last.step - first.step) / seconds,
            samples=_rate(first.samples, last.samples, seconds),
            tokens=_rate(first.tokens, last.tokens, seconds),
            data_share=share,
        )

    @property
    def memory_bytes(self) -> int | None:
        """The last value that was read."""
        return next((line.memory_bytes for line in reversed(self.steps) if line.memory_bytes is not None), None)

    def worst(self, measure: Measure, count: int) -> list[tuple[str, str, float]]:
        """Returns name, role and number of the `count` worst tensors: those of least headroom, or of largest share."""
        names = () if self.run is None else self.run.tensors
        found: list[tuple[str, str, float]] = [
            (names[one.tensor] if one.tensor < len(names) else f"tensor {one.tensor}", one.role, value)
            for one in self._details.values()
            if (value := getattr(one, measure)) is not None and (measure != "zero_share" or one.role in _OF_ZEROS)
        ]
        least = measure == "log2_headroom"
        found = found if least else [row for row in found if row[2] > 0.0]
        return sorted(found, key=lambda row: (row[2] if least else -row[2], row[0]))[:count]

    def _begin_anew(self, before: Stamp, now: Stamp) -> list[Event]:
        """Resets for another run in the folder, a restart, or an attempt after a rollback."""
        self.end = None
        if before.run_id == now.run_id:
            what = "the run was started anew" if before.restarts != now.restarts else "a rollback: a new attempt begins"
            if before.restarts < now.restarts:
                self._judge.resumes()
            return [Event(step=None, kind="attempt", level="note", says=what)]
        self.steps.clear()
        self._times.clear()
        self._details.clear()
        self._told.clear()
        self.skipped, self.first_step, self.lost, self._optimizer, self.detail_step = 0, None, None, None, None
        self._judge = Judge(self.thresholds)
        return [Event(step=None, kind="run", level="note", says="another run begins in this log")]

    def _take_step(self, stamp: Stamp, line: StepLine) -> None:
        if self._optimizer is None:
            self._optimizer = line.optimizer
        if line.optimizer != self._optimizer:
            return
        while self.steps and self.steps[-1].step >= line.step:  # undone
            gone = self.steps.pop()
            self.skipped -= bool(gone.skipped)
        while self._times and self._times[-1][1].step >= line.step:
            self._times.pop()
        if self.first_step is None or line.step < self.first_step:
            self.first_step = line.step
        self.steps.append(line)
        self._times.append((stamp.time_ms, line))
        self.skipped += bool(line.skipped)

    def _take_detail(self, line: DetailLine) -> None:
        if line.step != self.detail_step:
            self._details.clear()
            self.detail_step = line.step
        for one in line.tensors:
            self._details[one.tensor, one.role, one.part, one.call] = one

    def _alerts(self, findings: Sequence[Finding], step: int | None) -> list[Event]:
        new = []
        for finding in findings:
            key = (finding.code, finding.where.tensor, step)
            if key not in self._told:  # the log may already have the alert of the live judge
                self._told.add(key)
                self.findings.append(finding)
                says = f"{finding.code} {finding.message}"
                new.append(Event(step=step, kind="alert", level=finding.severity, says=says))
        return new


def _begins_anew(before: Stamp, now: Stamp) -> bool:
    return (before.run_id, before.restarts, before.attempt) != (now.run_id, now.restarts, now.attempt)


def _rate(first: int | None, last: int | None, seconds: float) -> float | None:
    return None if first is None or last is None else (last - first) / seconds


def _event_of(line: object) -> list[Event]:
    if isinstance(line, LookLine):
        found = line.findings[0].message if line.findings else line.reason
        found = found.removeprefix(f"step {line.step}: ").removeprefix(f"step {line.step}, ")  # which the event has
        says = ": ".join(part for part in (line.verdict, found) if part) + (f" ({line.bundle})" if line.bundle else "")
        level: Level = "error" if line.verdict == "sick" else "note"
        return [Event(step=line.step, kind="look", level=level, says=says)]
    if isinstance(line, ActionLine):
        says = f"{line.action}: {line.reason}" if line.reason else line.action
        return [Event(step=line.step, kind="action", level="warning", says=says)]
    if isinstance(line, CheckpointLine):
        level = _OF_HEALTH.get(line.health, "note")
        says = f"{line.path} is {line.health}" + (f": {line.reason}" if line.reason else "")
        return [Event(step=line.step, kind="checkpoint", level=level, says=says)]
    if isinstance(line, EndLine):
        why = f" ({line.reason})" if line.reason else ""
        code = "" if line.exit_code is None else f" with code {line.exit_code}"
        level = "error" if line.exit_code else "note"
        return [Event(step=None, kind="end", level=level, says=f"the training has ended{code}{why}")]
    return []
