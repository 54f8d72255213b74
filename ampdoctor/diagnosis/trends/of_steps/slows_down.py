"""AMP730: steps take longer than they did, or memory keeps growing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import HOP, LENGTH
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FACTOR = Threshold(
    code="AMP730",
    name="factor",
    default=2.0,
    unit="factor",
    lowest=1.05,
    highest=1e6,
    why="Times the usual that the last 16 steps take in the median. A note only: other work on the machine does the "
    "same.",
)
MEMORY = Threshold(
    code="AMP730",
    name="memory",
    default=1.2,
    unit="factor",
    lowest=1.01,
    highest=1e6,
    why="Times the usual that the peak of memory is of late: batches of other lengths differ by less once the "
    "allocator has settled.",
)
RULE = register(
    "AMP730",
    "slows-down",
    "Steps take longer, or memory grows",
    worst="note",
    commands=WATCHED,
    thresholds=(FACTOR, MEMORY),
)


@RULE.judges(StepMoment)
def _slows_down(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.judged or moment.accepted % HOP:
        return ()
    return tuple(_slower(moment, thresholds))


def _slower(moment: StepMoment, thresholds: Thresholds) -> Iterator[Finding]:
    for course, early, limit, what, unit in (
        (moment.seconds, moment.early_seconds, thresholds[FACTOR], "A step takes", "s"),
        (moment.memory, math.inf, thresholds[MEMORY], "The peak of memory is", "bytes"),
    ):
        if course.count < LENGTH or course.highest < limit * min(course.lowest, early):
            continue  # as most: no values differ by as much as the medians would have to
        usual = min(course.usual, early)
        if not usual > 0 or course.recent < limit * usual:
            continue
        waits = moment.line.data_seconds
        data = unit == "s" and waits is not None and waits > 0.5 * (moment.line.seconds or 0.0)
        yield over_time_finding(
            RULE,
            "note",
            f"{what} {course.recent:.3g} {unit} at step {moment.line.step}, {course.recent / usual:.2g} times "
            f"the usual {usual:.3g}{'; most of it is waiting for data' if data else ''}.",
            step=moment.line.step,
            first="data" if data else "hardware",
            phase="data" if data else "optimizer",
            evidence={
                "what": "seconds" if unit == "s" else "memory_bytes",
                "recent": course.recent,
                "usual": usual,
            },
        )
