"""Rules on the loss scale, the schedule, the batches and the speed over a run's steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue import WATCHED, figure, rule, scale_text
from ampdoctor.diagnosis.health.judge import TENSOR
from ampdoctor.diagnosis.health.rolling import HOP, LEAST, LENGTH, RollingStats, falls_over
from ampdoctor.diagnosis.health.step_state import HOPELESS, LEAST_ROWS, Setting, StepState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

SCALE_RATCHETS = rule("AMP723", WATCHED)


@SCALE_RATCHETS.judges(StepState)
def _scale_ratchets(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    scale = moment.scale
    if scale.now is None or not (scale.unmoved or scale.falls or scale.in_a_row):
        return ()  # as at most steps
    stuck = scale.unmoved >= thresholds[SCALE_RATCHETS["at_floor"]]
    if not (stuck or (scale.settled and (scale.falls or scale.in_a_row))):
        return ()
    line, least, in_a_row = moment.line, thresholds[SCALE_RATCHETS["least"]], thresholds[SCALE_RATCHETS["in_a_row"]]
    overflows = scale.in_a_row > 0 and scale.until == line.step
    low = scale.highest >= least and (scale.now < least or (overflows and scale.now <= least))
    many = scale.falls >= thresholds[SCALE_RATCHETS["falls"]] or scale.in_a_row >= in_a_row
    ended = moment.end is not None and bool(moment.end.reason or moment.end.exit_code) and scale.in_a_row >= in_a_row
    if not (low or stuck or many):
        return ()
    deep = low and scale.now <= least * 2.0**-in_a_row
    severity: Severity = "error" if (low and scale.in_a_row >= in_a_row) or deep or stuck or ended else "warning"
    skipped = f". {scale.in_a_row} steps in a row are skipped" if scale.in_a_row > 1 else ""
    if stuck:
        skipped += f", the last {scale.unmoved} of them without a fall: no step is taken any more"
    elif overflows and low:
        skipped += ": gradients overflow even at this scale"
    if ended:
        skipped += "; the run has ended there"
    fallen = f"is {scale_text(scale.now)} at step {line.step:,}"
    if scale.falls:
        often = f"{scale.falls} times since it last grew (a factor of {figure(2.0**scale.fallen)} in all)"
        fallen = f"has fallen to {scale_text(scale.now)} at step {line.step:,}, {often}"
    ahead = max(0, int(scale.now).bit_length() - 1) if scale.now > 1 else 0
    finding = SCALE_RATCHETS.finding(
        severity,
        f"The loss scale {fallen}{skipped}"
        f"{f'. After {ahead} more it is 1, which scales nothing' if ahead and not (low or ended) else ''}.",
        where=Where(step=line.step, phase="scaler"),
        evidence={
            "first": moment.first(),
            "scale": scale.now,
            "highest": scale.highest,
            "falls": scale.falls,
            "log2_fallen": scale.fallen,
            "skipped_in_a_row": scale.in_a_row,
            "steps_between_falls": list(scale.lengths),
            **({"ended": moment.end.reason or True} if ended and moment.end is not None else {}),
        },
    )
    return (finding,)


NO_STEP_TAKEN = rule("AMP740", WATCHED)


@NO_STEP_TAKEN.judges(StepState)
def _no_step_taken(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    scale = moment.scale
    if scale.is_new and scale.anew == thresholds[NO_STEP_TAKEN["starts"]]:
        return (_starts_over(moment),)
    if scale.in_a_row < LEAST_ROWS:
        return ()
    steps = scale.until - scale.since + 1
    from_the_first = not scale.taken
    gone = moment.end is not None and scale.now is not None and scale.now <= 1  # ended at a scale that scales nothing
    least = thresholds[NO_STEP_TAKEN["settling"]] if from_the_first and not gone else HOPELESS
    if steps < least or (not from_the_first and scale.now is not None):
        return ()  # AMP723 reports a scale that falls later
    if not scale.told and falls_over(scale.losses):  # then the norm is not what the optimizer saw
        return ()
    which = "from the first one on" if from_the_first else f"from step {scale.since:,} on"
    how = "is skipped" if scale.told else "has a gradient that is not finite, and by its loss it was skipped"
    at = f", at loss scale {scale_text(scale.now)} by now" if scale.now is not None else ""
    return (_finding(moment, "error", f"Each of {steps:,} steps {which} {how}{at}: the weights do not move."),)


def _starts_over(moment: StepState) -> Finding:
    scale, step = moment.scale, moment.line.step
    harm = "It skips its first steps each time" if scale.taken else "It never gets down to the scale that works"
    message = (
        f"The loss scale is back at {scale_text(scale.now or 0.0)} at step {step:,}, {scale.anew} times by now: "
        f"the loop makes a new GradScaler, as in each epoch. {harm} ({scale.skipped:,} of "
        f"{scale.taken + scale.skipped:,} steps were skipped). Make it once, before the epochs."
    )
    return _finding(moment, "warning" if scale.taken else "error", message)


def _finding(moment: StepState, severity: Severity, message: str) -> Finding:
    scale = moment.scale
    return NO_STEP_TAKEN.finding(
        severity,
        message,
        where=Where(step=moment.line.step, phase="scaler"),
        evidence={
            "first": moment.first("scale"),
            "scale": scale.now,
            "first_scale": scale.first,
            "taken": scale.taken,
            "skipped": scale.skipped,
            "skipped_in_a_row": scale.in_a_row,
            "starts_over": scale.anew,
        },
    )


NO_SUCH_SCALE = rule("AMP742", WATCHED)


@NO_SUCH_SCALE.judges(StepState)
def _no_such_scale(moment: StepState, _: Thresholds) -> Sequence[Finding]:
    wrong = moment.scale.wrong
    if wrong is None:
        return ()
    if math.isnan(wrong) and (moment.end is None or moment.scale.wrong_rows <= moment.scale.wrong_before):
        return ()  # NaN may mean "not logged at this step": a scale follows
    since = moment.scale.wrong_since
    lost = wrong == 0 or not math.isfinite(wrong)
    harm = "gradients divided by it are lost" if lost else "no scaler has such a scale"
    finding = NO_SUCH_SCALE.finding(
        "error",
        f"The loss scale is {wrong:g} from step {since:,} on: {harm}.",
        where=Where(step=since, phase="scaler"),
        evidence={"first": "scale", "scale": wrong, "last_scale": moment.scale.now},
    )
    return (finding,)


SCHEDULE_JUMPS = rule("AMP729", WATCHED)

MOST_NAMED = 8  # parameters of a group that a finding names; it may have thousands


@SCHEDULE_JUMPS.judges(StepState)
def _schedule_jumps(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    changed = moment.rates.now != moment.rates.before or moment.decays.now != moment.decays.before
    return tuple(_jumps(moment, thresholds[SCHEDULE_JUMPS["factor"]])) if changed and moment.accepted >= LEAST else ()


def _jumps(moment: StepState, factor: float) -> Iterator[Finding]:
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
        times = "" if before <= 0 or now < 0 else f" ({figure(now / before)} times), above every value before"
        yield SCHEDULE_JUMPS.finding(
            "warning",
            f"The {what}{of_group} jumps from {before:.3g} to {now:.3g} at step {step:,}{times}.",
            where=Where(step=step, phase="optimizer", tensor=str(tensors[0]) if tensors else None),
            also=tuple(Where(step=step, phase="optimizer", tensor=str(one)) for one in tensors[1:MOST_NAMED]),
            evidence={
                "first": "optimizer",
                "what": what.replace(" ", "_"),
                "group": group,
                "tensors": len(tensors),
                "before": before,
                "now": now,
                "highest_before": setting.highest[group],
            },
        )


def _jumped(setting: Setting, factor: float, *, from_zero: bool) -> int | None:
    """Returns the first group whose setting has jumped.

    A learning rate of zero is a warm-up's first step or a frozen group. A weight decay of zero was meant, and one below
    zero never is.
    """
    for group, (before, now, highest) in enumerate(zip(setting.before, setting.now, setting.highest, strict=False)):
        if from_zero and (now < 0 <= before or before == 0 == highest < now):
            return group
        if before > 0 and now >= factor * max(before, highest):
            return group
    return None


BATCH_CHANGES = rule("AMP736", WATCHED)
BATCH_CHANGES_ZEROS = BATCH_CHANGES["zeros"]

_FAR_ZEROS = 2.5
"""Robust deviations by which the mean of the last 16 shares of zeros must lie above the usual: ten of such a mean."""


@BATCH_CHANGES.judges(StepState)
def _batch_changes(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    line, batch = moment.line, moment.batch
    rms, zeros = line.batch_rms, line.batch_zero_share
    if rms is None or zeros is None or batch.rms.count < LENGTH or batch.size.other:
        return ()
    outside, more = batch.rms.outside(rms), thresholds[BATCH_CHANGES_ZEROS]
    if not outside and max(zeros, batch.zeros.highest) - batch.zeros.usual < more:
        return ()  # as for most batches: the checks below require more
    what, above = "", batch.rms.above(rms)
    if (
        abs(outside) >= math.log(thresholds[BATCH_CHANGES["factor"]])
        and abs(above) >= thresholds[BATCH_CHANGES["deviations"]]
    ):
        what = (
            f"The root mean square of the batch of step {line.step:,} is {figure(rms)}; {figure(batch.rms.usual)} is "
            f"usual. No recent batch was so far {'above' if outside > 0 else 'below'}."
        )
    elif zeros - batch.zeros.highest >= more or _more_zeros(batch.zeros) >= more:
        what = (
            f"{zeros:.0%} of the batch of step {line.step:,} is zero; {batch.zeros.usual:.0%} is usual. "
            "Look at what the loader returns where it fails to load."
        )
    if not what:
        return ()
    finding = BATCH_CHANGES.finding(
        "warning",
        what,
        where=Where(step=line.step, phase="data"),
        evidence={
            "first": "data",
            "rms": rms,
            "usual_rms": batch.rms.usual,
            "deviations": above,
            "zero_share": zeros,
            "usual_zero_share": batch.zeros.usual,
        },
    )
    return (finding,)


def _more_zeros(zeros: RollingStats) -> float:
    """Returns the rise of the share of zeros, where it is above the usual; else 0."""
    return zeros.latest - zeros.usual if zeros.lifts()[-1] >= _FAR_ZEROS else 0.0


DATA_REPEATS = rule("AMP735", WATCHED)


@DATA_REPEATS.judges(StepState)
def _data_repeats(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    repeats = moment.batch.repeats
    if not repeats.steps:
        return ()
    steps = int(thresholds[DATA_REPEATS["steps"]])
    if repeats.steps != steps or repeats.new_before < thresholds[DATA_REPEATS["new"]]:
        return ()
    step = moment.line.step
    finding = DATA_REPEATS.finding(
        "warning",
        f"Each batch of the last {steps:,} steps, to step {step:,}, is the one of {repeats.cycle:,} steps before. "
        f"The {repeats.new_before:,} batches before them were all new.",
        where=Where(step=step, phase="data"),
        evidence={"first": "data", "cycle": repeats.cycle, "new_before": repeats.new_before},
    )
    return (finding,)


SLOWS_DOWN = rule("AMP730", WATCHED)
SLOWS_DOWN_FACTOR = SLOWS_DOWN["factor"]
SLOWS_DOWN_MEMORY = SLOWS_DOWN["memory"]


@SLOWS_DOWN.judges(StepState)
def _slows_down(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.judged or moment.accepted % HOP:
        return ()
    return tuple(_slower(moment, thresholds))


def _slower(moment: StepState, thresholds: Thresholds) -> Iterator[Finding]:
    for course, early, limit, what, unit in (
        (moment.seconds, moment.early_seconds, thresholds[SLOWS_DOWN_FACTOR], "A step takes", "s"),
        (moment.memory, math.inf, thresholds[SLOWS_DOWN_MEMORY], "The peak of memory is", "bytes"),
    ):
        if course.count < LENGTH or course.highest < limit * min(course.lowest, early):
            continue  # as for most: the values do not differ enough for the medians to
        usual = min(course.usual, early)
        if not usual > 0 or course.recent < limit * usual:
            continue
        waits = moment.line.data_seconds
        data = unit == "s" and waits is not None and waits > 0.5 * (moment.line.seconds or 0.0)
        yield SLOWS_DOWN.finding(
            "note",
            f"{what} {figure(course.recent)} {unit} at step {moment.line.step:,}, {course.recent / usual:.2g} times "
            f"the usual {figure(usual)}{'; most of it is waiting for data' if data else ''}.",
            where=Where(step=moment.line.step, phase="data" if data else "optimizer"),
            evidence={
                "first": "data" if data else "hardware",
                "what": "seconds" if unit == "s" else "memory_bytes",
                "recent": course.recent,
                "usual": usual,
            },
        )
