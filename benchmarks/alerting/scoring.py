"""How often an alarm came in time, and how often there was nothing to alarm about."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.log_records import DetailLine, Line, StepLine
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from benchmarks.alerting.logs import Record
from benchmarks.alerting.published import SPIKES, Spike, steps_of
from benchmarks.alerting.rivals import RIVALS, Rival

OURS = "ampdoctor"
TOGETHER = 50
"""Steps within which further alarms of a rule are part of the last one: a page that is open is not opened again."""
Z95 = 1.959964


@dataclass(frozen=True)
class Alarm:
    """A rule has fired.

    Attributes:
        step: Of the line at which it did.
        late: That line is about the state after the step's update: tensors that were looked at.
        finding: Of ours, the finding; null of a rival, which says no more than that.
    """

    step: int
    late: bool = False
    finding: Finding | None = None


@dataclass
class Heard:
    """What each rule has said in a training, and in what order.

    Attributes:
        alarms: By rule.
        steps: Step lines that were heard.
    """

    alarms: dict[str, list[Alarm]]
    steps: int = 0


def add(lines: Iterable[Line]) -> Heard:
    """Each rule hears a training's log, alone and from its beginning.

    A rival is there once for each optimizer, as who trains with two would have it: none of them knows of several.
    """
    judge = Judge(DEFAULT_THRESHOLDS)
    rivals: defaultdict[int, list[Rival]] = defaultdict(lambda: [make() for make in RIVALS])
    heard = Heard({OURS: [], **{make.name: [] for make in RIVALS}})
    for line in lines:
        step = line.step if isinstance(line, StepLine | DetailLine) else 0
        late = isinstance(line, DetailLine)
        heard.steps += isinstance(line, StepLine)
        for finding in judge.add(line):
            if finding.severity != "note":
                heard.alarms[OURS].append(Alarm(step, late, finding))
        for rival in rivals[line.optimizer] if isinstance(line, StepLine | DetailLine) else ():
            if rival.add(line):
                heard.alarms[rival.name].append(Alarm(step, late))
    return heard


@dataclass
class Score:
    """Of one rule.

    Attributes:
        leads: Of each sick training the lead in steps; None where no alarm came before the harm. By sudden or not.
        told_apart: Of each, whether an alarm came in time and none in the twin between the same two steps.
        cause: Of each that was alarmed in time, whether the first cause was right.
        layer: Of those whose harm has a place, whether that was right.
        false_alarms: In healthy trainings.
        healthy_steps: That these had.
        published: Whether each published spike was alarmed at its first jump, and not before.
    """

    leads: dict[bool, list[int | None]] = field(default_factory=lambda: {True: [], False: []})
    told_apart: list[bool] = field(default_factory=list)
    cause: list[bool] = field(default_factory=list)
    layer: list[bool] = field(default_factory=list)
    false_alarms: int = 0
    healthy_steps: int = 0
    published: list[bool] = field(default_factory=list)


def in_time(record: Record, alarms: Sequence[Alarm]) -> Alarm | None:
    """The first alarm from the onset on that came before the update that does the harm; None where none did.

    A step's loss and gradient norm are known before its update, so that an alarm at that very step's line is in time.
    """
    if record.onset is None or record.harm is None:
        return None
    for alarm in alarms:
        if record.onset <= alarm.step and alarm.step + alarm.late <= record.harm:
            return alarm
    return None


def episodes(alarms: Sequence[Alarm]) -> int:
    """How often a rule has begun to alarm."""
    steps = sorted(alarm.step for alarm in alarms)
    return sum(i == 0 or step - steps[i - 1] > TOGETHER for i, step in enumerate(steps))


def add_healthy(score: Score, alarms: Sequence[Alarm], steps: int) -> None:
    """Adds what a rule has said in a healthy training, a twin among them."""
    score.false_alarms += episodes(alarms)
    score.healthy_steps += steps


def add_sick(score: Score, record: Record, alarms: Sequence[Alarm], of_twin: Sequence[Alarm]) -> None:
    """Adds what a rule has said in a sick training, and in its twin."""
    first = in_time(record, alarms)
    score.told_apart.append(first is not None and in_time(record, of_twin) is None)
    score.leads[record.sudden].append(None if first is None else (record.harm or 0) - first.step)
    if first is not None and first.finding is not None:
        score.cause.append(first_cause(first.finding) in record.cause)
        if record.layers:
            where = first.finding.where
            score.layer.append(bool(re.search(record.layers, where.tensor or where.module or "\0")))


def first_cause(finding: Finding) -> str | None:
    """The first cause that a finding names: data, gradient, optimizer, scale, logits, hardware."""
    said = finding.evidence.get("first")
    if said in {"loss", "both"}:  # computed before the update: a loss that is the first to move is of an unusual batch
        return "data"
    return said if isinstance(said, str) else None


def add_published(score: Score, spike: Spike, alarms: Sequence[Alarm]) -> None:
    """Adds whether the first alarm came at the first jump; what comes before it is false."""
    score.published.append(bool(alarms) and alarms[0].step == spike.jump)


def hear_published(seed: int) -> list[tuple[Spike, Heard]]:
    """Each rule hears the published spikes."""
    return [(spike, add(steps_of(spike, seed))) for spike in SPIKES]


def wilson(right: int, of: int) -> tuple[float, float]:
    """Wilson's bounds of a share, at 95 %."""
    if not of:
        return 0.0, 1.0
    share, square = right / of, Z95**2 / of
    middle = share + square / 2
    half = Z95 * math.sqrt(share * (1 - share) / of + square / (4 * of))
    return max((middle - half) / (1 + square), 0.0), min((middle + half) / (1 + square), 1.0)


def table(scores: dict[str, Score]) -> str:
    """The scores as a Markdown table."""
    titles = (
        "rule",
        "creeping harm: alarmed before",
        "lead, median steps",
        "sudden harm: alarmed before",
        "either, and the twin silent",
        "first cause right",
        "layer right",
        "false alarms in healthy steps",
        "per 10,000",
        "published spikes",
    )
    rows = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    for name, score in scores.items():
        leads = [lead for lead in score.leads[False] if lead is not None]
        cells = [
            name,
            _share([lead is not None for lead in score.leads[False]]),
            f"{statistics.median(leads):.0f}" if leads else "-",
            _share([lead is not None for lead in score.leads[True]]),
            _share(score.told_apart),
            _share(score.cause) if name == OURS else "names none",
            _share(score.layer) if name == OURS else "names none",
            f"{score.false_alarms} in {score.healthy_steps:,}",
            _rate(score.false_alarms, score.healthy_steps),
            f"{sum(score.published)} of {len(score.published)}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _share(said: Sequence[bool]) -> str:
    low, high = wilson(sum(said), len(said))
    return f"{sum(said)} of {len(said)} ({100 * low:.0f} to {100 * high:.0f} %)"


def _rate(alarms: int, steps: int) -> str:
    """Alarms in 10,000 steps, with exact bounds of a Poisson count at 95 %."""
    if not steps:
        return "-"
    low, high = poisson(alarms)
    return f"{1e4 * alarms / steps:.2f} ({1e4 * low / steps:.2f} to {1e4 * high / steps:.2f})"


def poisson(count: int) -> tuple[float, float]:
    """Bounds of the mean of which a Poisson count was seen, at 95 % (Garwood's), by bisection."""
    low = 0.0 if count == 0 else _solved(lambda mean: 1 - _at_most(count - 1, mean) - 0.025)
    return low, _solved(lambda mean: 0.025 - _at_most(count, mean))


def _at_most(count: int, mean: float) -> float:
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _solved(rising: Callable[[float], float]) -> float:
    low, high = 1e-9, 1.0
    while rising(high) < 0:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
