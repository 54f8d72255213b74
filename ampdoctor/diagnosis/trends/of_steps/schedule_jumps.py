"""AMP729: the learning rate, or the weight decay, of a parameter group jumps to where it has not been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import LEAST
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import Setting, StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FACTOR = Threshold(
    code="AMP729",
    name="factor",
    default=3.0,
    unit="factor",
    lowest=1.1,
    highest=1e9,
    why="From one step to the next, and above every value before: a warm-up goes step by step, a restart comes back to "
    "a rate that was there. Half a decade of learning rates lies between good and diverging.",
)
RULE = register(
    "AMP729",
    "schedule-jumps",
    "The learning rate or the weight decay jumps",
    worst="warning",
    commands=WATCHED,
    thresholds=(FACTOR,),
)

MOST_NAMED = 8
"""Parameters of a group that a finding names; it may have thousands."""


@RULE.judges(StepMoment)
def _schedule_jumps(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    changed = moment.rates.now != moment.rates.before or moment.decays.now != moment.decays.before
    return tuple(_jumps(moment, thresholds[FACTOR])) if changed and moment.accepted >= LEAST else ()


def _jumps(moment: StepMoment, factor: float) -> Iterator[Finding]:
    step = moment.line.step
    for what, setting in (("learning rate", moment.rates), ("weight decay", moment.decays)):
        group = _jumped(setting, factor, from_zero=setting is moment.decays)
        if group is None:
            continue
        before, now = setting.before[group], setting.now[group]
        several = len(setting.now) > 1
        tensors = moment.groups[group] if several and group < len(moment.groups) else ()
        of_group = f" of parameter group {group}" if several else ""
        if tensors:
            of_group += f" ({TENSOR}{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''})"
        times = "" if before <= 0 or now < 0 else f", {now / before:.3g} times, and above every value before"
        yield over_time_finding(
            RULE,
            "warning",
            f"The {what}{of_group} jumps from {before:.3g} to {now:.3g} at step {step}{times}.",
            step=step,
            first="optimizer",
            tensor=next(iter(tensors), None),
            also=tensors[1:MOST_NAMED],
            evidence={
                "what": what.replace(" ", "_"),
                "group": group,
                "tensors": len(tensors),
                "before": before,
                "now": now,
                "highest_before": setting.highest[group],
            },
        )


def _jumped(setting: Setting, factor: float, *, from_zero: bool) -> int | None:
    """The first group whose setting has jumped; None where none has.

    A learning rate that was zero belongs to a warm-up's first step or to a group that was frozen; a weight decay that
    was zero was meant to be, and one below zero never is.
    """
    for group, (before, now, highest) in enumerate(zip(setting.before, setting.now, setting.highest, strict=False)):
        if from_zero and (now < 0 <= before or before == 0 == highest < now):
            return group
        if before > 0 and now >= factor * max(before, highest):
            return group
    return None
